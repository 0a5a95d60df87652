"""`burnish plan` of runs on images: pixels, the vision tower, and rows as they will be."""

import json

import pytest
import vision
from burnish.benchmarks.experiments.memory import configured, measured_peak
from burnish.loops.cli.rehearsal import rehearse
from transformers import AutoModelForImageTextToText

GB = 10**9
SIDE = 256  # pixels of the images


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tower whose activations outweigh those of the text: 17 tiles of 64 patches an image."""
    folder = tmp_path_factory.mktemp("model")
    config, processor = vision.FAMILIES["idefics3"]()
    config.vision_config.image_size = 64
    config.vision_config.hidden_size = config.vision_config.intermediate_size = 128
    processor.image_processor.size = {"longest_edge": SIDE}
    processor.image_processor.max_image_size = {"longest_edge": 64}
    processor.image_seq_len = 16
    processor.chat_template = processor.tokenizer.chat_template = vision.template()
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def letters(completion, **columns):
    """A reward that differs within a group, so that each of them trains."""
    return float(sum(map(ord, completion)))


# What a recipe that samples is told beside its rows.
ONLINE = {
    "rewards": {letters: 1.0},
    "group_size": 4,
    "max_tokens": 8,
    "report_to": "none",
    "show_every": 0,
}


@pytest.fixture
def fields(model, tmp_path):
    """``fields(sizes)`` are the settings of a run on rows with these images."""

    def fields(sizes, **more):
        rows = []
        for number, shown in enumerate(sizes):
            names = []
            for place, size in enumerate(shown):
                names.append(f"{number}-{place}.png")
                vision.picture(*size).save(tmp_path / names[-1])
            row = {"images": names, "prompt": [{"role": "user", "content": f"what of {number}?"}]}
            row["chosen"] = [{"role": "assistant", "content": "yes"}]
            row["rejected"] = [{"role": "assistant", "content": "no"}]
            rows.append(json.dumps(row) + "\n")
        (tmp_path / "rows.jsonl").write_text("".join(rows))
        return {
            "model": model,
            "data": str(tmp_path / "rows.jsonl"),
            "output": str(tmp_path / "run"),
            "steps": 2,
            "batch_size": len(sizes),
            "shuffle": False,
            **more,
        }

    return fields


@pytest.fixture
def sampled(fields, tmp_path):
    """``sampled(sizes, *texts)`` are the settings of a run on prompts with these images."""

    def sampled(sizes, *texts, **more):
        settings = {**fields(sizes), **ONLINE, "prompts_per_rollout": len(sizes), **more}
        del settings["batch_size"], settings["shuffle"]
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        lines = []
        for row, text in zip(rows, texts or [""] * len(rows), strict=True):
            asked = {"role": "user", "content": f"{text}what?"}
            lines.append(json.dumps({"images": row["images"], "prompt": [asked]}) + "\n")
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        return settings

    return sampled


def test_the_predicted_peak_is_within_15_percent_of_the_allocators(fields):
    function, config = configured("dpo", fields([[(SIDE, SIDE)], [(SIDE, 64), (64, SIDE)], []]))
    predicted = rehearse(function, config)
    assert predicted.memory["pixels"] > 0 and predicted.memory["processed images"] > 0
    assert predicted.total == pytest.approx(measured_peak(function, config), rel=0.15)


def test_images_are_not_hidden_by_a_longer_text(fields, tmp_path):
    """A row of text and one with an image, in two micro-batches of which the first is longer."""
    settings = fields([[], [(SIDE, SIDE)] * 2], micro_tokens=400)
    first, second = (tmp_path / "rows.jsonl").read_text().splitlines()
    long = json.loads(first)
    long["prompt"][0]["content"] = "x" * 800
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(long)}\n{second}\n")
    both = rehearse(*configured("dpo", settings))
    seen = rehearse(*configured("dpo", fields([[(SIDE, SIDE)] * 2])))
    assert both.micro_batches == 2 and both.largest > seen.largest
    assert both.memory["activations"] >= seen.memory["activations"]
    assert both.memory["pixels"] == seen.memory["pixels"]


def test_the_predicted_peak_of_a_run_that_samples_is_within_15_percent(sampled):
    function, config = configured("grpo", sampled([[(SIDE, SIDE)], [(SIDE, 64), (64, SIDE)], []]))
    predicted = rehearse(function, config)
    assert predicted.memory["pixels"] > 0 and predicted.memory["processed images"] > 0
    assert predicted.total == pytest.approx(measured_peak(function, config), rel=0.15)


def test_images_are_not_hidden_by_a_longer_prompt(sampled):
    """The longest prompt is text alone, and trains in a micro-batch of its own."""
    images = [(SIDE, SIDE)] * 2  # the blank image is as large as one
    limit = {"micro_tokens": 400, "max_prompt_length": 2048, "group_size": 2}
    both = rehearse(*configured("grpo", sampled([[], images], "x" * 720, "", **limit)))
    seen = rehearse(*configured("grpo", sampled([images], **limit)))
    assert both.largest > 720 > seen.largest
    assert both.memory["pixels"] >= seen.memory["pixels"] > 0
    assert both.memory["activations"] >= seen.memory["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_student_that_samples_is_planned_with_the_images_of_its_prompts(share, fields, tmp_path):
    """A demonstration shows one image in its prompt, and another in a later turn."""
    settings = fields([[(SIDE, SIDE)] * 2])
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    turns = []
    for text in ("what?", "and this?"):
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        turns += [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    written = {"images": row["images"], "messages": turns}
    (tmp_path / "rows.jsonl").write_text(json.dumps(written))
    settings |= {
        "teacher": {"model": settings["model"]},
        "loss": "sampled_reverse_kl",
        "max_length": 2048,
        "max_tokens": 8,
        "steps": 4,
    }
    planned = rehearse(*configured("distill", {**settings, "on_policy": share}))
    assert planned.memory["pixels"] > 0


def test_processed_images_are_in_the_memory_of_the_host(fields):
    on_gpu = rehearse(*configured("dpo", fields([[(SIDE, SIDE)]])), 1, 80 * GB)
    assert on_gpu.memory["processed images"] == 0 and on_gpu.memory["pixels"] > 0


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_a_plan_has_the_rows_of_the_run(family, fields, tmp_path):
    changes = {"model": str(vision.save(tmp_path / family, family)), "report_to": "none"}
    function, config = configured("dpo", fields([[(40, 40)], []], **changes))
    planned = rehearse(function, config)
    run = function(config)
    run.feed.close()
    assert planned.layout == run.context.model.layout


def test_the_tower_is_among_the_parameters_that_train(fields):
    sizes = [[(SIDE, SIDE)]]
    trained = rehearse(*configured("dpo", fields(sizes)))
    frozen = rehearse(*configured("dpo", fields(sizes, train_vision=False)))
    assert trained.parameters == frozen.parameters == trained.trained
    assert frozen.trained < trained.trained
    assert frozen.memory["activations"] < 0.6 * trained.memory["activations"]
