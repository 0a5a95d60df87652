"""Teachers: the divergence is that of whole distributions, from a model in memory or from what it
said before.
"""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import burnish
import pytest
import torch
from burnish import objectives
from burnish.loops.batch import collate
from burnish.loops.cli import main
from burnish.loops.config import Teacher
from burnish.loops.models.lm_head import TeacherOutputs
from burnish.loops.models.policy import Policy
from burnish.loops.runs.teacher import TaidSchedule, objective_of
from tiny import make_examples, make_model, save_model, sums, write_rows
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

BETA, TEMPERATURE = 0.3, 0.7


@pytest.fixture
def batch():
    return collate(make_examples(4))


def divergence_of_logits(student, teacher, batch, beta=BETA, temperature=TEMPERATURE):
    """One sequence at a time through both models' own forward, over the vocabulary that both
    have.
    """
    values = []
    for example in batch.examples:
        for completion, trained in zip(example.completions, example.trained, strict=True):
            ids = torch.tensor([example.prompt + completion])
            s, t = (
                (model(ids).logits[0, :, :61] / temperature).log_softmax(-1)
                for model in (student, teacher)
            )
            m = (beta * t.exp() + (1 - beta) * s.exp()).log()
            each = beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)
            values += [
                each[len(example.prompt) + i - 1] for i, marked in enumerate(trained) if marked
            ]
    return torch.stack(values)


def without_fusing(model):
    """The same model behind a head that is no single linear layer."""
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Identity())
    return model


@pytest.mark.parametrize("plain_student", [False, True])
@pytest.mark.parametrize("plain_teacher", [False, True])
def test_the_divergence_is_that_of_the_logits_whoever_can_fuse(batch, plain_student, plain_teacher):
    """The teacher is wider than the student, and its embedding is padded by three rows."""
    student, teacher = make_model("llama"), make_model("llama_wide", seed=2)
    expected = divergence_of_logits(student, teacher, batch)
    gradient = torch.autograd.grad(expected.sum(), student.parameters())
    student, teacher = (
        Policy(without_fusing(model) if plain else model)
        for model, plain in ((student, plain_student), (teacher, plain_teacher))
    )
    assert (student.fused, teacher.fused) == (not plain_student, not plain_teacher)
    teacher_outputs = teacher.teacher_outputs(
        batch, beta=BETA, temperature=TEMPERATURE, dense=plain_student
    )
    outputs = student(batch, teacher=teacher_outputs)
    torch.testing.assert_close(outputs.divergence, expected, rtol=1e-9, atol=1e-9)
    found = torch.autograd.grad(outputs.divergence.sum(), student.parameters())
    for ours, theirs in zip(found, gradient, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_all_of_the_top_k_is_the_whole_distribution(batch):
    student, teacher = Policy(make_model("llama")), Policy(make_model("llama", seed=2))
    expected = divergence_of_logits(student.plain, teacher.plain, batch).detach()
    ids, logprobs = teacher.top_k(batch, k=61, temperature=TEMPERATURE, vocab=61)
    teacher_outputs = partial(
        type(teacher.teacher_outputs(batch, beta=BETA, temperature=TEMPERATURE)), BETA, TEMPERATURE
    )
    found = student(batch, teacher=teacher_outputs(top_k=(ids, logprobs))).divergence
    torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5)


def test_fewer_of_the_top_k_bound_the_divergence_from_below(batch):
    student, teacher = Policy(make_model("llama")), Policy(make_model("llama", seed=2))
    whole = divergence_of_logits(student.plain, teacher.plain, batch).detach()
    teacher_outputs = partial(
        type(teacher.teacher_outputs(batch, beta=BETA, temperature=TEMPERATURE)), BETA, TEMPERATURE
    )
    closer = torch.zeros_like(whole)
    for k in (1, 4, 16):
        ids, logprobs = teacher.top_k(batch, k=k, temperature=TEMPERATURE, vocab=61)
        assert torch.equal(ids[:, 0], teacher.top_k(batch, k=1, temperature=1.0, vocab=61)[0][:, 0])
        found = student(batch, teacher=teacher_outputs(top_k=(ids, logprobs))).divergence.detach()
        assert torch.all(found <= whole + 1e-5)
        assert torch.all(found >= closer - 1e-5)
        closer = found


ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]


