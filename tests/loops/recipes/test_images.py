"""Recipes that train vision-language models on rows with images."""

import dataclasses
import hashlib
import json
import threading

import pytest
import tiny
import torch
import vision
from burnish.data import DataError, images
from burnish.loops.config import Lora, Teacher
from burnish.loops.recipes import opener, settings
from safetensors.torch import load_file
from tiny import make_model
from transformers import AutoModelForImageTextToText, AutoProcessor

USER = {"role": "user", "content": "what color?"}
RECIPES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "cpo": "CPO"}


def says(text):
    return [{"role": "assistant", "content": text}]


def write_rows(folder, kind, *, images=True):
    """Five rows: one image, two of unlike sizes, none, and one again, twice."""
    sizes = [[(60, 30)], [(30, 60), (60, 30)], [], [(32, 32)], [(20, 40)]]
    rows = []
    for number, shown in enumerate(sizes):
        names = []
        for place, size in enumerate(shown if images else []):
            names.append(f"{number}-{place}.png")
            vision.picture(*size, color=["red", "blue"][number % 2]).save(folder / names[-1])
        row = {"prompt": [USER]} | ({"images": names} if images else {})
        if kind == "sft":
            row["completion"] = says(f"it is {number}")
        elif kind == "kto":
            row |= {"completion": says(f"it is {number}"), "label": number % 2 == 0}
        else:
            row |= {"chosen": says(f"yes {number}"), "rejected": says("no")}
        rows.append(row)
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def world(tmp_path):
    def world(family="idefics3", kind="sft", **given):
        model = tmp_path / family
        if not model.exists():
            vision.save(model, family)
        data = write_rows(tmp_path, kind)
        plain = {
            "model": str(model),
            "data": str(data),
            "steps": 3,
            "batch_size": 5,
            "learning_rate": 1e-3,
            "dtype": "float64",
            "report_to": "none",
            "output": str(tmp_path / "run"),
        }
        return getattr(settings, RECIPES[kind])(**{**plain, **given})

    return world


def losses(config):
    training = opener(type(config).__name__.lower())(config)
    return [step.metrics["loss"] for step in training]


@pytest.mark.parametrize("kind", list(RECIPES))
def test_every_split_of_a_step_gives_the_same_losses(kind, world, tmp_path):
    whole = losses(world(kind=kind, output=str(tmp_path / "a"), micro_tokens=None))
    split = losses(world(kind=kind, output=str(tmp_path / "b"), micro_tokens=60))
    padded = losses(world(kind=kind, output=str(tmp_path / "c"), layout="padded"))
    for other in (split, padded):
        torch.testing.assert_close(whole[0], other[0], rtol=0, atol=1e-9)
        # AdamW makes more of the rounding of gradients: norms of Llama are float32
        torch.testing.assert_close(whole, other, rtol=1e-6, atol=0)
    assert whole[2] != whole[0]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_bfloat16_autocast_is_near_float32(kind, world, tmp_path):
    exact = losses(world(kind=kind, dtype="float32", output=str(tmp_path / "a")))
    rounded = losses(world(kind=kind, dtype="bfloat16", output=str(tmp_path / "b")))
    assert exact != rounded
    # another size of the images changes them by more
    torch.testing.assert_close(rounded, exact, rtol=2e-3, atol=0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "b" / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_saved_model_and_its_processor_load_in_transformers(world, tmp_path):
    losses(world())
    saved = tmp_path / "run" / "model"
    model = AutoModelForImageTextToText.from_pretrained(saved)
    processor = AutoProcessor.from_pretrained(saved)
    assert type(processor).__name__ == "Idefics3Processor"
    assert processor.chat_template == vision.template()
    image = vision.picture()
    shown = processor(text=["<image>what?"], images=[[image]], return_tensors="pt")
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "idefics3")
    with torch.no_grad():
        assert not torch.equal(model(**shown).logits, before(**shown).logits)
    tower = "model.vision_model.embeddings.patch_embedding.weight"
    assert not torch.equal(model.state_dict()[tower], before.state_dict()[tower])


