"""`burnish score`: what a trained model says of completions, held against transformers' own forward
pass.
"""

import json

import pytest
import torch
from burnish.data import encode_supervised, example
from burnish.loops.cli import main
from burnish.loops.cli.score import best_of
from tiny import save_model, sums, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from worlds import chains

PAIRS = sums(6)
STEPS = list(chains(6, seed=0))
ONLINE = ["--rewards", "{exact_match: 1.0}", "--prompts_per_rollout", "2", "--group_size", "4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, a model to begin with, and a short run of each kind of model."""
    place = tmp_path_factory.mktemp("scored")
    save_model(place / "start")
    write_rows(place / "pairs.jsonl", PAIRS)
    write_rows(place / "steps.jsonl", STEPS)
    write_rows(
        place / "chats.jsonl", [{"messages": each["prompt"] + each["chosen"]} for each in PAIRS]
    )
    write_rows(
        place / "prompts.jsonl", [{"prompt": each["prompt"], "answer": "7"} for each in PAIRS]
    )
    train(place, "reward", "pairs.jsonl")
    train(place, "prm", "steps.jsonl", "--separator", "=")
    train(place, "grpo", "prompts.jsonl", *ONLINE, "--max_tokens", "5", "--show_every", "1")
    return place


def train(place, recipe, data, *more):
    words = ["--model", str(place / "start"), "--data", str(place / data), "--steps", "2"]
    words += ["--output", str(place / recipe), "--learning_rate", "1e-2"]
    assert main([recipe, *words, *more]) == 0


def scored(capsys, *words):
    capsys.readouterr()
    assert main(["score", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def close(value, wanted):
    return value == pytest.approx(wanted, abs=1e-5)


@torch.no_grad()
def reward_of(place, messages):
    tokenizer = AutoTokenizer.from_pretrained(place / "reward/model")
    model = AutoModelForSequenceClassification.from_pretrained(place / "reward/model")
    row = {"prompt": messages[:-1], "completion": messages[-1:]}
    data, _ = encode_supervised([row], tokenizer, train_on="completion")
    ids = example(data, 0)
    return model(torch.tensor([ids.prompt + ids.completions[0]])).logits.item()


def test_the_scores_of_a_reward_model_are_those_of_transformers(place, capsys):
    rows = scored(capsys, place / "reward", place / "pairs.jsonl", "--micro_tokens", 40)
    assert len(rows) == len(PAIRS)
    for row, pair in zip(rows, PAIRS, strict=True):
        assert row["prompt"] == pair["prompt"] and row["chosen"] == pair["chosen"]
        for name in ("chosen", "rejected"):
            wanted = reward_of(place, pair["prompt"] + pair[name])
            assert close(row[f"score_{name}"], wanted)
    chats = scored(capsys, place / "reward/model", place / "chats.jsonl")
    assert all(
        close(chat["score"], row["score_chosen"]) for chat, row in zip(chats, rows, strict=True)
    )


@torch.no_grad()
def test_the_scores_of_steps_are_those_of_transformers(place, capsys, tmp_path):
    unlabeled = [{name: row[name] for name in ("prompt", "completions")} for row in STEPS]
    data = write_rows(tmp_path / "steps.jsonl", unlabeled)
    tokenizer = AutoTokenizer.from_pretrained(place / "prm/model")
    model = AutoModelForTokenClassification.from_pretrained(place / "prm/model")
    rows = scored(capsys, place / "prm", data, "--how", "prod")
    assert len(rows) == len(STEPS)
    for row, solution in zip(rows, STEPS, strict=True):
        ids, wanted = tokenizer(solution["prompt"])["input_ids"], []
        for step in solution["completions"]:
            ids = ids + tokenizer(f"{step}=", add_special_tokens=False)["input_ids"]
            wanted.append(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1].item())
        assert close(row["step_scores"], wanted)
        assert close(row["score"], torch.tensor(wanted).prod().item())


@torch.no_grad()
@pytest.mark.parametrize("micro_tokens", [1, 8192])
def test_the_log_probs_of_a_policy_are_those_of_transformers(micro_tokens, place, capsys):
    tokenizer = AutoTokenizer.from_pretrained(place / "grpo/model")
    model = AutoModelForCausalLM.from_pretrained(place / "grpo/model")
    rows = scored(capsys, place / "grpo", place / "chats.jsonl", "--micro_tokens", micro_tokens)
    data, _ = encode_supervised(str(place / "chats.jsonl"), tokenizer)
    for index, row in enumerate(rows):
        each = example(data, index)
        ids = torch.tensor([each.prompt + each.completions[0]])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        drawn = logprobs[torch.arange(len(logprobs)), ids[0, 1:]]
        trained = torch.tensor([False] * (len(each.prompt) - 1) + each.trained[0])
        assert row["tokens"] == sum(each.trained[0]) > 0
        assert close(row["logprob"], drawn[trained].sum().item())
        assert close(row["logprob_mean"], drawn[trained].mean().item())


@pytest.mark.parametrize("judge", ["grpo", "reward", "prm"])
def test_the_best_samples_of_a_run_become_data_of_sft_and_dpo(judge, place, capsys, tmp_path):
    samples = place / "grpo/samples.jsonl"
    rows = scored(capsys, place / judge, samples)
    by = "logprob_mean" if judge == "grpo" else "score"
    groups = {}
    for row in rows:
        groups.setdefault(row["task"], []).append(row)
    # a completion without a step has no score of steps
    assert len(groups) == 4 and (len(rows) == 16 or judge == "prm")
    best = scored(capsys, place / judge, samples, "--best", "sft")
    assert [row[by] for row in best] == [
        max(row[by] for row in group if row["completion"]) for group in groups.values()
    ]
    assert (
        main(
            [
                "score",
                str(place / judge),
                str(samples),
                str(tmp_path / "dpo.jsonl"),
                "--best",
                "dpo",
            ]
        )
        == 0
    )
    pairs = [json.loads(line) for line in (tmp_path / "dpo.jsonl").read_text().splitlines()]
    assert pairs and all(pair[f"{by}_chosen"] > pair[f"{by}_rejected"] for pair in pairs)
    words = ["--data", str(tmp_path / "dpo.jsonl"), "--model", str(place / "start"), "--steps", "1"]
    assert main(["dpo", *words, "--output", str(tmp_path / "run"), "--beta", "0.2"]) == 0


def test_the_text_of_a_sampled_prompt_is_tokenized_as_it_was(place, capsys):
    samples = [json.loads(line) for line in (place / "grpo/samples.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(place / "grpo/model")
    for row, sample in zip(
        scored(capsys, place / "grpo", place / "grpo/samples.jsonl"), samples, strict=True
    ):
        assert tokenizer(row["prompt"])["input_ids"] == sample["prompt"]
        assert row["completion"] == sample["text"]


def test_samples_are_compared_by_a_reward_of_their_run(place, capsys, tmp_path):
    records = [json.loads(line) for line in (place / "grpo/samples.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        record["rewards"] = {"mine": None if number % 4 == 0 else float(number % 4)}
    samples = write_rows(tmp_path / "samples.jsonl", records)
    best = scored(capsys, place / "grpo", samples, "--best", "sft", "--reward", "mine")
    assert [row["completion"] for row in best] == [records[i]["text"] for i in range(3, 16, 4)]
    assert main(["score", str(place / "grpo"), str(samples), "--best", "sft", "--reward", "m"]) == 1
    assert "the samples have no 'm'; there are mine" in capsys.readouterr().err


def test_conversations_of_several_contexts_are_left_out(place, capsys, caplog, tmp_path):
    records = [json.loads(line) for line in (place / "grpo/samples.jsonl").read_text().splitlines()]
    names = ("prompt", "tokens", "trained", "logprobs", "spans")
    records[1]["further"] = [{name: records[2][name] for name in names}]
    samples = write_rows(tmp_path / "samples.jsonl", records)
    rows = scored(capsys, place / "grpo", samples)
    others = [record for i, record in enumerate(records) if i != 1]
    assert [row["completion"] for row in rows] == [record["text"] for record in others]
    (warning,) = [record.getMessage() for record in caplog.records if "contexts" in record.msg]
    assert warning.startswith("1 of 16 conversations have several contexts, and are left out")


def test_prompts_whose_completions_are_worth_the_same_make_no_pair():
    rows = [{"prompt": "a", "completion": text, "score": 1.0} for text in ("b", "c")]
    rows += [{"prompt": "d", "completion": text, "score": len(text)} for text in ("e", "fgh", "ij")]
    rows.append({"prompt": "d", "completion": "", "score": 9})
    (pair,) = best_of(rows, "dpo", "score")
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("d", "fgh", "e")
    assert [row["completion"] for row in best_of(rows, "sft", "score")] == ["b", "fgh"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reward", "pairs.jsonl", "pairs.jsonl"], "pairs.jsonl is there already"),
        (["reward", "pairs.jsonl", "--best", "dpo"], "best: wanted rows with a prompt and a compl"),
        (["prm", "pairs.jsonl"], "wanted the columns prompt and completions, the steps"),
        (["reward", "prompts.jsonl"], "prompts.jsonl"),
        (["reward", "pairs.jsonl", "--reward", "mine"], "reward: compares the samples of a run"),
        (["missing", "pairs.jsonl"], "missing is neither a directory"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_a_message(words, said, place, capsys):
    paths = [
        word if word.startswith("-") or word in ("dpo", "mine") else str(place / word)
        for word in words
    ]
    assert main(["score", *paths]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("burnish score: ") and said in printed


def test_a_relative_name_that_is_no_model_is_not_blamed_on_the_hub_alone(place, capsys):
    assert main(["score", "runs/nope", str(place / "pairs.jsonl")]) == 1
    assert "model: runs/nope is neither a directory" in capsys.readouterr().err


def test_rows_come_back_in_their_order(place, capsys, tmp_path):
    texts = [{"text": letter * count} for letter, count in (("a", 30), ("b", 30), ("c", 4))]
    data = write_rows(tmp_path / "texts.jsonl", texts)
    one_by_one = scored(capsys, place / "grpo", data, "--micro_tokens", 1)
    mixed = scored(capsys, place / "grpo", data, "--micro_tokens", 36)  # the first with the third
    for row, alone, text in zip(mixed, one_by_one, texts, strict=True):
        assert row["text"] == text["text"]
        assert row["tokens"] == alone["tokens"] and close(row["logprob"], alone["logprob"])