@pytest.fixture
def run(tmp_path, capsys):
    student, teacher = save_model(tmp_path / "student"), save_model(tmp_path / "teacher", seed=5)
    data = write_rows(tmp_path / "data.jsonl", ROWS)

    def run(*flags, output="run", data=data, teacher=teacher):
        place = ["--model", str(student), "--data", str(data), "--output", str(tmp_path / output)]
        told = ["--teacher.model", str(teacher)] if teacher else []
        status = main(["distill", *place, *told, "--steps", "2", "--learning_rate", "1e-3", *flags])
        said = capsys.readouterr()
        path = tmp_path / output / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if status == 0 else []
        return status, said.out + said.err, lines

    return run


def test_a_stored_teacher_teaches_the_same_as_the_run_that_stored_it(run, tmp_path):
    status, said, asked = run("--teacher.top_k", "4", output="asked")
    assert status == 0, said
    (stored,) = (tmp_path / "asked").glob("teacher-*.safetensors")
    _, _, told = run("--teacher.logprobs", str(stored), output="told", teacher=None)
    assert [line["distillation"] for line in told] == [line["distillation"] for line in asked]
    _, _, whole = run(output="whole")
    assert 0 < asked[0]["distillation"] < whole[0]["distillation"]


def test_what_a_run_stored_that_was_never_begun_is_not_what_the_next_learns_from(tmp_path):
    student, *teachers = (str(save_model(tmp_path / f"{seed}", seed=seed)) for seed in (1, 1, 2))
    settings = {"output": str(tmp_path / "run"), "batch_size": 8, "steps": 1}
    burnish.distill(student, ROWS, teacher={"model": teachers[0], "top_k": 2}, **settings)
    metrics = burnish.distill(
        student, ROWS, teacher={"model": teachers[1], "top_k": 4}, **settings
    ).train()
    assert metrics["distillation"] > 1e-4  # the first one is the student itself


def test_what_was_stored_for_other_data_is_refused(run, tmp_path):
    run("--teacher.top_k", "4", output="asked")
    (stored,) = (tmp_path / "asked").glob("teacher-*.safetensors")
    other = write_rows(
        tmp_path / "other.jsonl", [{**row, "prompt": "0" + row["prompt"]} for row in ROWS]
    )
    status, said, _ = run(
        "--teacher.logprobs", str(stored), output="told", teacher=None, data=other
    )
    assert status == 1
    assert "these are the teacher's log-probs of other data" in said
    flags = ["--teacher.logprobs", str(stored), "--teacher.temperature", "2"]
    status, said, _ = run(*flags, output="told", teacher=None)
    assert status == 1
    assert "stored at temperature 1.0, and teacher.temperature is 2.0; use 1.0" in said


def test_more_of_the_top_k_than_there_are_tokens_is_refused(run):
    status, said, _ = run("--teacher.top_k", "9999")
    assert status == 1
    assert "teacher.top_k: must be in [1, 258], the size of the vocabulary, got 9999" in said


