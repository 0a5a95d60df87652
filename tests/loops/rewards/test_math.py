"""Mathematics: the same value, however it is written, in any thread and without a way to hang."""

import asyncio
import time

import pytest
from burnish.loops.rewards import RewardFunction, isolated, score_samples
from burnish.loops.rewards.math import MathEquivalence
from burnish.loops.rollouts.event_loops import off_loop

pytest.importorskip("math_verify")

RIGHT = [
    ("42", "42"),
    ("42", "42.0"),
    ("42", "$42$"),
    ("42", r"so it is \boxed{42}"),
    ("42", "First 41, but no: **42**."),
    ("$42$", "42"),
    (42, "42"),
    (42.0, "42"),
    ("it is not \\boxed{41}\n#### 42", "42"),
    ("1/2", r"$\frac{1}{2}$"),
    (r"\frac12", "0.5"),
    ("0.5", "1/2"),
    ("(1,2)", "$(1,2)$"),
    ("[1, 2)", "$[1,2)$"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("x^2+1", "$1 + x^2$"),
    ("1,000", "1000"),
    ("10^{100}", "$10^{100}$"),
    ("1" * 400, "1" * 400),
    ("-5", "−5"),
    ("−5", "so it is $-5$"),
    ("0.5", "½"),
    ("½", "1/2"),
]
WRONG = [
    ("42", "43"),
    ("42", ""),
    ("42", "no idea"),
    ("42", "Ω ≠ 模型 🙂"),
    ("2", r"$\frac{$"),
    ("-5", "5"),
    ("[1,2)", "$(1,2)$"),
    ("1" * 400, "1" * 399 + "2"),
    ("-5", "−6"),
    ("21/2", "2½"),
    ("42", r"\boxed{41} because 42 is wrong"),
]


@pytest.mark.parametrize(("gold", "said"), RIGHT)
def test_equal_values_are_right(gold, said, answer):
    assert MathEquivalence()({"answer": gold}, answer(said)) == 1.0


@pytest.mark.parametrize(("gold", "said"), WRONG)
def test_other_values_and_no_values_are_wrong(gold, said, answer):
    assert MathEquivalence()({"answer": gold}, answer(said)) == 0.0


@pytest.mark.parametrize("gold", ["", None, "  ", "####", "１２"])
def test_a_row_whose_answer_cannot_be_read_scores_nobody(gold, answer):
    assert MathEquivalence()({"answer": gold}, answer("42")) is None


def test_it_reads_the_column_that_it_is_told(answer):
    reward = MathEquivalence(column="solution")
    assert reward.columns == ("solution",) and reward({"solution": "42"}, answer("42")) == 1.0


def test_it_works_in_a_thread_where_the_library_alone_does_not(answer):
    """The library's timeouts are signals, which Python delivers to the main thread only."""
    import math_verify

    with pytest.raises(ValueError, match=r"main thread|threaded environment"):
        asyncio.run(off_loop(lambda: math_verify.parse("$1$", raise_on_error=True)))
    assert asyncio.run(off_loop(lambda: MathEquivalence()({"answer": "42"}, answer("42")))) == 1.0


def test_what_the_library_fails_at_is_masked(answer, judging, monkeypatch):
    import math_verify

    def fails(*arguments, **options):
        raise RecursionError("too deep")

    monkeypatch.setattr(math_verify, "verify", fails)
    sample = answer("42")
    assert judging([RewardFunction("math", MathEquivalence())], [{"answer": "42"}], [sample]) == {
        ("math", "error"): 1
    }
    assert sample.rewards == {"math": "error"}


def test_an_endless_simplification_is_killed(answer):
    """The digits of a large factorial keep sympy busy, and it does not let go of the
    interpreter.
    """
    endless = "$100000000!$"
    reward = RewardFunction("math", isolated(MathEquivalence()), timeout=300)
    samples = [answer("42"), answer(endless), answer("42")]

    async def one_after_the_other():
        await score_samples([reward], [{"answer": "42"}], samples[:1])  # starts the process
        reward.timeout = 1.0
        begun = time.monotonic()
        await score_samples([reward], [{"answer": "42"}], samples[1:2])
        took = time.monotonic() - begun
        reward.timeout = 300
        await score_samples([reward], [{"answer": "42"}], samples[2:])
        return took

    took = asyncio.run(one_after_the_other())
    assert [sample.rewards["math"] for sample in samples] == [1.0, "timeout", 1.0]
    assert took < 60
