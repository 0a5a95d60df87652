"""docs/troubles.md: each symptom is provoked here, and what the page quotes is what is said."""

import logging
import re
from pathlib import Path

import burnish
import datasets
import pytest
from burnish.data import DataError
from burnish.loops.cli import main
from burnish.loops.recipes.demo import save_start
from burnish.objectives import PerToken, Stats
from tiny import save_model, sums, write_rows

PAGE = (Path(__file__).parents[1] / "docs/troubles.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M))
PROMPTS = [{"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in sums(8)]
ONLINE = {"max_tokens": 4, "prompts_per_rollout": 2, "group_size": 2, "show_every": 0}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def said(caplog):
    """``said(section)`` asserts that what a section quotes was logged, or is in a text."""
    caplog.set_level(logging.INFO, logger="burnish")

    def said(section, text=None, which=slice(None)):
        heard = " ".join((text or caplog.text).split())
        quotes = re.findall(r"^```text\n(.*?)^```", SECTIONS[section], flags=re.S | re.M)
        assert quotes
        for quote in quotes[which]:
            parts = [re.escape(part.strip()) for part in " ".join(quote.split()).split("...")]
            assert re.search(".*?".join(parts), heard), f"{quote}\nis not in\n{heard}"

    return said


def even(row, sample):
    """The share of even token ids."""
    return sum(token % 2 == 0 for token in sample.tokens) / len(sample.tokens)


def nothing(completion):
    return 0.0


def history(run):
    return [step.metrics for step in run]


def test_every_symptom_of_the_page_has_its_test():
    tested = {
        section
        for name, test in globals().items()
        if name.startswith("test_")
        for section in getattr(test, "sections", ())
    }
    assert tested == SECTIONS.keys()


def symptom(*sections):
    def marked(test):
        test.sections = sections
        return test

    return marked


@symptom("Chosen rewards fall")
def test_chosen_rewards_fall_while_margins_rise(model):
    # Two answers share most of their tokens, so that what lowers one lowers the other.
    rows = [
        {"prompt": f"{n}+1=", "chosen": f"the answer is {n + 1}", "rejected": f"the answer is {n}"}
        for n in range(32)
    ]
    steps = history(burnish.dpo(model, rows, steps=60, batch_size=8, learning_rate=2e-2))
    assert steps[-1]["rewards/margins"] > 0.1
    assert steps[-1]["rewards/chosen"] < 0


@symptom("The KL grows")
def test_the_kl_grows_under_a_rate_that_is_too_high(model):
    run = burnish.rloo(
        model, PROMPTS, rewards=even, steps=20, learning_rate=3e-2, beta=0.0001, **ONLINE
    )
    kl = [step["kl"] for step in history(run)]
    assert kl[0] == pytest.approx(0, abs=1e-3) and kl[-1] > 0.05


@symptom("The reward is 0, or never varies")
def test_a_reward_that_never_varies_is_told(model, said):
    run = burnish.grpo(model, PROMPTS, rewards=nothing, steps=3, **ONLINE)
    steps = history(run)
    said("The reward is 0, or never varies")
    assert steps[-1]["frac_reward_zero_std"] == 1


@symptom("A reward gives no score")
def test_a_reward_without_scores_is_told(model, said):
    calls = []

    def fails_later(completion):
        calls.append(completion)
        if len(calls) > 4:
            raise RuntimeError("no")
        return len(calls) / 4

    rewards = {"judge": {"function": fails_later}, "even": {"function": even}}
    history(burnish.grpo(model, PROMPTS, rewards=rewards, steps=4, **ONLINE))
    said("A reward gives no score")


@symptom("One reward decides alone")
def test_a_reward_that_drowns_another_is_told(model, said):
    rewards = {"loud": {"function": even, "weight": 1000.0}, "quiet": {"function": even}}
    history(burnish.grpo(model, PROMPTS, rewards=rewards, steps=3, **ONLINE))
    said("One reward decides alone")


@symptom("A score explodes")
def test_a_score_that_explodes_is_told(model, said):
    calls = []

    def explodes(completion):
        calls.append(completion)
        return 1e6 if len(calls) == 16 else 1.0 + len(calls) % 2

    history(burnish.grpo(model, PROMPTS, rewards=explodes, steps=4, **ONLINE))
    said("A score explodes")


@symptom("The loss of grpo is near 0")
def test_the_loss_of_grpo_is_0_where_its_gradient_is_not(model):
    (step,) = history(burnish.grpo(model, PROMPTS, rewards=even, steps=1, **ONLINE))
    assert abs(step["loss"]) < 1e-6 < step["grad_norm"]


@symptom("A loss of mine has no gradient")
def test_a_loss_without_a_gradient_is_told(model, said):
    def detached(logp: PerToken) -> tuple[PerToken, Stats]:
        return -logp.detach(), {}

    rows = [{"prompt": f"{n}", "completion": "b"} for n in range(8)]
    with pytest.raises(ValueError) as ended:
        history(burnish.sft(model, rows, loss=detached, batch_size=8))
    said("A loss of mine has no gradient", str(ended.value))


@symptom("The loss is not another framework's")
def test_a_loss_depends_on_how_tokens_count_and_not_on_micro_batches(model):
    rows = [{"prompt": f"{n}", "completion": "b" * n} for n in range(1, 9)]

    def first(**settings):
        run = burnish.sft(model, rows, batch_size=8, steps=1, **settings)
        return history(run)[0]["loss"]

    assert first(micro_tokens=8) == pytest.approx(first(), rel=1e-5)
    assert first(weighting="length_normalized") != pytest.approx(first(), rel=1e-3)


@symptom("All completions are cut")
def test_completions_that_never_end_are_told(model, said):
    run = burnish.grpo(model, PROMPTS, rewards=even, steps=8, **{**ONLINE, "max_tokens": 1})
    steps = history(run)
    said("All completions are cut")
    assert steps[-1]["completions/clipped_ratio"] == 1


@symptom("The first step on a rollout clips")
def test_a_first_step_that_clips_is_told(model, said):
    clip = {"clip_low": 0.0, "clip_high": 0.0}
    run = burnish.grpo(
        model, PROMPTS, rewards=even, loss_kwargs=clip, steps=2, dtype="bfloat16", **ONLINE
    )
    history(run)
    said("The first step on a rollout clips")


@symptom("Out of memory")
def test_a_run_that_lacks_memory_says_what_to_set(model, tmp_path, monkeypatch, capsys, said):
    monkeypatch.chdir(tmp_path)
    Path("my_losses_without_memory.py").write_text(
        "import torch\nfrom burnish.objectives import PerToken, Stats\n"
        "def fails(logp: PerToken) -> tuple[PerToken, Stats]:\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
    )
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 2)
    words = ["--model", model, "--data", "rows.jsonl", "--output", "run"]
    assert main(["sft", *words, "--loss", "my_losses_without_memory:fails"]) == 1
    said("Out of memory", capsys.readouterr().err, which=slice(1))
    assert main(["plan", "sft", *words, "--gpus", "1x1GB"]) == 1
    said("Out of memory", capsys.readouterr().out, which=slice(1, 2))


@symptom("The loss is NaN")
def test_a_gradient_that_is_not_finite_is_told(model, said):
    def not_a_number(logp: PerToken) -> tuple[PerToken, Stats]:
        return -logp * float("nan"), {}

    with pytest.raises(FloatingPointError) as ended:
        rows = [{"prompt": f"{n}", "completion": "b"} for n in range(8)]
        history(burnish.sft(model, rows, loss=not_a_number, batch_size=1))
    said("The loss is NaN", which=slice(1))
    said("The loss is NaN", str(ended.value), which=slice(1, 2))

    def large(logp: PerToken) -> tuple[PerToken, Stats]:
        return -logp * 1e20, {}

    run = burnish.sft(model, rows, loss=large, batch_size=8, epochs=1, dtype="float16")
    assert history(run)[0]["skipped"] == 1
    said("The loss is NaN", which=slice(2, 3))


@symptom("The held-out loss is too good")
def test_rows_that_are_also_trained_on_are_told(model, said):
    rows = sums(8)
    burnish.dpo(model, rows, eval_data=rows[:4], steps=1)
    said("The held-out loss is too good")


@symptom("A row can't be trained on")
def test_a_bad_row_is_named_with_its_fix(model, said):
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    with pytest.raises(DataError) as refused:
        burnish.dpo(model, [*sums(2), same])
    said("A row can't be trained on", str(refused.value))


@symptom("The tokenizer does not know the text")
def test_text_without_tokens_is_told(said, tmp_path):
    save_start(tmp_path, seed=0)  # it knows digits, + and =
    greetings = ["доброе утро", "добрый день", "добрый вечер"]
    rows = [{"prompt": "2+2=", "completion": text} for text in greetings]
    burnish.sft(str(tmp_path), rows, steps=1)
    said("The tokenizer does not know the text")


@symptom("A setting is unknown")
def test_a_misspelt_setting_is_answered_with_the_nearest(model, said, capsys):
    with pytest.raises(SystemExit):
        main(["dpo", "--model", model, "--data", "d.jsonl", "--output", "o", "--betta", "0.2"])
    said("A setting is unknown", capsys.readouterr().err)


@symptom("Resume is refused", "Resume begins anew")
def test_a_resume_under_other_settings_is_refused(model, said, tmp_path):
    place = str(tmp_path / "run")
    burnish.dpo(model, sums(8), output=place, steps=1, resume=True).train()
    said("Resume begins anew")
    with pytest.raises(ValueError) as refused:
        burnish.dpo(model, sums(8), output=place, steps=1, seed=3, resume=True)
    said("Resume is refused", str(refused.value))


@symptom("It starts slowly")
def test_encoded_data_are_found_again(model, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": f"{n}", "completion": "b"} for n in range(9)]
    data = write_rows(tmp_path / "rows.jsonl", rows)

    def cached_after(output):
        words = ["--model", model, "--data", str(data), "--steps", "1"]
        assert main(["sft", *words, "--output", str(tmp_path / output)]) == 0
        return {path for path in (tmp_path / "cache").rglob("*.arrow")}

    first = cached_after("one")
    assert first and cached_after("two") == first