def test_a_teacher_with_other_tokens_is_refused_by_the_first_that_differs(run, tmp_path):
    other = save_model(tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(Tokenizer.from_file(str(path)).to_str())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    path.write_text(json.dumps(tokenizer))
    status, said, _ = run(teacher=other)
    assert status == 1
    assert f"token {min(vocabulary['7'], vocabulary['8'])} is '8', and '7' for the student" in said


def test_a_classifier_is_no_teacher(run, tmp_path):
    teacher = save_model(tmp_path / "classifier")
    AutoModelForSequenceClassification.from_pretrained(teacher).save_pretrained(teacher)
    status, said, _ = run(teacher=teacher)
    assert status == 1
    assert (
        f"teacher.model: {teacher}: lm_head.weight is in none of its files, and would be random"
        in said
    )


def test_a_teacher_with_a_padded_embedding_is_accepted(run, tmp_path):
    padded = save_model(tmp_path / "padded")
    config = AutoConfig.from_pretrained(padded)
    config.vocab_size += 6
    AutoModelForCausalLM.from_config(config).save_pretrained(padded)
    status, said, lines = run(teacher=padded)
    assert status == 0, said
    assert lines[-1]["distillation"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [],
            "distillation needs one; give --teacher.model, --teacher.server, or --teacher.logprobs",
        ),
        (["--loss", "{nll: 1}", "--teacher.model", "x"], "no loss of this mix learns from it"),
        (["--teacher.logprobs", "nowhere"], "nowhere: no such file; a run with top_k leaves one"),
        (
            ["--teacher.logprobs", "x", "--teacher.top_k", "3"],
            "--teacher.server, or --teacher.logprobs and no top_k",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(run, flags, message):
    status, said, _ = run(*flags, teacher=None)
    assert status == 1
    assert message in said


OTHERS = {
    "skew_forward_kl": {"alpha": 0.2},
    "skew_reverse_kl": {"alpha": 0.2},
    "alpha_beta_divergence": {"alpha": 0.2, "beta": 0.7},
}


@pytest.mark.parametrize("plain_student", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_divergence_that_no_kernel_has_is_that_of_the_logits(
    name, plain_student, batch, monkeypatch
):
    """A few rows at a time, value and gradient."""
    monkeypatch.setattr("burnish.loops.models.lm_head._LOGITS_AT_ONCE", 64 * 5)
    student, teacher = make_model("llama"), make_model("llama_wide", seed=2)
    objective = partial(getattr(objectives, name), **OTHERS[name])
    values = []
    for example in batch.examples:
        for completion, trained in zip(example.completions, example.trained, strict=True):
            ids = torch.tensor([example.prompt + completion])
            both = [
                (model(ids).logits[0, :, :61] / TEMPERATURE).log_softmax(-1)
                for model in (student, teacher)
            ]
            at = [len(example.prompt) + i - 1 for i, marked in enumerate(trained) if marked]
            values.append(objective(both[0][at], both[1][at].detach())[0])
    expected = torch.cat(values)
    gradient = torch.autograd.grad(expected.sum(), student.parameters())

    policy = Policy(without_fusing(student) if plain_student else student)
    config = Teacher(model="t", divergence=name, **OTHERS[name])
    outputs = Policy(teacher).teacher_outputs(
        batch, beta=0.5, temperature=TEMPERATURE, dense=plain_student
    )
    outputs = replace(outputs, objective=objective_of(config, batch))
    found = policy(batch, teacher=outputs).divergence
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), policy.plain.parameters()), gradient, strict=True
    ):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_the_top_k_of_a_teacher_have_a_divergence_that_no_kernel_has(batch):
    student, teacher = Policy(make_model("llama")), Policy(make_model("llama", seed=2))
    objective = partial(objectives.skew_forward_kl, alpha=0.2)
    whole = teacher.teacher_outputs(batch, beta=0.5, temperature=TEMPERATURE)
    expected = student(batch, teacher=replace(whole, objective=objective)).divergence
    top_k = teacher.top_k(batch, k=61, temperature=TEMPERATURE, vocab=61)
    stored = TeacherOutputs(0.5, TEMPERATURE, top_k=top_k, objective=objective)
    found = student(batch, teacher=stored).divergence
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_taids_teacher_comes_at_least_with_the_steps_and_never_goes_back(batch):
    schedule = TaidSchedule(0.4, 0.4)
    feed = SimpleNamespace(steps=10)

    def seen(step):
        (prepared,) = schedule.prepare(feed, step, [batch])
        return float(prepared.columns["taid_t"])

    assert seen(0) == 0.4
    schedule.observe({"distillation": 2.0})
    assert seen(0) == 0.4  # of one loss nothing is known
    schedule.observe({"distillation": 1.0})
    # it fell by half: m = 0.005, and the pace is the sigmoid of it
    expected = 0.4 + 5e-4 * torch.sigmoid(torch.tensor(0.005, dtype=torch.float64)) * 0.6
    assert seen(0) == pytest.approx(float(expected), rel=1e-12)
    assert seen(5) == pytest.approx(0.7)
    assert seen(1) == pytest.approx(0.7)
    again = TaidSchedule(0.4, 0.4)
    again.load_state_dict(schedule.state_dict())
    assert again == schedule


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*OTHERS, "taid"])
def test_a_student_comes_closer_by_every_divergence(name, dtype, tmp_path):
    model = str(save_model(tmp_path / "student"))
    teacher = {"model": str(save_model(tmp_path / "teacher", seed=3)), "divergence": name}
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in sums(8)]
    settings = {"dtype": dtype, "batch_size": 8, "learning_rate": 1e-2, "steps": 6}
    run = burnish.distill(model, rows, teacher=teacher, output=None, **settings)
    losses = [step.metrics["distillation"] for step in run]
    if name == "taid":  # its teacher moves away from the student
        assert all(torch.isfinite(torch.tensor(losses))) and losses[1] > 0
    else:
        assert 0 < losses[-1] < losses[0]
