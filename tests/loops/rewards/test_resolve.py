"""Names in a configuration: shipped rewards, people's own, and what was probably meant."""

import sys

import pytest
from burnish.loops.rewards import isolated, resolve_rewards
from burnish.loops.rewards.length import CosineLength, LengthTarget, SoftOverlong
from burnish.loops.rewards.resolve import SHIPPED
from burnish.loops.rewards.text import ExactMatch, Format

MODULE = """
from dataclasses import dataclass

def shorter(row, sample):
    return -float(len(sample.text))

def theirs(prompts, completions, **columns):
    return [1.0] * len(completions)

async def judge_by_model(row, sample):
    return 0.5

@dataclass(frozen=True)
class Scaled:
    factor: float
    def __call__(self, row, sample):
        return self.factor

class Teller:
    def __init__(self, tokenizer, offset=0):
        self.tokenizer, self.offset = tokenizer, offset
    def __call__(self, row, sample):
        return self.offset

def of_text(text):
    return 1.0

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards_here"


def test_a_name_and_a_weight():
    format_, match = resolve_rewards({"format": 0.2, "exact_match": 1})
    assert (format_.name, format_.function, format_.weight) == ("format", Format(), 0.2)
    assert (match.name, match.function, match.weight) == ("exact_match", ExactMatch(), 1.0)


def test_settings_are_the_fields_of_the_reward():
    (reward,) = resolve_rewards(
        {"soft_overlong": {"weight": 0.5, "limit": 100, "buffer": 20, "timeout": 3}}
    )
    assert (reward.function, reward.weight, reward.timeout) == (SoftOverlong(100, 20), 0.5, 3.0)


def test_one_reward_may_stand_under_two_names():
    rewards = resolve_rewards(
        {f"to {target}": {"function": "length", "target": target} for target in (9, 99)}
    )
    assert [reward.name for reward in rewards] == ["to 9", "to 99"]
    assert [reward.function for reward in rewards] == [LengthTarget(9), LengthTarget(99)]


def test_what_may_never_return_is_isolated_unless_told_otherwise():
    math, plain = resolve_rewards({"math": 1.0, "plain": {"function": "math", "isolate": False}})
    assert isinstance(math.function, isolated) and math.function.columns == ("answer",)
    assert type(plain.function).__name__ == "MathEquivalence"
    (format_,) = resolve_rewards({"format": {"isolate": True}})
    assert isinstance(format_.function, isolated)


def test_a_reward_may_ask_another():
    (reward,) = resolve_rewards(
        {"cosine": {"limit": 10, "correct": "exact_match", "isolate": False}}
    )
    assert reward.function == CosineLength(10, correct=ExactMatch())


def test_own_functions_classes_and_those_written_for_trl(own, answer, judging):
    rewards = resolve_rewards(
        {
            f"{own}:shorter": 1.0,
            f"{own}:theirs": 1.0,
            f"{own}:judge_by_model": 1.0,
            f"{own}:Scaled": {"factor": 7.0},
            "teller": {"function": f"{own}:Teller", "offset": 2},
        },
        tokenizer="the policy's",
    )
    assert (rewards[1].function.over, rewards[1].function.columns) == ("step", ["prompt"])
    assert rewards[4].function.tokenizer == "the policy's"
    sample = answer("abc")
    judging(rewards, [{"prompt": "?"}], [sample])
    assert sample.rewards == {
        "shorter": -3.0,
        "theirs": 1.0,
        "judge_by_model": 0.5,
        "Scaled": 7.0,
        "teller": 2.0,
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, r"rewards: none is named; there are math, .*module:function"),
        ({"mth": 1.0}, "reward: no 'mth', did you mean 'math'.*your own is named module:function"),
        ({"qqq": 1.0}, "reward: no 'qqq'; there are code, cosine, environment"),
        ({"format": {"patern": "a"}}, "reward format: no setting 'patern', did you mean 'pattern'"),
        ({"length": 1.0}, r"reward length: needs target, such as \{length: \{target: ...\}\}"),
        (
            {"format": "heavy"},
            "reward format: wanted its weight, or a mapping of settings, got 'heavy'",
        ),
        ({"format": True}, "wanted its weight, or a mapping of settings, got True"),
        (
            {"short": len},
            "got <built-in function len>; your own function is a key: {function: 1.0}",
        ),
        ({"format": float("inf")}, "reward format: its weight must be finite"),
        ({"no_such_module_here:f": 1}, "no module 'no_such_module_here'"),
        (
            {"my_rewards_here:shortest": 1},
            "my_rewards_here has no 'shortest', did you mean 'shorter'",
        ),
        ({"my_rewards_here:number": 1}, "wanted a function or a class with __call__, got int"),
        (
            {"my_rewards_here:shorter": {"by": 3}},
            "a function has no settings, got by; make it a class",
        ),
        (
            {"my_rewards_here:Scaled": 1},
            r"needs factor, such as \{my_rewards_here:Scaled: \{factor: ...\}\}",
        ),
        ({"my_rewards_here:of_text": 1}, r"reward of_text: wanted .*\(row, sample\), got \(text\)"),
        ({"format": 1, "other:format": 1}, "no module 'other'"),
    ],
)
def test_mistakes_are_answered_with_what_was_meant(spec, message, own):
    with pytest.raises(ValueError, match=message):
        resolve_rewards(spec)


def test_two_of_one_name_are_refused(own):
    with pytest.raises(ValueError, match=r"two are called shorter; rename one"):
        resolve_rewards({f"{own}:shorter": 1, "shorter": {"function": f"{own}:shorter"}})


@pytest.mark.parametrize("spec", ["math", {"cosine": {"limit": 8, "correct": "math"}}])
def test_a_package_that_math_needs_is_missed_before_anything_is_scored(spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ValueError,
        match=r"^reward math: needs the package math-verify; pip install 'burnish\[math\]'",
    ):
        resolve_rewards(spec)


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "needs_pepper.py").write_text("import pepper_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"needs_pepper.py line 1: ModuleNotFoundError.*pepper_that_is_not_there"
    ):
        resolve_rewards({"needs_pepper:f": 1})


def test_a_module_that_is_not_python_says_where(tmp_path, monkeypatch):
    (tmp_path / "half_a_reward.py").write_text("import math\ndef right(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"half_a_reward.py line 2: SyntaxError: invalid syntax"):
        resolve_rewards({"half_a_reward:right": 1})


def test_an_environments_reward_needs_an_environment(answer, judging, caplog):
    rewards = resolve_rewards({"environment": 1.0})
    played, not_played = answer(environment_reward=0.75), answer(index=1)
    assert judging(rewards, [{}, {}], [played, not_played]) == {("environment", "error"): 1}
    assert (
        played.rewards == {"environment": 0.75}
        and "this completion comes from no environment" in caplog.text
    )


def test_an_environment_without_a_reward_does_not_apply_and_a_failed_one_is_unknown(
    answer, judging
):
    rewards = resolve_rewards({"environment": 1.0})
    silent, failed = answer(environment_reward=None), answer(index=1, environment_reward="aborted")
    judging(rewards, [{}, {}], [silent, failed])
    assert silent.rewards == {"environment": None} and failed.rewards == {"environment": "nan"}


def test_every_shipped_name_stands_for_something():
    from burnish.loops.registry import find

    for name in SHIPPED:
        assert callable(find("reward", name, SHIPPED, "burnish.loops.rewards"))
