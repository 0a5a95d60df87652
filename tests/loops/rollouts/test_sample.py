"""What a sample promises, and what it is refused for."""

import dataclasses

import pytest
from burnish.loops.rollouts.sample import (
    Context,
    Request,
    Sample,
    SamplingParams,
    VersionSpan,
    check_sample,
)
from burnish.loops.rollouts.source import SourceError, check_completions


def asked(**changes):
    return Request(
        **{
            "task": 3,
            "prompt": [1],
            "indices": [0],
            "sampling": SamplingParams(5),
            "key": 7,
            **changes,
        }
    )


GOOD = Sample(
    2,
    1,
    [5],
    [6, 7, 8],
    [True, False, True],
    [-1.0, 0.0, -2.0],
    [VersionSpan(4, 0, 1), VersionSpan(3, 2, 3)],
    "stop",
)


OTHER = Context([5, 6], [9, 9], [False, True], [0.0, -3.0], [VersionSpan(2, 1, 2)])
SEVERAL = dataclasses.replace(GOOD, further=[OTHER])


def test_a_seed_depends_on_key_task_index_and_turn_and_on_nothing_else():
    seeds = {
        asked(**{name: value}).seed(index)
        for name in ("key", "task", "turn")
        for value in (10, 11, 101)
        for index in (0, 1)
    }
    assert len(seeds) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)
    other = asked(prompt=[9, 9], indices=[4, 5], sampling=SamplingParams(9, 0.5))
    assert other.seed(0) == asked().seed(0) == 582134548833555883


