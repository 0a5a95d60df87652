"""A teacher of another tokenizer: over the spans of text that both share, the loss is that of their
merged distributions, as written out here and as TRL's.
"""

import json
import re
from types import SimpleNamespace

import burnish
import pytest
import torch
import yaml
from accelerate import Accelerator
from burnish.data import DataError, Example
from burnish.loops.batch import collate, length_normalized, token_mean
from burnish.loops.config import Teacher
from burnish.loops.models.policy import Policy
from burnish.loops.runs.cross_tokenizer import (
    Aligner,
    Gold,
    compared,
    load_teacher_tokenizer,
    losses_of_spans,
    mean_of_spans,
    open_cross_tokenizer,
)
from burnish.loops.train.losses import Term
from burnish.loops.train.mix import distillation
from burnish.objectives import generalized_jsd
from forked import run_forked
from small_tokenizers import of_letters, on_bytes
from tiny import CHATML, make_examples, make_model, save_model, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPERATURE = 0.7
LETTERS = of_letters(61, seed=3), of_letters(64, seed=4)


def without_fusing(model):
    """The same model behind a head that is no single linear layer."""
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Identity())
    return model


def opened(divergence, *, student, teacher, tokenizers=LETTERS, **settings):
    """The reader of a batch's teacher, and the policy."""
    config = Teacher(model="t", divergence=divergence, temperature=TEMPERATURE, **settings)
    policy = Policy(student)
    run = SimpleNamespace(tokenizer=tokenizers[0], model=policy, accelerator=Accelerator(cpu=True))
    return open_cross_tokenizer(run, config, Policy(teacher), tokenizers[1]), policy


def boundaries(tokenizer, ids):
    """How many letters tokens write up to each."""
    return [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]


def probabilities(model, prompt, ids):
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / TEMPERATURE).softmax(-1)


def merged(model, prompt, ids, groups):
    """Of each group of tokens: the last one's distribution times the others' probabilities."""
    p = probabilities(model, prompt, ids)
    rows = []
    for group in groups:
        row = p[group[-1]]
        for i in group[:-1]:
            row = row * p[i, ids[i]]
        rows.append(row)
    return torch.stack(rows) if rows else p[:0]


def groups_of(ends, shared):
    """The tokens between places where both end."""
    groups, group = [], []
    for i, end in enumerate(ends):
        group.append(i)
        if end in shared:
            groups.append(group)
            group = []
    return groups


def by_hand(kind, student, teacher, batch, *, beta=0.5, weight=None):
    """The loss of each span of each completion, the spans' groups of the student's tokens."""
    mine, theirs = LETTERS
    result = []
    for example in batch.examples:
        prompt = mine.decode(example.prompt)
        teacher_prompt = theirs(prompt)["input_ids"]
        for ids, trained in zip(example.completions, example.trained, strict=True):
            others = theirs(mine.decode(ids))["input_ids"]
            ends, other_ends = boundaries(mine, ids), boundaries(theirs, others)
            shared = {*ends} & {*other_ends}
            groups, other_groups = groups_of(ends, shared), groups_of(other_ends, shared)
            kept = [all(trained[i] for i in group) for group in groups]
            s = merged(student, example.prompt, ids, groups)[kept]
            t = merged(teacher, teacher_prompt, others, other_groups)[kept].detach()
            loss = l1(s, t) if kind == "uld" else hybrid(s, t, beta, weight)
            result.append((loss, [g for g, keep in zip(groups, kept, strict=True) if keep]))
    return result


def l1(s, t):
    width = max(s.shape[1], t.shape[1])
    sorted_of = [
        torch.nn.functional.pad(p.sort(-1, descending=True).values, (0, width - p.shape[1]))
        for p in (s, t)
    ]
    return (sorted_of[0] - sorted_of[1]).abs().sum(-1)


def hybrid(s, t, beta, weight):
    mine, theirs = (tokenizer.get_vocab() for tokenizer in LETTERS)
    both = [(mine[token], theirs[token]) for token in mine.keys() & theirs.keys()]
    a, b = map(list, zip(*both, strict=True))
    m = beta * t[:, b] + (1 - beta) * s[:, a]
    jsd = beta * t[:, b] * (t[:, b] / m).log() + (1 - beta) * s[:, a] * (s[:, a] / m).log()
    rest_s = [i for i in range(s.shape[1]) if i not in a]
    rest_t = [i for i in range(t.shape[1]) if i not in b]
    weight = len(both) / t.shape[1] if weight is None else weight
    return weight * jsd.sum(-1) + (1 - weight) * l1(s[:, rest_s], t[:, rest_t])


