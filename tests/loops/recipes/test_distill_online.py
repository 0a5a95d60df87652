"""On-policy distillation: in a share of the steps, the student is taught on what it says itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from burnish.loops.config import Teacher
from burnish.loops.recipes import distill
from burnish.loops.recipes.distill import on_policy_steps, open_distill
from burnish.loops.recipes.settings import Distill
from burnish.loops.runs import teacher
from online import Killed, dying_in_step, lines, stored
from safetensors.torch import load_file
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer


def opinionated(directory):
    """A random model knows nothing, and is near to every other one."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    directory = tmp_path_factory.mktemp("start")
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in sums(10)]
    return {
        "model": str(save_model(directory / "start")),
        "teacher": Teacher(model=str(opinionated(save_model(directory / "teacher", seed=1)))),
        "data": str(write_rows(directory / "data.jsonl", rows)),
        "batch_size": 4,
        "max_tokens": 5,
        "learning_rate": 1e-3,
        "show_every": 0,
    }


def test_a_share_of_the_steps_learns_from_answers_of_the_student(common, tmp_path):
    """Three epochs of ten rows, four a step: eight steps, of which the last has two rows."""
    config = Distill(
        **common,
        output=str(tmp_path / "run"),
        epochs=3,
        on_policy=0.5,
        seed=1,
        eval_data=common["data"],
    )
    open_distill(config).train()
    logged = lines(tmp_path / "run")[1:]
    own = [line["on_policy"] == 1 for line in logged]
    assert [step for step, mine in enumerate(own) if mine] == on_policy_steps(8, 0.5, seed=1)
    assert 0 < sum(own) < 8
    assert all(
        ("completions/mean_length" in line) == mine for line, mine in zip(logged, own, strict=True)
    )
    assert all(line["distillation"] > 0 for line in logged)
    samples = stored(tmp_path / "run")
    assert [sample["task"] for sample in samples] == list(range(4 * sum(own)))
    assert all(len(sample["tokens"]) <= 5 for sample in samples)
    assert logged[-1]["eval/distillation"] < lines(tmp_path / "run")[0]["eval/distillation"]


