"""Lengths and repetitions: equations, and tokens that the policy did not sample."""

import math

import pytest
from burnish.loops.rewards.length import CosineLength, LengthTarget, Repetition, SoftOverlong

ROW = {}


def of(answer, count):
    return answer(tokens=range(count))


def test_length_is_the_distance_from_its_target(answer):
    reward = LengthTarget(100, coefficient=0.01)
    assert [reward(ROW, of(answer, n)) for n in (0, 90, 100, 130)] == pytest.approx(
        [-1.0, -0.1, 0.0, -0.3]
    )


def test_soft_overlong_is_equation_13(answer):
    reward = SoftOverlong(limit=20, buffer=4)
    expected = {0: 0, 16: 0, 17: -0.25, 18: -0.5, 20: -1.0, 21: -1.0, 10_000: -1.0}
    assert {n: reward(ROW, of(answer, n)) for n in expected} == pytest.approx(expected)


def test_soft_overlong_without_a_buffer_is_a_step(answer):
    assert [SoftOverlong(5, 0)(ROW, of(answer, n)) for n in (5, 6)] == [0.0, -1.0]


def test_only_sampled_tokens_count(answer):
    """What a tool says is no fault of the policy's."""
    sample = answer(tokens=[1, 2, 3, 1, 2, 3, 1, 2], trained=[True, True] + [False] * 5 + [True])
    assert LengthTarget(3)(ROW, sample) == 0.0
    assert SoftOverlong(3, 1)(ROW, sample) == -1.0 and SoftOverlong(4, 1)(ROW, sample) == 0.0
    assert Repetition(n=2)(ROW, sample) == 0.0  # (1, 2), and (2, 2) over the tool's answer is none


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([], 3, 0.0),
        ([1, 2], 3, 0.0),
        ([1, 2, 3, 4], 2, 0.0),
        ([5, 5, 5, 5, 5], 2, -0.75),  # 4 bigrams, 1 of its own
        ([1, 2, 1, 2, 1], 2, -0.5),  # 12 21 12 21
        ([7, 7], 1, -0.5),
    ],
)
def test_repetition_is_the_share_of_repeated_ngrams(tokens, n, expected, answer):
    assert Repetition(n)(ROW, answer(tokens=tokens)) == pytest.approx(expected)
    assert Repetition(n, penalty=3.0)(ROW, answer(tokens=tokens)) == pytest.approx(3 * expected)


def test_cosine_runs_from_one_end_to_the_other(answer):
    right = CosineLength(100, right=(2.0, 1.0), wrong=(-10.0, 0.0), correct=lambda row, sample: 1.0)
    wrong = CosineLength(100, right=(2.0, 1.0), wrong=(-10.0, 0.0), correct=lambda row, sample: 0.0)
    for n in (0, 25, 50, 100, 250):
        c = (1 + math.cos(math.pi * min(n / 100, 1))) / 2
        assert right(ROW, of(answer, n)) == pytest.approx(1 + c)
        assert wrong(ROW, of(answer, n)) == pytest.approx(-10 * c)


def test_cosine_passes_on_that_an_answer_cannot_be_scored(answer):
    def scored(correct):
        return CosineLength(10, correct=lambda row, sample: correct)(ROW, of(answer, 5))

    assert scored(None) is None  # it does not apply
    assert math.isnan(scored(math.nan)) and math.isnan(scored("right"))


def test_cosine_needs_the_columns_of_what_it_asks():
    assert CosineLength(10).columns == ("answer",)


def test_cosine_is_a_plain_function_of_a_plain_function():
    async def correct(row, sample):
        return 1.0

    with pytest.raises(ValueError, match="correct must be a plain function"):
        CosineLength(10, correct=correct)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthTarget(-1), r"length\.target: must be >= 0, got -1"),
        (lambda: LengthTarget("far"), r"length\.target: wanted a whole number >= 0, got 'far'"),
        (lambda: LengthTarget(1, coefficient=0), r"length\.coefficient: must be > 0, got 0"),
        (lambda: SoftOverlong(0, 0), r"soft_overlong\.limit: must be > 0, got 0"),
        (lambda: SoftOverlong(4, -1), r"soft_overlong\.buffer: must be >= 0, got -1"),
        (lambda: SoftOverlong(4, 5), "soft_overlong: wanted buffer <= limit, got 5 and 4"),
        (lambda: Repetition(0), r"repetition\.n: must be > 0, got 0"),
        (lambda: Repetition(3, penalty=-1.0), r"repetition\.penalty: must be >= 0, got -1.0"),
        (lambda: Repetition(3, penalty=math.inf), r"repetition\.penalty: must be finite, got inf"),
        (lambda: CosineLength(0), r"cosine\.limit: must be > 0, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