@pytest.fixture
def batch():
    return collate(make_examples(5, seed=2, longest=14))


@pytest.fixture
def models():
    return make_model("llama"), make_model("llama_wide", seed=2)


@pytest.mark.parametrize("plain_student", [False, True])
@pytest.mark.parametrize("plain_teacher", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("uld", {}), ("gold", {"beta": 0.3}), ("gold", {"matched_weight": 0.8})],
)
def test_the_loss_of_a_span_is_that_of_merged_distributions(
    kind, settings, plain_student, plain_teacher, batch, models, monkeypatch
):
    """A few spans at a time, value and gradient; whoever can fuse its head."""
    monkeypatch.setattr("burnish.loops.models.lm_head._LOGITS_AT_ONCE", 64 * 5)
    student, teacher = models
    written = by_hand(
        kind,
        student,
        teacher,
        batch,
        beta=settings.get("beta", 0.5),
        weight=settings.get("matched_weight"),
    )
    expected = torch.cat([loss for loss, _ in written])
    assert max(len(group) for _, groups in written for group in groups) > 1
    gradient = torch.autograd.grad(expected.sum(), student.parameters(), retain_graph=True)

    read, policy = opened(
        kind,
        student=without_fusing(student) if plain_student else student,
        teacher=without_fusing(teacher) if plain_teacher else teacher,
        **settings,
    )
    (prepared,) = Aligner(*LETTERS).prepare([batch])
    divergence = policy(prepared, teacher=read(prepared)).divergence
    ends = prepared.columns["ends_span"]
    torch.testing.assert_close(divergence[ends], expected, rtol=1e-9, atol=1e-9)
    assert divergence[~ends].abs().max() == 0
    found = torch.autograd.grad(divergence.sum(), policy.plain.parameters())
    for ours, theirs in zip(found, gradient, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def trl_offsets(tokenizer, ids):
    ends = boundaries(tokenizer, ids)
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("weights", [None, (0.3, 0.7)])
@pytest.mark.parametrize("kind", ["uld", "gold"])
def test_the_loss_is_that_of_trls_gold_trainer(kind, weights, models):
    """Its extended ULD, "bayesian", and its hybrid: means of spans, then of completions."""
    module = pytest.importorskip("trl.experimental.gold.gold_trainer")
    student, teacher = models
    mine, theirs = LETTERS
    examples = []
    for example in make_examples(4, completions=1, seed=5, longest=12):
        examples.append(example._replace(trained=[[True] * len(example.completions[0])]))
    batch = collate(examples)
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=TEMPERATURE,
        uld_teacher_temperature=TEMPERATURE,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        uld_token_merge_strategy="bayesian",
        uld_use_hybrid_loss=kind == "gold",
        uld_hybrid_matched_weight=weights and weights[0],
        uld_hybrid_unmatched_weight=weights and weights[1],
        beta=0.5,
    )
    theirs_loss = module.ULDLoss(config, mine, theirs)
    losses = []
    for example in examples:  # one at a time, so that nothing is padded
        (ids,) = example.completions
        others = theirs(mine.decode(ids))["input_ids"]
        prompts = example.prompt, theirs(mine.decode(example.prompt))["input_ids"]
        sides = []
        for tokenizer, model, prompt, tokens in (
            (mine, student, prompts[0], ids),
            (theirs, teacher, prompts[1], others),
        ):
            row = torch.tensor([prompt + tokens])
            labels = row.clone()
            labels[:, : len(prompt)] = -100
            offsets = [(0, 0)] * len(prompt) + trl_offsets(tokenizer, tokens)
            sides.append((model(row).logits, labels, row, torch.tensor([offsets])))
        (logits, labels, row, offsets), (t_logits, t_labels, t_row, t_offsets) = sides
        losses.append(
            theirs_loss(logits, t_logits.detach(), labels, t_labels, row, t_row, offsets, t_offsets)
        )
    expected = torch.stack(losses).mean()
    gradient = torch.autograd.grad(expected, student.parameters())

    settings = {"matched_weight": weights[0]} if kind == "gold" and weights else {}
    read, policy = opened(kind, student=student, teacher=teacher, **settings)
    (prepared,) = Aligner(*LETTERS).prepare([batch])
    divergence = policy(prepared, teacher=read(prepared)).divergence
    weight, share = mean_of_spans(prepared, weighting=length_normalized)
    found = (weight * divergence).sum() / share
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # its clamp is at 1e-8
    for ours, of_trl in zip(
        torch.autograd.grad(found, policy.plain.parameters()), gradient, strict=True
    ):
        assert (ours - of_trl).norm() <= 1e-4 * of_trl.norm()


