"""Trained judges: they score the sampled tokens, as the model itself does."""

import copy

import pytest
import torch
from burnish.loops.models.scorer import Scorer
from burnish.loops.rewards import RewardFunction, resolve_rewards
from burnish.loops.rewards import reward_models as models
from burnish.loops.rewards.reward_models import ProcessRewardModel, RewardModel
from burnish.objectives import step_aggregate
from tiny import make_classifier, save_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForTokenClassification,
)

EXACT = 1e-5  # transformers computes norms in float32


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def judge_of_steps(directory, tmp_path_factory):
    """A token classifier over the policy's tokens, with two labels, on disk."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(directory, num_labels=2, pad_token_id=0)
    target = tmp_path_factory.mktemp("prm")
    LlamaForTokenClassification(config).double().save_pretrained(target)
    AutoTokenizer.from_pretrained(directory).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def judge(directory, tmp_path_factory):
    """A sequence classifier over the policy's tokens, on disk."""
    target = tmp_path_factory.mktemp("judge")
    make_classifier("SEQ_CLS").save_pretrained(target)
    AutoTokenizer.from_pretrained(directory).save_pretrained(target)
    return str(target)


@pytest.mark.parametrize("micro_tokens", [1, 12, 8192])
def test_the_score_is_the_models_of_prompt_and_answer(
    micro_tokens, judge, tokenizer, answer, judging
):
    reward = RewardModel(judge, tokenizer, device="cpu", micro_tokens=micro_tokens)
    answers = [[5, 6, 7, 2], [8], [9, 10, 11, 12, 13], []]
    samples = [answer(tokens=tokens, prompt=[3, 4], index=i) for i, tokens in enumerate(answers)]
    samples.append(answer(tokens=[5, 6], prompt=[30, 31, 32], task=1))
    unscored = judging([RewardFunction("rm", reward)], [{}] * 5, samples)
    # an answer that has no end
    assert unscored == {("rm", "none"): 1} and samples[3].rewards == {"rm": None}
    for sample in (*samples[:3], samples[4]):
        ids = torch.tensor([sample.prompt + sample.tokens])
        expected = reward.scorer.plain(ids).logits.item()
        assert sample.rewards["rm"] == pytest.approx(expected, abs=EXACT)


def test_a_conversation_of_several_contexts_is_not_judged_by_its_first(
    judge, judge_of_steps, tokenizer, answer, judging, caplog
):
    sample = answer(tokens=[5, 6], prompt=[3, 4])
    sample.further = [sample.contexts[0]]
    rewards = [
        RewardFunction("rm", RewardModel(judge, tokenizer, device="cpu")),
        RewardFunction("prm", ProcessRewardModel(judge_of_steps, tokenizer, device="cpu")),
    ]
    assert judging(rewards, [{}], [sample]) == {("rm", "error"): 1, ("prm", "error"): 1}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("completion 0 of task 0 has 2 contexts" in text for text in said)


def test_equal_completions_have_equal_scores(judge, tokenizer, answer):
    """Their rows are rounded apart, and a standard deviation of rounding makes advantages of it."""
    answers = [list(range(5, 16)), list(range(20, 27)), list(range(5, 16))]
    reward = RewardModel(judge, tokenizer, device="cpu")
    reward.scorer.float()
    for task in range(4):
        prompt = list(range(3 + task, 20 + task))
        samples = [
            answer(tokens=tokens, prompt=prompt, index=i) for i, tokens in enumerate(answers)
        ]
        first, other, again = reward([{}] * 3, samples)
        assert first == again != other


def test_a_model_of_another_vocabulary_is_refused_by_its_first_token(
    judge, judge_of_steps, tokenizer
):
    other = copy.deepcopy(tokenizer)
    vocabulary = tokenizer.get_vocab()
    swapped = {**vocabulary, "a": vocabulary["b"], "b": vocabulary["a"]}
    other.get_vocab = lambda: swapped
    first = min(vocabulary["a"], vocabulary["b"])
    with pytest.raises(
        ValueError,
        match=rf"reward_model: token {first} is '[ab]' for the policy, and is '[ab]' for",
    ):
        RewardModel(judge, other)
    other.get_vocab = lambda: {**vocabulary, "extra": 9999}
    with pytest.raises(
        ValueError, match=r"prm: token 9999 is .* and does not exist for the reward model"
    ):
        ProcessRewardModel(str(judge_of_steps), other)


def test_a_model_that_knows_more_tokens_is_accepted(judge, tokenizer):
    fewer, vocabulary = copy.deepcopy(tokenizer), tokenizer.get_vocab()
    fewer.get_vocab = lambda: {token: index for token, index in vocabulary.items() if index != 7}
    RewardModel(judge, fewer, device="cpu")


@pytest.mark.parametrize("how", ["min", "prod", "last", "mean"])
def test_steps_are_judged_where_they_end(how, judge_of_steps, tokenizer, answer, judging):
    (reward,) = resolve_rewards(
        {"prm": {"model": str(judge_of_steps), "how": how, "device": "cpu"}}, tokenizer=tokenizer
    )
    tokens = tokenizer("1+1=2\n\n\n2+2=4\nso 4")["input_ids"]
    sample = answer(tokens=[*tokens, tokenizer.eos_token_id], prompt=[5, 6])
    assert judging([reward], [{}], [sample]) == {}

    newline = tokenizer("\n")["input_ids"][0]
    read = [5, 6, *tokens, newline]
    logits = reward.function.scorer.plain(torch.tensor([read])).logits[0]
    ends = [2 + len("1+1=2"), 2 + len("1+1=2\n\n\n2+2=4"), len(read) - 1]
    assert [read[end] for end in ends] == [newline] * 3
    probability = (logits[ends, 1] - logits[ends, 0]).sigmoid().double()
    expected = step_aggregate(probability, torch.zeros(3, dtype=torch.int64), 1, how=how).item()
    assert sample.rewards["prm"] == pytest.approx(expected, abs=EXACT)