@pytest.mark.parametrize("given", [{"train_vision": False}, {"lora": Lora(r=4)}])
def test_a_frozen_tower_stays_as_it_is(given, world, tmp_path):
    first, *_, last = losses(world(**given))
    assert last != first
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "idefics3")
    changed = {
        name
        for name, weight in model.state_dict().items()
        if not torch.equal(weight, before.state_dict()[name])
    }
    assert changed and not any("vision" in name or "connector" in name for name in changed)


def test_the_tower_gets_adapters_where_it_is_named(world, tmp_path):
    targets = [r"vision_model.encoder.layers.0.self_attn.q_proj"]
    losses(world(lora=Lora(r=4, target_modules=targets)))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "idefics3")
    changed = [
        name
        for name, weight in model.state_dict().items()
        if not torch.equal(weight, before.state_dict()[name])
    ]
    assert changed == ["model.vision_model.encoder.layers.0.self_attn.q_proj.weight"]


def test_a_resumed_run_has_the_bytes_of_one_that_went_on(world, tmp_path):
    def digest(run):
        return hashlib.sha256(
            (tmp_path / run / "model" / "model.safetensors").read_bytes()
        ).digest()

    losses(world(kind="dpo", output=str(tmp_path / "whole")))
    losses(world(kind="dpo", output=str(tmp_path / "parts"), steps=2, schedule="constant"))
    losses(world(kind="dpo", output=str(tmp_path / "other"), schedule="constant"))
    resumed = world(kind="dpo", output=str(tmp_path / "parts"), schedule="constant", resume=True)
    losses(resumed)
    assert digest("parts") == digest("other")


def test_rows_of_text_train_a_vision_language_model(world, tmp_path):
    (tmp_path / "text").mkdir()
    data = write_rows(tmp_path / "text", "sft", images=False)
    first, *_, last = losses(world(data=str(data)))
    assert last < first
    saved = tmp_path / "run" / "model"
    assert type(AutoProcessor.from_pretrained(saved)).__name__ == "Idefics3Processor"
    model = AutoModelForImageTextToText.from_pretrained(saved)
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "idefics3")
    tower = "model.vision_model.embeddings.patch_embedding.weight"
    assert torch.equal(model.state_dict()[tower], before.state_dict()[tower])


def test_settings_of_the_image_processor_are_changed_and_saved(world, tmp_path):
    whole = opener("sft")(world(output=str(tmp_path / "whole"))).context.accounting
    changes = {"processor_kwargs": {"size": {"longest_edge": 32}}}
    run = opener("sft")(world(**changes))
    small = run.context.accounting
    assert small.images == whole.images and small.image_tokens < whole.image_tokens
    run.train()
    saved = AutoProcessor.from_pretrained(tmp_path / "run" / "model").image_processor
    assert saved.size["longest_edge"] == 32 and saved.max_image_size["longest_edge"] == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": 1}, "Idefics3ImageProcessor.* has no 'sizes', did you mean 'size'"),
        ({"size": "large"}, "processor_kwargs: "),
    ],
)
def test_a_wrong_setting_of_the_image_processor_is_told(changes, message, world):
    with pytest.raises(ValueError, match=message):
        losses(world(processor_kwargs=changes))


def test_a_model_of_text_has_no_image_processor_to_change(world, tmp_path):
    text = str(tiny.save_model(tmp_path / "text"))
    with pytest.raises(ValueError, match="processor_kwargs: the model reads text alone; leave it"):
        losses(world(model=text, processor_kwargs={"size": 1}))


@pytest.mark.parametrize(
    "given",
    [{"neftune_noise_alpha": 5.0}],
)
def test_settings_that_were_not_tried_with_images_are_refused(given, world):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: not with images so far"):
        losses(world(**given))


