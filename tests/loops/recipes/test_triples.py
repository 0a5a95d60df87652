"""Triple preference optimization: the contrast of a pair, and the likelihood of a gold completion."""

import burnish
import pytest
import torch
from burnish.data import DataError, Tokenization, encode_triples, example
from burnish.loops.recipes.preference import open_cpo
from burnish.loops.recipes.settings import CPO
from online import lines
from sharded import assert_same_end, runs_on
from tiny import save_model, sums
from transformers import AutoModelForCausalLM, AutoTokenizer

BETA, GAMMA, ALPHA = 0.2, 0.4, 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model") / "start"))


@pytest.fixture(scope="module")
def rows():
    pairs = sums(6)
    golds = [*pairs[1:], pairs[0]]
    return [
        {
            "prompt": pair["prompt"][0]["content"],
            "chosen": pair["chosen"][0]["content"],
            "rejected": pair["rejected"][0]["content"],
            "reference": f"{gold['chosen'][0]['content']} and no other",
        }
        for pair, gold in zip(pairs, golds, strict=True)
    ]


def logps(model, rows):
    """The log-probs of the tokens of each completion of each row, by a plain forward pass."""
    loaded = AutoModelForCausalLM.from_pretrained(model).double()
    tokenizer = AutoTokenizer.from_pretrained(model)
    data, _ = encode_triples(rows, tokenizer)
    for index in range(len(data)):
        row = example(data, index)
        of_row = []
        for completion in row.completions:
            ids = torch.tensor([row.prompt + completion])
            predicted = loaded(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
            of_row.append(predicted.gather(1, torch.tensor(completion)[:, None])[:, 0])
        yield of_row


@pytest.mark.parametrize("micro_tokens", [None, 30])
@pytest.mark.parametrize("loss", ["cpo", "simpo"])
def test_a_step_is_the_contrast_and_the_nll_of_the_gold_completion(
    loss, micro_tokens, model, rows, tmp_path
):
    """TPO and TPO-L (arXiv:2405.16681): -log s(beta (log p_w - log p_l) - gamma) - alpha log p_gold."""
    settings = {"loss": loss, "beta": BETA, "gamma": GAMMA, "nll": ALPHA, "nll_of": "reference"}
    run = open_cpo(
        CPO(
            model,
            rows,
            str(tmp_path / "run"),
            dtype="float64",
            steps=1,
            batch_size=len(rows),
            micro_tokens=micro_tokens,
            **settings,
        )
    )
    run.train()
    (logged,) = lines(tmp_path / "run")
    contrast, golds = [], []
    for chosen, rejected, gold in logps(model, rows):
        golds.append(gold)
        x = BETA * (chosen.sum() - rejected.sum())
        if loss == "simpo":
            x = BETA * (chosen.mean() - rejected.mean()) - GAMMA
        contrast.append(torch.log1p(torch.exp(-x)))
    nll = -torch.cat(golds).mean()
    expected = torch.stack(contrast).mean() + ALPHA * nll
    assert logged["nll"] == pytest.approx(nll.item(), rel=1e-5)
    assert logged["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_gold_completion_that_is_the_chosen_one_is_cpo(model, rows):
    ends = []
    for row in ({}, {"nll_of": "reference"}):
        again = [{**each, "reference": each["chosen"]} for each in rows] if row else rows
        run = burnish.cpo(model, again, batch_size=3, steps=4, learning_rate=1e-3, **row)
        ends.append([step.metrics["loss"] for step in run])
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)
    assert len(set(ends[0])) == 4


def test_the_gold_completion_is_learned_in_bfloat16(model, rows):
    run = burnish.cpo(
        model,
        rows,
        batch_size=6,
        steps=12,
        learning_rate=1e-2,
        dtype="bfloat16",
        nll_of="reference",
    )
    nll = [step.metrics["nll"] for step in run]
    assert nll[-1] < 0.8 * nll[0]


@pytest.mark.slow
def test_two_ranks_and_micro_batches_end_where_one_step_does(tmp_path_factory):
    whole = runs_on(tmp_path_factory, ("tpo",), micro_tokens=None)
    assert_same_end(whole / "tpo", runs_on(tmp_path_factory, ("tpo",), 2, 1) / "tpo")


def test_triples_are_one_prompt_and_three_completions(model, rows):
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{
                name: [{"role": "assistant", "content": row[name]}]
                for name in ("chosen", "rejected", "reference")
            },
        }
        for row in rows
    ]
    for given in (rows, chats):
        data, account = encode_triples(given, tokenizer)
        assert account.kept == len(rows)
        texts = [tokenizer.decode(ids) for ids in example(data, 1).completions]
        for text, name in zip(texts, ("chosen", "rejected", "reference"), strict=True):
            assert rows[1][name] in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": None}, "line|row 1: 'reference'"),
        ({"rejected": "4", "chosen": "4"}, "'chosen' and 'rejected' are identical"),
        ({"reference": [{"role": "assistant", "content": "4"}]}, "give all of them as text"),
    ],
    ids=["no gold", "no preference", "mixed"],
)
def test_what_is_no_triple_is_refused(change, message, model, rows):
    tokenizer = AutoTokenizer.from_pretrained(model)
    wrong = [{**row, **change} for row in rows]
    with pytest.raises(DataError, match=message):
        encode_triples(wrong, tokenizer, Tokenization())


def test_pairs_without_a_gold_completion_are_refused(model, rows):
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    with pytest.raises(DataError, match=r"wanted \(prompt, chosen, rejected, reference\)"):
        encode_triples(pairs, tokenizer)