def test_an_answer_without_steps_has_no_score(judge_of_steps, tokenizer, answer, judging):
    rewards = resolve_rewards(
        {"prm": {"model": str(judge_of_steps), "device": "cpu"}}, tokenizer=tokenizer
    )
    for text in ("", "\n\n"):
        assert judging(rewards, [{}], [answer(tokens=tokenizer(text)["input_ids"])]) == {
            ("prm", "none"): 1
        }


def test_steps_of_others_are_not_judged(judge_of_steps, tokenizer):
    reward = ProcessRewardModel(str(judge_of_steps), tokenizer, device="cpu")
    from burnish.loops.rollouts.sample import Sample

    tokens = tokenizer("a\nb\nc\n")["input_ids"]
    trained = [True, True, False, False, True, True]
    sample = Sample(0, 0, [5], tokens, trained, [0.0] * 6, [], "stop")
    assert reward._steps(sample) == (tokens, [False, True, False, False, False, True])


def test_a_separator_of_several_tokens_ends_a_step(judge_of_steps, tokenizer, answer):
    """None of these tokens is a character by itself."""
    reward = ProcessRewardModel(str(judge_of_steps), tokenizer, device="cpu")
    reward.scorer.plain.config.step_separator = "ки"
    first, second = (tokenizer(text)["input_ids"] for text in ("äки", "ки1ки"))
    ends = [
        place in (len(first) - 1, len(first) + len(second) - 1)
        for place in range(len(first) + len(second))
    ]
    assert len(first) == 6
    assert reward._steps(answer(tokens=[*first, *second])) == ([*first, *second], ends)


def test_a_reward_model_is_named_by_its_directory(directory, tmp_path, tokenizer, answer, judging):
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(directory, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rewards = resolve_rewards(
        {"reward_model": {"model": str(tmp_path), "device": "cpu"}}, tokenizer=tokenizer
    )
    sample = answer(tokens=[5, 6, 7], prompt=[8])
    assert judging(rewards, [{}], [sample]) == {}
    expected = LlamaForSequenceClassification.from_pretrained(tmp_path)(
        torch.tensor([[8, 5, 6, 7]])
    ).logits.item()
    assert sample.rewards["reward_model"] == pytest.approx(expected, abs=1e-4)


def test_scores_of_a_model_in_bfloat16_are_not_rounded_until_they_are_equal(
    directory, tmp_path, tokenizer, answer
):
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(directory, num_labels=1, pad_token_id=0)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.constant_(model.score.weight, 1.0)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = RewardModel(str(tmp_path), tokenizer, device="cpu")
    samples = [answer(tokens=[5, 6, last], prompt=[8], index=last) for last in range(10, 60)]
    numbers = reward([{}] * 50, samples)
    assert len(set(numbers)) == 50
    assert any(number != torch.tensor(number).bfloat16().item() for number in numbers)


def test_a_judge_is_loaded_on_the_device_that_is_given_unless_it_names_its_own(
    judge_of_steps, tokenizer, monkeypatch
):
    asked, load = [], models.load_scorer
    monkeypatch.setattr(
        models, "load_scorer", lambda *inputs: asked.append(inputs[-1]) or load(*inputs[:-1], "cpu")
    )
    for settings in ({}, {"device": "cpu"}):
        resolve_rewards(
            {"prm": {"model": str(judge_of_steps), **settings}},
            tokenizer=tokenizer,
            device="cuda:1",
        )
    assert asked == ["cuda:1", "cpu"]


def test_a_model_that_is_no_judge_is_refused(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(ValueError, match="no linear head of one or two outputs"):
        Scorer(model)


@pytest.mark.parametrize(
    ("kind", "where"), [("reward_model", "whole completions"), ("prm", "their steps")]
)
def test_a_causal_model_is_no_judge_of_either_kind(kind, where, directory, tokenizer):
    """Its head would be random, and the policy would be trained on noise."""
    says = rf"{kind}: .*score\.(weight|bias) is in none of its files, .*; wanted a model that scores {where}"
    with pytest.raises(ValueError, match=says):
        resolve_rewards({kind: {"model": str(directory), "device": "cpu"}}, tokenizer=tokenizer)


def test_the_two_kinds_of_judges_are_not_taken_for_each_other(judge, tmp_path, tokenizer):
    """A head of one output has the same name and shape in both."""
    make_classifier("TOKEN_CLS", labels=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for kind, model, is_one, other in (
        (
            "prm",
            judge,
            "LlamaForSequenceClassification, which scores whole completions",
            "reward_model",
        ),
        (
            "reward_model",
            str(tmp_path),
            "LlamaForTokenClassification, which scores their steps",
            "prm",
        ),
    ):
        says = rf"{kind}: .*it is a {is_one}.*; name it as {other}"
        with pytest.raises(ValueError, match=says):
            resolve_rewards({kind: {"model": model, "device": "cpu"}}, tokenizer=tokenizer)
