"""Every recipe moves its own target on the demo's model, on questions it has not seen, by a stated
amount.
"""

import pytest
import torch
from burnish.loops.models.scorer import Scorer
from burnish.loops.recipes.prm import step_scores
from burnish.loops.recipes.reward import reward_scores
from burnish.objectives import step_aggregate
from grids import exhaustive, slow
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from worlds import chains, demonstrations, feedback, save_start, successors, train

TRAINING, HELD_OUT = list(successors(1500, seed=1)), list(successors(200, seed=2))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def taught(start, tmp_path_factory):
    """What SFT makes of the start: a teacher."""
    data, held_out = demonstrations(TRAINING), demonstrations(HELD_OUT)
    flags = ["--steps", "60", "--learning_rate", "2e-3"]
    before, after, model = train(
        "sft", tmp_path_factory.mktemp("sft") / "x", start, data, held_out, *flags
    )
    assert after["eval/nll"] < 0.1 * before["eval/nll"]
    return model


def test_kto_tells_right_answers_from_wrong_ones_by_their_reward(taught, tmp_path):
    data, held_out = feedback(TRAINING, seed=3), feedback(HELD_OUT, seed=4)
    flags = ["--steps", "60", "--learning_rate", "5e-4"]
    before, after, _ = train("kto", tmp_path / "x", taught, data, held_out, *flags)
    assert before["eval/kto"] == pytest.approx(0.5)
    assert after["eval/rewards/chosen"] - after["eval/rewards/rejected"] > 0.05
    assert after["eval/rewards/accuracies"] > 0.95


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("orpo", []),
        slow("cpo", []),
        ("cpo", ["--loss", "simpo"]),
        exhaustive("cpo", ["--loss", "alpha_po"]),
    ],
    ids=["orpo", "cpo", "simpo", "alpha_po"],
)
def test_one_stage_preference_training_learns_the_answer_from_nothing(
    start, tmp_path, recipe, flags
):
    flags = [*flags, "--steps", "40", "--learning_rate", "2e-3"]
    before, after, _ = train(recipe, tmp_path / "x", start, TRAINING, HELD_OUT, *flags)
    assert before["eval/rewards/accuracies"] < 0.7
    assert after["eval/rewards/accuracies"] > 0.95
    assert after["eval/nll"] < 0.3 * before["eval/nll"]


@pytest.mark.parametrize(
    "adapters", [[], slow(["--lora.r", "8", "--learning_rate", "5e-3"])], ids=["whole", "lora"]
)
def test_a_reward_model_tells_unseen_completions_apart_and_loads_as_a_classifier(
    taught, tmp_path, adapters
):
    flags = ["--steps", "60", "--learning_rate", "2e-3", "--centering", "0.01", *adapters]
    before, after, place = train("reward", tmp_path / "x", taught, TRAINING, HELD_OUT, *flags)
    assert before["eval/accuracy"] < 0.7
    assert after["eval/accuracy"] >= 0.9
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(place),
        AutoTokenizer.from_pretrained(place),
    )
    rows = [
        {"prompt": pair["prompt"], "completion": pair[kind]}
        for pair in HELD_OUT
        for kind in ("chosen", "rejected")
    ]
    score = reward_scores(Scorer(model), tokenizer, rows)
    assert (score[0::2] > score[1::2]).double().mean() == pytest.approx(
        after["eval/accuracy"], abs=0.011
    )
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows[:6]]
    plain = model(torch.tensor([tokenizer(text)["input_ids"] for text in texts])).logits[:, 0]
    torch.testing.assert_close(score[:6], plain.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_process_reward_model_finds_the_first_wrong_step(start, tmp_path):
    solved = [row for row in chains(4000, seed=5) if all(row["labels"])]
    text = [
        {"prompt": row["prompt"], "completion": "=".join([*row["completions"], ""])}
        for row in solved
    ]
    _, _, base = train(
        "sft", tmp_path / "sft", start, text, text[:50], "--steps", "80", "--learning_rate", "3e-3"
    )
    flags = ["--steps", "180", "--learning_rate", "1e-3", "--separator", "="]
    held_out = list(chains(150, seed=7))
    _, after, place = train("prm", tmp_path / "prm", base, chains(1500, seed=6), held_out, *flags)
    assert after["eval/accuracy"] > 0.9
    scorer = Scorer(AutoModelForTokenClassification.from_pretrained(place))
    tokenizer = AutoTokenizer.from_pretrained(place)
    found = []
    for row in held_out:
        score = step_scores(scorer, tokenizer, row["prompt"], row["completions"])
        wrong = (score < 0.5).tolist()
        found.append(wrong.index(True) if any(wrong) else None)
        weakest = step_aggregate(score, torch.zeros(len(score), dtype=torch.int64), 1, how="min")
        assert weakest.item() == pytest.approx(score.min().item())
    truth = [row["labels"].index(False) if False in row["labels"] else None for row in held_out]
    hits = [guess == right for guess, right in zip(found, truth, strict=True) if right is not None]
    assert sum(hits) / len(hits) >= 0.8


@pytest.mark.parametrize(
    "teacher",
    [[], exhaustive(["--teacher.divergence", "jsd"]), slow(["--teacher.top_k", "3"])],
    ids=["forward_kl", "jsd", "top_k"],
)
def test_distillation_halves_the_divergence_from_the_teacher(start, taught, tmp_path, teacher):
    data, held_out = demonstrations(TRAINING), demonstrations(HELD_OUT)
    flags = ["--steps", "40", "--learning_rate", "2e-3", "--teacher.model", str(taught), *teacher]
    before, after, _ = train("distill", tmp_path / "x", start, data, held_out, *flags)
    assert after["eval/distillation"] < 0.5 * before["eval/distillation"]


def test_pairs_and_a_teacher_train_in_one_step(start, taught, tmp_path):
    mix = "{dpo: 1.0, nll: 0.2, distillation: {coefficient: 0.5, of: all}}"
    flags = [
        "--steps",
        "40",
        "--learning_rate",
        "2e-3",
        "--teacher.model",
        str(taught),
        "--loss",
        mix,
    ]
    before, after, _ = train("dpo", tmp_path / "x", start, TRAINING, HELD_OUT, *flags)
    assert after["eval/rewards/accuracies"] > 0.9
    for name, share in {"dpo": 0.9, "nll": 0.3, "distillation": 0.5}.items():
        assert after[f"eval/{name}"] < share * before[f"eval/{name}"], name