def test_of_one_tokenizer_gold_is_the_divergence_itself(batch):
    """Every token is a span, and both have all tokens."""
    student, teacher = make_model("llama"), make_model("llama", seed=2)
    same = (LETTERS[0], LETTERS[0])
    read, policy = opened("gold", student=student, teacher=teacher, tokenizers=same, beta=0.3)
    texts = [
        example._replace(trained=[[True] * len(c) for c in example.completions])
        for example in batch.examples
    ]
    # as the tokenizer itself would write them, and after the same prompts
    canon = [
        Example(
            LETTERS[0](LETTERS[0].decode(e.prompt))["input_ids"],
            [LETTERS[0](LETTERS[0].decode(c))["input_ids"] for c in e.completions],
            [],
        )
        for e in texts
    ]
    canon = [e._replace(trained=[[True] * len(c) for c in e.completions]) for e in canon]
    (prepared,) = Aligner(*same).prepare([collate(canon)])
    assert prepared.columns["ends_span"].all()
    found = policy(prepared, teacher=read(prepared)).divergence
    ordinary = Policy(teacher).teacher_outputs(prepared, beta=0.3, temperature=TEMPERATURE)
    expected = policy(prepared, teacher=ordinary).divergence
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_a_mean_over_spans_has_no_weight_elsewhere(batch):
    (prepared,) = Aligner(*LETTERS).prepare([batch])
    ends = prepared.columns["ends_span"]
    weight, share = mean_of_spans(prepared, weighting=token_mean)
    assert torch.equal(weight, ends.double()) and share == ends.sum()
    weight, share = mean_of_spans(prepared, weighting=length_normalized)
    sums_of = torch.zeros(prepared.sequences, dtype=torch.float64)
    sums_of.index_add_(0, prepared.sequence, weight)
    has = torch.zeros_like(sums_of).index_add_(0, prepared.sequence, ends.double()) > 0
    torch.testing.assert_close(sums_of, has.double())
    assert share == has.sum()
    of_second = Term(distillation, of=1)
    (term, _) = losses_of_spans({"distillation": of_second}).values()
    weight, share = term.weigh(prepared)
    second = prepared.tokens_of(1)
    assert torch.equal(weight, ends[second].double()) and share == weight.sum()


def test_gold_is_never_below_zero_whatever_the_spans_add_up_to():
    torch.manual_seed(0)
    shared = torch.tensor([[0, 1, 2, 3], [1, 0, 4, 2]])
    gold = Gold(shared, beta=0.5)
    for scale in (0.0, -3.0, -30.0):
        s, t = torch.randn(50, 6), torch.randn(50, 5)
        loss, _ = gold(s.log_softmax(-1) + scale, t.log_softmax(-1))
        assert loss.isfinite().all() and (loss > 0).all()
    whole = Gold(torch.arange(5).expand(2, 5), beta=0.4)
    expected, _ = generalized_jsd(s[:, :5].log_softmax(-1), t.log_softmax(-1), beta=0.4)
    torch.testing.assert_close(whole(s[:, :5].log_softmax(-1), t.log_softmax(-1))[0], expected)


