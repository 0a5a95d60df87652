"""Runs that are resumed: extended ones have the rate of the longer schedule, and what was not there
is said.
"""

import json
import shutil

import burnish
import pytest
import torch
from burnish.loops.cli import main
from tiny import save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

RATE = 1e-3
PER_EPOCH = 2


@pytest.fixture
def settings(tmp_path):
    rows = [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(8)]
    data = write_rows(tmp_path / "messages.jsonl", rows)
    model = save_model(tmp_path / "start")
    shared = {"batch_size": 4, "learning_rate": RATE}
    return {"model": str(model), "data": str(data), "output": str(tmp_path / "run"), **shared}


def rates_of_transformers(name, warmup, steps):
    """The learning rate of each step, by a scheduler that never stopped."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def logged(settings, name):
    with open(f"{settings['output']}/metrics.jsonl") as file:
        return [json.loads(line)[name] for line in file]


LENGTHS = [
    ({"steps": 4}, {"steps": 8}),
    ({"steps": 4}, {"steps": 5}),
    ({"epochs": 2}, {"epochs": 3}),
]


@pytest.mark.parametrize(("first", "then"), LENGTHS, ids=["4 to 8", "4 to 5", "2 to 3 epochs"])
@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0), ("cosine", 2)])
def test_the_first_step_of_an_extension_has_the_rate_of_the_new_schedule(
    first, then, schedule, warmup, settings
):
    settings |= {"schedule": schedule, "warmup": float(warmup)}
    burnish.sft(**settings, **first).train()
    burnish.sft(**settings, **then, resume=True).train()
    old, new = (each.get("steps") or each["epochs"] * PER_EPOCH for each in (first, then))
    wanted = [
        *rates_of_transformers(schedule, warmup, old),
        *rates_of_transformers(schedule, warmup, new)[old:],
    ]
    assert logged(settings, "learning_rate") == wanted
    assert wanted[old] > 0


def test_the_first_step_of_an_extension_moves_the_weights(settings, tmp_path):
    burnish.sft(**settings, steps=4).train()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    burnish.sft(**settings, steps=5, resume=True).train()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert max((after[name] - before[name]).abs().max() for name in before) > 1e-6


def test_parameter_groups_keep_their_own_rates_in_an_extension(settings):
    def opened(**options):
        model = AutoModelForCausalLM.from_pretrained(settings["model"])
        embedding = [model.get_input_embeddings().weight]
        rest = [each for each in model.parameters() if each is not embedding[0]]
        groups = [{"params": rest, "lr": RATE}, {"params": embedding, "lr": 0.1 * RATE}]
        optimizer = torch.optim.AdamW(groups)
        tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        own = {
            **settings,
            "model": model,
            "tokenizer": tokenizer,
            "optimizer": optimizer,
            **options,
        }
        return burnish.sft(**own), optimizer

    run, _ = opened(steps=4)
    run.train()
    run, optimizer = opened(steps=8, resume=True)
    assert [group["lr"] for group in optimizer.param_groups] == [RATE * 0.5, 0.1 * RATE * 0.5]


def test_a_run_with_nothing_to_resume_says_so_in_one_line(settings, tmp_path, caplog):
    burnish.sft(**settings, steps=2, resume=True).train()
    said = [text for text in caplog.messages if text.startswith("resume: ")]
    assert said == [
        f"resume: there is nothing to resume in {tmp_path / 'run'}, so the run begins anew"
    ]
    caplog.clear()
    burnish.sft(**settings, steps=2, resume=True).train()
    assert not [text for text in caplog.messages if text.startswith("resume: there is nothing")]
    shutil.rmtree(tmp_path / "run/checkpoints")
    burnish.sft(**settings, steps=2, resume=True).train()
    assert "resume: there is nothing to resume" in caplog.text


@pytest.mark.parametrize("fewer", [{"steps": 3}, {"epochs": 1}], ids=["steps", "epochs"])
def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_taken(fewer, settings, tmp_path):
    burnish.sft(**settings, epochs=2).train()
    before = (tmp_path / "run/config.yaml").read_bytes()
    with pytest.raises(
        ValueError, match=r"resume: the run in .* has taken 4 steps, and is to have \d"
    ):
        burnish.sft(**settings, **fewer, resume=True)
    assert (tmp_path / "run/config.yaml").read_bytes() == before
    burnish.sft(**settings, epochs=2, resume=True).train()


@pytest.mark.parametrize("warmup", [0.5, 0.25])
def test_a_share_of_warmup_is_that_of_the_longer_run(warmup, settings):
    settings |= {"schedule": "linear", "warmup": warmup}
    burnish.sft(**settings, steps=4).train()
    burnish.sft(**settings, steps=8, resume=True).train()
    assert (
        logged(settings, "learning_rate")[4:]
        == rates_of_transformers("linear", int(8 * warmup), 8)[4:]
    )


def test_a_dry_run_of_a_run_to_resume_does_not_say_that_there_is_nothing(settings, caplog, capsys):
    burnish.sft(**settings, steps=2).train()
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert main(["sft", *flags, "--steps", "4", "--resume", "true", "--dry_run"]) == 0
    assert "nothing to resume" not in caplog.text
    assert "total" in capsys.readouterr().out