def test_images_of_the_next_step_are_read_while_one_is_computed(world, monkeypatch):
    monkeypatch.setattr(images, "_CACHED", 1 << 17)  # some of these images, not all
    processed = []
    process = images.ImageReader._process

    def counted(reader, shown, processor):
        processed.append((threading.current_thread().name, tuple(each.key for each in shown)))
        return process(reader, shown, processor)

    training = opener("dpo")(world(kind="dpo", micro_tokens=60, reference="copy", steps=4))
    monkeypatch.setattr(images.ImageReader, "_process", counted)
    training.train()
    threads = [name for name, _ in processed]
    assert any("burnish-images" in name for name in threads)
    # four rows with images, for policy and reference, and the blank one
    assert len(processed) <= 4 * 4 + 4
    assert not training.context.model.images.reader._ahead


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_recomputed_activations_change_no_loss(checkpointing, world, tmp_path):
    plain = losses(world(output=str(tmp_path / "a")))
    recomputed = losses(world(output=str(tmp_path / "b"), gradient_checkpointing=checkpointing))
    torch.testing.assert_close(plain, recomputed, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(vision.HAS_TORCHVISION, reason="torchvision is installed")
def test_a_processor_without_its_package_is_named(world, tmp_path):
    config = world()
    (tmp_path / "idefics3" / "processor_config.json").unlink()
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (tmp_path / "idefics3" / "preprocessor_config.json").write_text(json.dumps(kinds))
    with pytest.raises(
        DataError,
        match=r"column 'images': .* needs torchvision to read images; pip install torchvision",
    ):
        losses(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(vision.FAMILIES))
def test_every_family_trains_from_its_files(family, world):
    if family not in vision.WITHOUT_TORCHVISION and not vision.HAS_TORCHVISION:
        pytest.skip("its processor needs torchvision, which is not installed")
    first, *_, last = losses(world(family, kind="dpo", dtype="float32"))
    assert last < first


@pytest.mark.parametrize("kind", ["reward", "prm"])
def test_scorers_see_images_in_every_split_and_layout(kind, world, tmp_path):
    data = write_rows(tmp_path, "dpo")
    config = world()
    if kind == "prm":
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        for row in rows:
            del row["chosen"], row["rejected"]
            row |= {"completions": ["see", "so it is"], "labels": [True, False]}
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model": config.model, "data": str(data), "steps": 2, "batch_size": 5}
    given |= {"dtype": "float64", "learning_rate": 1e-3, "report_to": "none"}
    make = settings.Reward if kind == "reward" else settings.PRM
    whole = losses(make(**given, output=str(tmp_path / "a"), micro_tokens=None))
    split = losses(make(**given, output=str(tmp_path / "b"), micro_tokens=60))
    padded = losses(make(**given, output=str(tmp_path / "c"), layout="padded"))
    torch.testing.assert_close(whole, split, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(whole, padded, rtol=1e-6, atol=1e-9)
    assert whole[1] != whole[0]
    again = make(**{**given, "model": str(tmp_path / "a" / "model")}, output=str(tmp_path / "d"))
    assert losses(again)[0] < whole[0]
    before = load_file(tmp_path / "idefics3" / "model.safetensors")
    after = load_file(tmp_path / "a" / "model" / "model.safetensors")
    tower = "model.vision_model.embeddings.patch_embedding.weight"
    assert not torch.equal(before[tower].double(), after[tower].double())


def test_a_reward_model_tells_images_apart(tmp_path):
    vision.save(tmp_path / "model", "llava")
    rows = []
    for number in range(8):
        shown = vision.picture(28, 28, ["red", "blue"][number % 2])
        answers = [says("red"), says("blue")]
        chosen, rejected = answers if number % 2 == 0 else reversed(answers)
        rows.append({"images": [shown], "prompt": [USER], "chosen": chosen, "rejected": rejected})
    config = settings.Reward(
        model=str(tmp_path / "model"), data=rows, steps=30, batch_size=8, learning_rate=3e-3,
        report_to="none", output=str(tmp_path / "run"),
    )  # fmt: skip
    *_, last = [step.metrics for step in opener("reward")(config)]
    assert last["accuracy"] == 1.0


@pytest.mark.parametrize(
    "given",
    [{"loss": "distillation"}, {"loss": "sampled_reverse_kl", "on_policy": 1.0}],
    ids=["demonstrations", "samples"],
)
def test_a_teacher_sees_the_images_of_its_student(given, world, tmp_path):
    config = world()
    vision.save(tmp_path / "teacher", "idefics3", seed=1)
    rows = []
    for run, layout in enumerate(["auto", "padded"]):
        settled = settings.Distill(
            model=config.model,
            data=config.data,
            teacher=Teacher(model=str(tmp_path / "teacher")),
            steps=2,
            batch_size=5,
            max_tokens=4,
            learning_rate=1e-3,
            dtype="float64",
            report_to="none",
            show_every=0,
            layout=layout,
            output=str(tmp_path / str(run)),
            **given,
        )
        rows.append(losses(settled))
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-6, atol=1e-9)
    # another picture under the same name is another divergence
    vision.picture(60, 30, "green").save(tmp_path / "0-0.png")
    recolored = losses(dataclasses.replace(settled, output=str(tmp_path / "recolored")))
    assert abs(recolored[0] - rows[0][0]) > 1e-5


@pytest.mark.parametrize(
    ("teacher", "given", "message"),
    [
        ({"prompt": "hint"}, {}, r"teacher\.prompt is read without images so far"),
        (
            {"reprompt": "rank_images:letters"},
            {"on_policy": 1.0},
            r"teacher\.reprompt is read without images so far",
        ),
        (
            {"server": "http://127.0.0.1:1", "top_k": 2},
            {},
            r"a teacher's server is sent no images so far; give --teacher\.model",
        ),
        ({"divergence": "uld"}, {}, r"teacher\.divergence: uld reads text without images so far"),
        ({"divergence": "gold"}, {}, r"teacher\.divergence: gold reads text without images so far"),
    ],
    ids=["prompt", "reprompt", "server", "uld", "gold"],
)
def test_a_teacher_that_reads_text_alone_is_refused(teacher, given, message, world, tmp_path):
    model = world().model
    own = {} if "server" in teacher else {"model": model}
    row = {"prompt": [USER], "hint": [USER], "completion": says("red"), "images": ["0-0.png"]}
    data = tmp_path / "hints.jsonl"
    data.write_text(json.dumps(row) + "\n")
    distill = settings.Distill(
        model=model, data=str(data), teacher=Teacher(**own, **teacher), **given
    )
    with pytest.raises(DataError, match=rf"column 'images': {message}.*, or remove the column"):
        losses(distill)


def test_a_teacher_without_a_processor_is_refused(world, tmp_path):
    config = world()
    make_model().save_pretrained(tmp_path / "teacher")
    AutoProcessor.from_pretrained(config.model).tokenizer.save_pretrained(tmp_path / "teacher")
    given = settings.Distill(
        model=config.model, data=config.data, teacher=Teacher(model=str(tmp_path / "teacher")),
        steps=1, output=str(tmp_path / "run"), report_to="none",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"teacher\.model: it sees no images"):
        losses(given)


def test_a_teacher_of_other_tokens_teaches_a_student_that_sees_images_on_text(world, tmp_path):
    config = world()
    text = write_rows(tmp_path, "sft", images=False)
    tiny.save_model(tmp_path / "teacher", seed=1)
    given = settings.Distill(
        model=config.model, data=str(text), teacher=Teacher(str(tmp_path / "teacher"), divergence="gold"),
        steps=1, batch_size=5, output=str(tmp_path / "run"), report_to="none",
    )  # fmt: skip
    (loss,) = losses(given)
    assert loss > 0
