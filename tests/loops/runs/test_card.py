"""The model card beside a trained model: a header that the Hub reads, and what the run knows of
itself.
"""

import json

import pytest
import yaml
from burnish.loops.cli import main
from burnish.loops.recipes.preference import open_dpo
from burnish.loops.recipes.settings import DPO
from burnish.loops.runs.card import _public, base_metadata, header_of, paper_of
from hub_fake import wrong_in
from huggingface_hub import ModelCard, ModelCardData
from tiny import save_model, sums, write_rows
from worlds import chains, demonstrations, feedback

PAIRS = sums(8)
TEXTS = demonstrations([{"prompt": pair["prompt"][0]["content"], "chosen": "7"} for pair in PAIRS])
PROMPTS = [{"prompt": pair["prompt"], "answer": "7"} for pair in PAIRS]
ONLINE = {
    "rewards": {"exact_match": 1.0},
    "prompts_per_rollout": 2,
    "group_size": 2,
    "max_tokens": 4,
    "show_every": 0,
}
OFFLINE = {"batch_size": 2}
# Of each recipe: rows, settings, what the Hub shows the model for, and papers that its losses are
# of.
RECIPES = {
    "sft": (TEXTS, {**OFFLINE, "lora": {"r": 2}}, "text-generation", []),
    "dpo": (
        PAIRS,
        {**OFFLINE, "loss": {"dpo": 1.0, "nll": 0.2}},
        "text-generation",
        ["arXiv:2305.18290"],
    ),
    "cpo": (PAIRS, OFFLINE, "text-generation", ["arXiv:2401.08417"]),
    "orpo": (PAIRS, OFFLINE, "text-generation", ["arXiv:2403.07691"]),
    "kto": (feedback(PAIRS, seed=0), OFFLINE, "text-generation", ["arXiv:2402.01306"]),
    "reward": (PAIRS, OFFLINE, "text-classification", []),
    "prm": (list(chains(8, seed=0)), {**OFFLINE, "separator": "="}, "token-classification", []),
    "distill": (TEXTS, OFFLINE, "text-generation", []),
    "grpo": (PROMPTS, {**ONLINE, "beta": 0.1}, "text-generation", ["arXiv:1707.06347"]),
    "rloo": (PROMPTS, ONLINE, "text-generation", []),
    "ppo": (PROMPTS, ONLINE, "text-generation", ["arXiv:1707.06347"]),
    "online_dpo": (PROMPTS, ONLINE, "text-generation", ["arXiv:2305.18290"]),
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A base model whose card names its own base and license."""
    directory = save_model(tmp_path_factory.mktemp("start") / "base")
    header = ModelCardData(base_model="org/base-1b", license="apache-2.0")
    (directory / "README.md").write_text(f"---\n{header.to_yaml()}\n---\n# Base\n")
    return directory


def flags(values):
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }
    return [word for name, text in texts.items() for word in (f"--{name}", text)]


def trained(recipe, start, directory, **more):
    """The run directory of a recipe after two steps."""
    rows, values, *_ = RECIPES[recipe]
    data = write_rows(directory / "rows.jsonl", rows)
    values = {**values, "steps": 2, **more}
    if recipe == "distill":
        values["teacher"] = {"model": str(start)}
    where = ["--model", str(start), "--data", str(data), "--output", str(directory / "run")]
    assert main([recipe, *where, *flags(values)]) == 0
    return directory / "run"


def card_of(directory):
    return ModelCard((directory / "README.md").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_card_of_each_recipe_has_a_header_that_the_hub_reads(recipe, start, tmp_path):
    card = card_of(trained(recipe, start, tmp_path) / "model")
    _, _, task, papers = RECIPES[recipe]
    read = ModelCardData(**yaml.safe_load(card.data.to_yaml()))
    assert read.to_dict() == card.data.to_dict() and wrong_in(read.to_dict()) == []
    assert (read.base_model, read.base_model_relation, read.license) == (
        "org/base-1b",
        "finetune",
        "apache-2.0",
    )
    assert (read.library_name, read.pipeline_tag, read.tags) == (
        "transformers",
        task,
        ["burnish", recipe],
    )
    for heading in ("Data", "Losses", "How it was made"):
        assert card.text.count(f"## {heading}\n") == 1
    assert all(paper in card.text for paper in papers)
    assert f"burnish.{recipe}(" in card.text and "| torch |" in card.text


@pytest.mark.drawn
def test_a_card_has_the_account_losses_measures_and_curves(start, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["burnish", "dpo", "--output", str(tmp_path / "run")])
    run = trained("dpo", start, tmp_path, eval_data=0.25, beta=0.3)
    text = card_of(run / "model").text
    entry = json.loads((run / "run.json").read_text())["starts"][0]
    part = entry["data"][0]
    row = f"| training | rows.jsonl | 6 | 6 | {part['tokens']} | {part['trained_tokens']} |  | {part['sha256'][:16]} |"
    assert row in text and "| held out | rows.jsonl | 2 | 2 |" in text
    assert (
        "- `dpo`, coefficient 1 (beta=0.3, label_smoothing=0.0): Direct preference optimization"
        in text
    )
    assert "- `nll`, coefficient 0.2" in text and "entropy`, coefficient" not in text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"| eval/loss | {lines[0]['eval/loss']:.4g} | {lines[-1]['eval/loss']:.4g} |" in text
    assert (run / "model/curves.png").read_bytes() == (run / "curves.png").read_bytes()
    assert "](curves.png)" in text and "    burnish dpo --output run\n" in text
    assert str(tmp_path) not in text


def test_the_card_of_the_best_step_has_the_measures_of_that_step(start, tmp_path):
    best = {
        "keep_best": "max:eval/loss",
        "load_best_model_at_end": True,
        "eval_every": 1,
        "learning_rate": 1e-2,
    }
    run = trained("dpo", start, tmp_path, eval_data=0.25, **best)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *others = (line["eval/loss"] for line in lines)
    step = 1 + others.index(max(others))
    text = card_of(run / "model").text
    assert f"of burnish in {step} steps." in text
    assert (
        f"| metric | step 0 | step {step} |" in text
        and f"| {first:.4g} | {max(others):.4g} |" in text
    )


def test_an_adapter_has_a_card_of_its_own(start, tmp_path):
    run = trained("sft", start, tmp_path)
    card = card_of(run / "adapter")
    assert (card.data.library_name, card.data.base_model_relation) == ("peft", "adapter")
    assert card.text.startswith("\n# Adapter of base") and "## Losses" in card.text


def test_the_card_of_streamed_data_counts_the_rows_that_were_read(start, tmp_path):
    text = card_of(trained("sft", start, tmp_path, streaming=True, lora={"r": 0}) / "model").text
    (row,) = [line for line in text.splitlines() if line.startswith("| training |")]
    read = int(row.split("|")[3])
    assert read >= 4


def test_rows_left_out_are_counted_on_the_card(start, tmp_path):
    data = write_rows(
        tmp_path / "rows.jsonl", [*PAIRS, {**PAIRS[0], "rejected": PAIRS[0]["chosen"]}]
    )
    settings = {"model": str(start), "data": str(data), "output": str(tmp_path / "run"), "steps": 1}
    open_dpo(DPO(**settings, on_bad_row="skip")).train()
    assert "Left out of rows.jsonl (training): 1 " in card_of(tmp_path / "run/model").text


def test_a_secret_of_the_command_is_not_on_the_card(start, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["burnish", "dpo", "--vllm.api_key", "swordfish-77"])
    text = (trained("dpo", start, tmp_path) / "model/README.md").read_text()
    assert "burnish dpo --vllm.api_key" in text and "swordfish" not in text


def test_a_model_and_data_of_the_hub_are_named_with_their_commits():
    model = {"name": "org/base-1b", "revision": COMMIT, "architecture": "LlamaForCausalLM"}
    data = [{"source": "org/pairs", "revision": COMMIT}, {"source": "mine.jsonl", "revision": None}]
    header = header_of({"model": model, "data": data, "recipe": "dpo"}, adapter=True)
    assert header.base_model == "org/base-1b" and header.base_model_relation == "adapter"
    assert header.datasets == ["org/pairs"]


def test_the_license_of_a_model_of_the_hub_is_that_of_its_downloaded_card(tmp_path, monkeypatch):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: other\nlicense_name: llama\nlicense_link: LICENSE\n---\n")
    found = {("org/base-1b", "README.md", COMMIT): str(card)}
    monkeypatch.setattr(
        "burnish.loops.runs.card.try_to_load_from_cache",
        lambda name, file, revision: found.get((name, file, revision)),
    )
    model = {"name": "org/base-1b", "revision": COMMIT}
    assert base_metadata(model) == {
        "base_model": "org/base-1b",
        "license": "other",
        "license_name": "llama",
        "license_link": "LICENSE",
    }
    assert base_metadata({**model, "revision": None}) == {"base_model": "org/base-1b"}


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"---\n- a list\n---\n", b"---\nlicense: [\n---\n", b"no header"]
)
def test_a_base_whose_card_cannot_be_read_has_no_license(content, tmp_path):
    (tmp_path / "README.md").write_bytes(content)
    assert base_metadata({"name": str(tmp_path), "revision": None}) == {}


def test_the_paper_of_a_loss_is_the_paragraph_that_names_it():
    assert paper_of("A loss.\n\nPaper: Ann 2024,\n    Eq. 1.\n\nMore.") == "Paper: Ann 2024, Eq. 1."
    assert paper_of("A loss of the Paper: not here.") == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("burnish dpo --output /home/me/run --beta 0.1", "burnish dpo --output run --beta 0.1"),
        ("data='/data/a/b.jsonl', path=~/x/y", "data='b.jsonl', path=y"),
        ("{path: /srv/a.jsonl}", "{path: a.jsonl}"),
        (
            "https://host/a/b org/name runs/one ../two/three",
            "https://host/a/b org/name runs/one ../two/three",
        ),
    ],
)
def test_directories_of_the_machine_are_left_out(text, shown):
    assert _public(text) == shown