def test_digits_of_neighbors_are_not_run_together():
    assert asked(task=1, key=11).seed(1) != asked(task=11, key=1).seed(1)
    assert asked(task=1).seed(11) != asked(task=11).seed(1) != asked(task=1, turn=1).seed(1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"max_tokens": 0}, "max_tokens: must be >= 1, got 0"),
        ({"temperature": -0.1}, "temperature: must be >= 0, got -0.1"),
        ({"top_p": 0.0}, r"top_p: must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, r"min_p: must be in \[0, 1\], where 0 keeps all, got -0.1"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -1}, "top_k: must be >= 0, where 0 keeps all, got -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be > 0, where 1 is none, got 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: must be > 0"),
        (
            {"stop_words": ("a", "")},
            r"stop_words: wanted texts that are not empty, got \('a', ''\)",
        ),
        ({"stop_words": "a"}, "stop_words: wanted texts"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(how, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(**{"max_tokens": 1, **how})


def test_the_oldest_version_need_not_be_the_first():
    assert GOOD.oldest == 3


def test_a_conversation_counts_the_tokens_and_versions_of_all_its_contexts():
    assert [context.tokens for context in SEVERAL.contexts] == [[6, 7, 8], [9, 9]]
    assert SEVERAL.contexts[0].tokens is SEVERAL.tokens
    assert SEVERAL.length == 3 and GOOD.length == 2
    assert SEVERAL.versions == {2, 3, 4} and SEVERAL.oldest == 2


def test_a_copy_shares_no_list_with_its_sample():
    copied = SEVERAL.copy()
    assert copied == SEVERAL
    for mine, other in zip(copied.contexts, SEVERAL.contexts, strict=True):
        for name in ("prompt", "tokens", "trained", "logprobs", "spans"):
            assert getattr(mine, name) is not getattr(other, name)


def test_a_whole_sample_passes_and_so_does_a_hair_above_0():
    check_sample(GOOD)
    check_sample(dataclasses.replace(GOOD, logprobs=[1e-4, 0.0, -1.0]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": [-1.0, 0.0]}, "logprobs must have one entry per token, 3, got 2"),
        ({"trained": [True] * 4}, "trained must have one entry per token, 3, got 4"),
        ({"prompt": []}, "its prompt is empty"),
        ({"logprobs": [-1.0, 0.0, float("nan")]}, "log-probs must be finite and <= 0, got nan"),
        ({"logprobs": [-1.0, 0.0, float("-inf")]}, "log-probs must be finite and <= 0, got -inf"),
        ({"logprobs": [-1.0, 0.0, 0.1]}, "log-probs must be finite and <= 0, got 0.1"),
        (
            {"tokens": [], "trained": [], "logprobs": [], "spans": []},
            "it has no token of the policy",
        ),
        ({"trained": [False] * 3}, "it has no token of the policy"),
        ({"spans": [VersionSpan(4, 0, 1)]}, "no version is known for token 2, which was sampled"),
        (
            {"spans": [VersionSpan(4, 0, 2)], "trained": [True] * 3},
            "no version is known for token 2",
        ),
    ],
)
def test_parts_that_do_not_agree_are_refused(change, says):
    with pytest.raises(ValueError, match=f"sample 1 of task 2: .*{says}"):
        check_sample(dataclasses.replace(GOOD, **change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": [0.0]}, "logprobs must have one entry per token, 2, got 1"),
        ({"prompt": []}, "its prompt is empty"),
        ({"prompt": [-1]}, "prompt token -1 is outside the vocabulary of 50"),
        ({"tokens": [9, 50]}, "completion token 50 is outside the vocabulary of 50"),
        ({"trained": [False] * 2}, "it has no token of the policy"),
        ({"logprobs": [0.0, float("nan")]}, "log-probs must be finite and <= 0, got nan"),
        ({"spans": []}, "no version is known for token 1, which was sampled"),
    ],
)
def test_a_context_that_does_not_agree_is_refused_by_its_number(change, says):
    further = [OTHER, dataclasses.replace(OTHER, **change)]
    check_sample(SEVERAL, vocab=50)
    with pytest.raises(ValueError, match=f"^context 2 of sample 1 of task 2: .*{says}"):
        check_sample(dataclasses.replace(GOOD, further=further), vocab=50)


def test_a_conversation_that_never_began_has_no_further_contexts():
    empty = {"prompt": [], "tokens": [], "trained": [], "logprobs": [], "spans": []}
    never = dataclasses.replace(GOOD, finish="aborted", **empty)
    check_sample(never)
    with pytest.raises(ValueError, match=r"^sample 1 of task 2: it has no token of the policy"):
        check_sample(dataclasses.replace(never, further=[OTHER]))


def test_a_completion_of_one_prompt_has_one_context():
    request = asked(task=2, prompt=[5], indices=[1])
    check_completions([SEVERAL], request, "agent", conversations=True)
    with pytest.raises(SourceError, match="completion 1 has 2 contexts; asked for one"):
        check_completions([SEVERAL], request, "vllm")


def test_completions_that_were_asked_for_pass():
    request = asked(task=2, prompt=[5], indices=[1, 0])
    check_completions([GOOD, dataclasses.replace(GOOD, index=0)], request, "vllm")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": 3}, r"asked for its completions \[1\], got \[\(3, 1\)\]"),
        ({"index": 0}, r"got \[\(2, 0\)\]"),
        ({"prompt": [5, 5]}, "completion 1 is of another prompt"),
        ({"logprobs": [-1.0]}, "logprobs must have one entry per token"),
        (
            {
                "tokens": [6] * 6,
                "trained": [True] * 6,
                "logprobs": [-1.0] * 6,
                "spans": [VersionSpan(4, 0, 6)],
            },
            "got 6",
        ),
    ],
)
def test_completions_that_were_not_asked_for_are_refused(change, says):
    with pytest.raises(SourceError, match=f"vllm: task 2: .*{says}"):
        check_completions(
            [dataclasses.replace(GOOD, **change)], asked(task=2, prompt=[5], indices=[1]), "vllm"
        )


def test_a_completion_that_is_missing_is_refused():
    with pytest.raises(SourceError, match=r"asked for its completions \[0, 1\], got \[\(2, 1\)\]"):
        check_completions([GOOD], asked(task=2, prompt=[5], indices=[0, 1]), "vllm")


def test_text_does_not_stop_a_completion():
    with pytest.raises(ValueError, match=r"stop: wanted token ids, .*, got \('x',\)"):
        SamplingParams(4, stop=("x",))