def save_with(directory, tokenizer, *, seed, scale=1.0):
    """A small model of a tokenizer on disk."""
    save_model(directory, seed=seed, vocab_size=len(tokenizer))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)  # a random model knows nothing
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Of a student on bytes and a teacher that merges them, with another end token."""
    root = tmp_path_factory.mktemp("models")
    student = str(save_model(root / "student"))
    teacher = save_with(root / "teacher", on_bytes(340), seed=3, scale=10.0)
    return student, teacher


@pytest.fixture
def rows():
    texts = [
        "the cats sat",
        "the rats sat on hats",
        "größer",
        "🙂🙃 on the mat",
        "a",
        "and the cat",
    ]
    return [
        {
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "completion": [{"role": "assistant", "content": text}],
        }
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def metrics(directories, rows):
    """``metrics(**settings)``: of each step of a run."""
    student, teacher = directories

    def metrics(divergence="gold", teacher=teacher, data=rows, of_teacher=(), **settings):
        settings = {"batch_size": 3, "steps": 2, "learning_rate": 1e-3, "shuffle": False} | settings
        told = {"model": teacher, "divergence": divergence, **dict(of_teacher)}
        run = burnish.distill(student, data, teacher=told, output=None, **settings)
        return [step.metrics for step in run]

    return metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("divergence", ["uld", "gold"])
def test_a_student_comes_closer_to_a_teacher_of_other_tokens(divergence, dtype, metrics):
    settings = {"dtype": dtype, "learning_rate": 1e-2, "steps": 8, "batch_size": 6}
    first, *_, last = metrics(divergence, **settings)
    assert 0 < last["distillation"] < 0.9 * first["distillation"]
    assert first["aligned"] > 0.99


def test_the_split_of_a_step_changes_neither_losses_nor_weights(metrics):
    """In float32; the law is of all splits, and of 16 bits."""
    whole = metrics(steps=3, micro_tokens=None)
    parts = metrics(steps=3, micro_tokens=40)
    for name in ("distillation", "aligned", "grad_norm"):
        expected = [step[name] for step in whole]
        assert [step[name] for step in parts] == pytest.approx(expected, rel=1e-4)


def test_held_out_rows_are_read_by_the_teacher_too(directories, rows, tmp_path):
    student, teacher = directories
    told = {"model": teacher, "divergence": "uld"}
    settings = {"batch_size": 6, "steps": 1, "learning_rate": 0.0, "eval_data": rows}
    output = str(tmp_path / "run")
    burnish.distill(student, rows, teacher=told, output=output, **settings).train()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/distillation"] == pytest.approx(lines[-1]["distillation"], rel=1e-5)


@pytest.mark.parametrize("divergence", ["uld", "gold"])
def test_what_the_student_samples_is_read_by_the_teacher(divergence, metrics):
    """A random student samples bytes that are no text: those are in no span."""
    sampled = metrics(divergence, on_policy=1.0, max_tokens=12, group_size=2, show_every=0)
    for step in sampled:
        assert step["on_policy"] == 1 and 0 < step["aligned"] < 1
        assert 0 < step["distillation"] < 2
    mixed = metrics(
        divergence,
        on_policy=0.5,
        max_tokens=6,
        show_every=0,
        steps=4,
        loss={"distillation": 1.0, "nll": 0.5},
    )
    assert {step["on_policy"] for step in mixed} == {0.0, 1.0}


def test_the_teacher_reads_its_own_chat_template_if_prompts_are_named(directories, rows, metrics):
    """`teacher.prompt`, rendered by the teacher's tokenizer."""
    _, teacher = directories
    plain = metrics(steps=1)
    named = metrics(steps=1, of_teacher={"prompt": "prompt"})
    # both templates write the same
    assert named[0]["distillation"] == pytest.approx(plain[0]["distillation"], rel=1e-6)
    other = AutoTokenizer.from_pretrained(teacher)
    other.chat_template = CHATML.replace("<|start|>", "- ")
    changed = metrics(steps=1, of_teacher={"prompt": "prompt", "tokenizer": other})
    assert changed[0]["distillation"] != pytest.approx(named[0]["distillation"], rel=1e-3)


def test_a_model_and_its_tokenizer_may_be_given_as_objects(directories, metrics):
    _, teacher = directories
    model = AutoModelForCausalLM.from_pretrained(teacher)
    named, given = metrics(steps=1), metrics(steps=1, teacher=model)
    assert given[0]["distillation"] == named[0]["distillation"]
    model.config._name_or_path = ""
    with pytest.raises(ValueError, match=r"^teacher.tokenizer: a model made in memory has no name"):
        load_teacher_tokenizer(Teacher(model=model, divergence="uld"))
    with pytest.raises(DataError, match=r"340 embeddings, and the tokenizer has 360 tokens"):
        metrics(teacher=model, of_teacher={"tokenizer": on_bytes(360)})


