"""Scorers: what is trained here is what transformers computes as a sequence or token classifier."""

import logging

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.config import Common
from burnish.loops.models.io import load_classifier
from burnish.loops.models.scorer import Scorer, bin_middles, ends_marked, scores
from tiny import FAMILIES, make_classifier, make_examples
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

EXACT = 1e-5  # transformers computes norms in float32


def whole_texts(examples):
    return [
        example.prompt + completion for example in examples for completion in example.completions
    ]


def test_the_score_of_an_answer_is_that_of_the_sequence_classifier_on_padded_texts():
    model = make_classifier("SEQ_CLS")
    examples = [ends_marked(example, pad=0) for example in make_examples(5, completions=3)]
    texts = whole_texts(examples)
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    expected = model(ids, attention_mask=(ids != 0).long()).logits[:, 0]
    for layout in ("shared", "packed", "padded"):
        found = scores(Scorer(model, layout=layout), [collate(examples[:2]), collate(examples[2:])])
        torch.testing.assert_close(found, expected.detach(), rtol=EXACT, atol=EXACT)


def test_the_scores_of_steps_are_those_of_the_token_classifier():
    model = make_classifier("TOKEN_CLS")
    examples = make_examples(4, completions=1)
    for layout in ("packed", "padded"):
        found = scores(Scorer(model, layout=layout), [collate(examples)])
        expected = []
        for example in examples:
            logits = model(torch.tensor([example.prompt + example.completions[0]])).logits[0]
            at = [len(example.prompt) + t for t, marked in enumerate(example.trained[0]) if marked]
            expected.append(logits[at, 1] - logits[at, 0])
        torch.testing.assert_close(found, torch.cat(expected).detach(), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("completion", "pad", "mark"),
    [([5, 6, 2], 0, 2), ([5, 6, 2], 2, 1), ([5, 2, 2], 2, 0), ([2], 2, 0)],
)
def test_an_answer_is_read_at_its_last_token_that_is_not_padding(completion, pad, mark):
    """Where the end token is the padding token too, transformers reads the token before it, and so
    do we.
    """
    example = ends_marked(Example([4], [completion], [[True] * len(completion)]), pad)
    assert example.trained == [[t == mark for t in range(len(completion))]]


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_autocast_rounds_hidden_states_and_not_the_scores(task):
    scorer = Scorer(make_classifier(task).float())
    batch = collate([ends_marked(example, pad=0) for example in make_examples(20)])
    states = []
    scorer.head.register_forward_pre_hook(lambda head, args: states.append(args[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        score = scorer(batch)
    output = states[0].double() @ scorer.head.weight.double().T
    expected = output[:, 0] if task == "SEQ_CLS" else output[:, 1] - output[:, 0]
    torch.testing.assert_close(score.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_model_without_a_linear_head_is_refused():
    model = make_classifier("SEQ_CLS", labels=3)
    with pytest.raises(ValueError, match="no linear head of one or two outputs"):
        Scorer(model)


@pytest.mark.parametrize(
    ("labels", "middles"),
    [
        (["-1.0", "0.5", "2.0"], [-1.0, 0.5, 2.0]),
        (["0.0", "1.0"], None),
        (["0.0", "2.0", "1.0"], None),
        (["0.0", "1.0", "LABEL_2"], None),
        (["nan", "1.0", "2.0"], None),
    ],
)
def test_rising_numbers_are_the_labels_of_a_histogram(labels, middles):
    found = bin_middles(dict(enumerate(labels)))
    assert middles == (None if found is None else found.tolist())


def test_a_head_that_reads_other_states_is_noticed():
    model = make_classifier("SEQ_CLS")
    model.score.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * 2,) if inputs[0].ndim == 3 else inputs
    )
    with pytest.raises(ValueError, match="scores are not its head on its last hidden states"):
        Scorer(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3", "cohere"])
def test_a_new_head_fits_the_backbone_of_every_family(family, tmp_path, caplog):
    AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).save_pretrained(
        tmp_path / "model"
    )
    config = Common(model=str(tmp_path / "model"), data="", output="")
    with caplog.at_level(logging.WARNING):
        scorer = Scorer(load_classifier(config, "SEQ_CLS", {0: "reward"}))
    torch.testing.assert_close(
        scorer.plain.base_model.get_input_embeddings().weight,
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").get_input_embeddings().weight,
    )
    if family == "cohere":
        assert "CohereForSequenceClassification: transformers has no such class" in caplog.text
        return
    scorer.plain.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    text = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(text).logits, scorer.plain.eval()(text).logits)