def test_the_prompts_of_such_a_step_are_those_that_the_data_has_for_it(common, tmp_path):
    open_distill(Distill(**common, output=str(tmp_path / "data"), steps=2, shuffle=False)).train()
    open_distill(
        Distill(
            **common,
            output=str(tmp_path / "own"),
            steps=2,
            shuffle=False,
            on_policy=1.0,
            group_size=2,
        )
    ).train()
    prompts = [sample["prompt"] for sample in stored(tmp_path / "own")]
    rows = [json.loads(line)["prompt"] for line in Path(common["data"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(common["model"])
    how = {"add_generation_prompt": True, "return_dict": False}
    assert prompts == [
        tokenizer.apply_chat_template(row, **how) for row in rows[:8] for _ in range(2)
    ]
    assert lines(tmp_path / "own")[0]["distillation"] != lines(tmp_path / "data")[0]["distillation"]


def test_other_losses_learn_from_the_answers_of_the_data_alone(common, tmp_path):
    mix = {"distillation": 1.0, "nll": 0.5}
    open_distill(
        Distill(**common, output=str(tmp_path / "run"), steps=1, on_policy=1.0, loss=mix)
    ).train()
    open_distill(Distill(**common, output=str(tmp_path / "alone"), steps=1, on_policy=1.0)).train()
    (mixed,), (alone,) = lines(tmp_path / "run"), lines(tmp_path / "alone")
    assert mixed["nll"] == 0
    assert mixed["loss"] == alone["loss"] > 0


@pytest.mark.parametrize("name", ["sampled_reverse_kl", "iw_opd"])
def test_reverse_kl_as_a_cost_of_sampled_tokens_brings_the_student_nearer(name, common, tmp_path):
    fields = {
        **common,
        "teacher": replace(common["teacher"], divergence="reverse_kl"),
        "learning_rate": 1e-2,
        "group_size": 32,
    }
    loss = {name: 1.0, "distillation": 1e-9}  # the second only measures
    open_distill(
        Distill(**fields, output=str(tmp_path / "run"), steps=20, on_policy=1.0, loss=loss)
    ).train()
    logged = lines(tmp_path / "run")
    if name == "iw_opd":  # from 1.5 at the first token down to 1
        assert all(1 < line["importance"] < 1.5 for line in logged)
    for line in logged[:2]:  # an unbiased estimate
        assert line["reverse_kl"] == pytest.approx(line["distillation"], rel=0.3)
    assert logged[-1]["distillation"] < 0.96 * logged[0]["distillation"]


def test_taids_teacher_comes_in_steps_of_both_kinds(common, tmp_path, monkeypatch):
    """Its t rises in every step, whoever has written the completions, and goes on after a death."""
    seen = []
    of_step = teacher.TaidSchedule.prepare

    def noted(schedule, feed, step, batches):
        prepared = of_step(schedule, feed, step, batches)
        if isinstance(feed, distill.MixedFeed):  # no held-out data
            seen.append((step, schedule.t, schedule.momentum))
        return prepared

    monkeypatch.setattr(teacher.TaidSchedule, "prepare", noted)
    config = Distill(
        **{**common, "teacher": replace(common["teacher"], divergence="taid")},
        output=str(tmp_path / "run"),
        steps=6,
        on_policy=0.5,
        seed=1,
        eval_data=common["data"],
    )
    open_distill(config).train()
    assert [step for step, *_ in seen] == list(range(6))
    shares = [t for _, t, _ in seen]
    assert shares[0] == 0.4 and shares == sorted(set(shares)) and shares[-1] >= 0.4 + 0.6 * 5 / 6
    undisturbed, seen[:] = list(seen), []
    disturbed = replace(config, output=str(tmp_path / "again"), resume=True, save_every=2)
    with pytest.raises(Killed), dying_in_step(4):
        open_distill(disturbed).train()
    seen.clear()
    open_distill(disturbed).train()
    assert seen == undisturbed[2:]
    loss = {"sampled_reverse_kl": 1.0}
    with pytest.raises(ValueError, match="taid follows the loss distillation, which this mix"):
        distill.distill_losses(replace(config, loss=loss))


def test_a_teacher_of_two_losses_is_loaded_once(common, tmp_path, monkeypatch):
    loaded, load = [], teacher.load_teacher
    for module in (distill, teacher):
        monkeypatch.setattr(
            module, "load_teacher", lambda *arguments: loaded.append(arguments) or load(*arguments)
        )
    loss = {"sampled_reverse_kl": 1.0, "distillation": 1.0}
    open_distill(Distill(**common, output=str(tmp_path / "run"), on_policy=1.0, loss=loss))
    assert len(loaded) == 1


@pytest.mark.parametrize("loss", ["distillation", "sampled_reverse_kl"])
def test_a_teacher_of_one_loss_reads_the_answers_of_a_step_once(
    loss, common, tmp_path, monkeypatch
):
    readings = []

    def load(*arguments):
        model = teacher.load_teacher(*arguments)
        model.plain.model.register_forward_hook(lambda *_: readings.append(1))
        return model

    monkeypatch.setattr(distill, "load_teacher", load)
    fields = {**common, "loss": loss, "micro_tokens": 10_000}
    open_distill(Distill(**fields, output=str(tmp_path / "run"), steps=2, on_policy=1.0)).train()
    assert len(readings) == 2


# the dead leave files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_death_and_resumption_give_the_weights_of_an_undisturbed_run(common, tmp_path):
    config = Distill(
        **common, output=str(tmp_path / "undisturbed"), steps=6, on_policy=0.5, save_every=2, seed=1
    )
    open_distill(config).train()
    disturbed = replace(config, output=str(tmp_path / "disturbed"), resume=True)
    with pytest.raises(Killed), dying_in_step(6):
        open_distill(disturbed).train()
    open_distill(disturbed).train()
    one, other = (
        load_file(tmp_path / name / "model/model.safetensors")
        for name in ("undisturbed", "disturbed")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert stored(tmp_path / "undisturbed") == stored(tmp_path / "disturbed")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"on_policy": 1.5}, "on_policy: must be >= 0 and <= 1, got 1.5"),
        ({"loss": "sampled_reverse_kl"}, "set on_policy above 0"),
        (
            {"on_policy": 0.5, "teacher": Teacher(model="x", top_k=3)},
            "--teacher.model without teacher.top_k",
        ),
        (
            {"on_policy": 0.5, "teacher": Teacher(logprobs="x")},
            "give --teacher.server, or --teacher.model",
        ),
        ({"on_policy": 0.5, "teacher": Teacher()}, "teacher: distillation needs one"),
        ({"on_policy": 0.5, "temperature": 0.0}, "temperature: at 0"),
        (
            {"on_policy": 0.5, "loss": "sampled_reverse_kl", "top_p": 0.9},
            "top_p, top_k, min_p: .* use the loss distillation",
        ),
        (
            {"on_policy": 0.5, "loss": "sampled_reverse_kl", "repetition_penalty": 1.1},
            "repetition_penalty: .* use the loss distillation",
        ),
        (
            {"on_policy": 0.5, "loss": {"distillation": {"weight": "importance"}}},
            "have no column 'importance'",
        ),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(
    config, message, common, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "burnish.loops.runs.context.load_model", lambda config: pytest.fail("the model was loaded")
    )
    with pytest.raises(ValueError, match=message):
        open_distill(Distill(**{**common, "output": str(tmp_path / "run"), **config})).train()