def test_a_tokenizer_that_is_an_object_is_known_by_its_tokens(directories, rows, tmp_path):
    """In config.yaml: a resumed run takes the same one, and no other of the same class."""
    student, teacher = directories
    same = AutoTokenizer.from_pretrained(teacher)
    told = {"model": teacher, "divergence": "uld", "tokenizer": same}
    settings = {"output": str(tmp_path / "run"), "batch_size": 3, "save_every": 1}
    burnish.distill(student, rows, teacher=told, steps=1, **settings).train()
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["teacher"]["tokenizer"]
    assert re.fullmatch(r"\w+ [0-9a-f]{16}", written)
    assert written.startswith(type(same).__name__)

    same("longer", truncation=True, max_length=3)  # which it remembers
    resumed = burnish.distill(student, rows, teacher=told, steps=2, resume=True, **settings)
    assert [step.number for step in resumed] == [2]

    templated = AutoTokenizer.from_pretrained(teacher)
    templated.chat_template = CHATML.replace("<|start|>", "- ")
    for other in (on_bytes(330), templated):
        told["tokenizer"] = other
        with pytest.raises(ValueError, match=f"was run with teacher=.*'tokenizer': '{written}'"):
            burnish.distill(student, rows, teacher=told, steps=3, resume=True, **settings)


def test_the_teacher_reads_the_students_prompt_as_text_after_its_own_first_token():
    student, teacher = on_bytes(258), LETTERS[1]
    aligner = Aligner(student, teacher)
    ids = student("abc")["input_ids"]
    assert aligner.prompt([student.bos_token_id, *ids]) == teacher("abc")["input_ids"]
    assert aligner.prompt([student.eos_token_id]) == [teacher.bos_token_id]
    teacher = of_letters(64, seed=4)
    teacher.bos_token = None
    assert Aligner(student, teacher).prompt([student.bos_token_id]) == [teacher.eos_token_id]
    teacher.eos_token = None
    with pytest.raises(DataError, match="has no token to begin with; set its bos_token"):
        Aligner(student, teacher).prompt([student.bos_token_id])


def test_what_the_teacher_cannot_read_is_told_once(metrics, directories, rows, caplog, tmp_path):
    metrics(steps=2)
    (line,) = [each for each in caplog.messages if "reads as plain text" in each]
    assert "has no <|start|>" in line or "has no <|end|>" in line
    assert not any("in no span" in each for each in caplog.messages)
    caplog.clear()
    lower = save_with(tmp_path / "lower", on_bytes(300, lower=True), seed=4)
    for row in rows:
        row["completion"][0]["content"] = "A" + row["completion"][0]["content"]
    steps = metrics("uld", teacher=lower)
    (line,) = [each for each in caplog.messages if "in no span" in each]
    assert "trained tokens of this step are in no span of text" in line
    # only the end, and what follows it, is still the same
    assert 0 < steps[0]["aligned"] < 0.3


def test_a_text_beyond_the_teachers_context_is_told(directories, rows, metrics):
    _, teacher = directories
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.config.max_position_embeddings = 20
    with pytest.raises(DataError, match=r"make \d+ of its tokens, and its context is 20; shorten"):
        metrics(teacher=model)


def test_vocabularies_without_a_common_token_leave_uld():
    student, teacher = of_letters(61, seed=3), of_letters(64, seed=4)
    vocabulary = {f"{token}!": index for token, index in teacher.get_vocab().items()}
    ends = {"bos_token_id": None, "eos_token_id": None, "chat_template": None}
    other = SimpleNamespace(get_vocab=lambda: vocabulary, **ends)
    with pytest.raises(DataError, match=r"gold compares the tokens .* there are none; take uld"):
        compared(Teacher(model="t", divergence="gold"), student, other)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_learn_from_a_teacher_of_other_tokens_under_autocast(
    shards, directories, rows, metrics, tmp_path
):
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = [*directories, data, tmp_path / "run"]
    for status, printed in run_forked(2, "rank_cross_tokenizer", *map(str, settings), shards):
        assert status == 0, printed[-3000:]
    alone = metrics(batch_size=6, dtype="bfloat16", shuffle=True, learning_rate=2e-5)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line, step in zip(lines, alone, strict=True):
        assert line["distillation"] == pytest.approx(step["distillation"], rel=2e-2)
        assert line["aligned"] == pytest.approx(step["aligned"], rel=1e-6)
