"""A teacher on a vLLM server: the divergence over its k likeliest tokens and the rest, asked for in
every step; against a stand-in for the server, and, slow, against vLLM.
"""

import itertools
import json
import time
from contextlib import contextmanager

import burnish
import pytest
import torch
import vllm_model
from burnish.loops.batch import collate
from burnish.loops.cli import main
from burnish.loops.config import Teacher
from burnish.loops.rl.served_teacher import ServedTeacher
from burnish.loops.rollouts.event_loops import run
from burnish.loops.rollouts.source import SourceError
from burnish.loops.rollouts.vllm.rating import Passage, Rating, RatingServer, open_client
from burnish.loops.runs.teacher import outputs_of_columns
from forked import run_forked
from tiny import make_examples, save_model, sums, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_fake import Fake, error
from vllm_servers import FLAGS, start, vllm_python


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directories of a student and of its teacher."""
    directory = tmp_path_factory.mktemp("models")
    student = save_model(directory / "student")
    teacher = save_model(directory / "teacher", seed=5)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # a random model knows nothing
    model.save_pretrained(teacher)
    return student, teacher


@pytest.fixture
def fake(models):
    """A server of the teacher."""
    _, directory = models
    teacher = AutoModelForCausalLM.from_pretrained(directory)
    fake = Fake(AutoTokenizer.from_pretrained(directory))
    fake.root = str(directory)

    def rated(tokens):
        with torch.no_grad():
            logits = teacher(torch.tensor([tokens])).logits[0, :-1]
        return logits.double().log_softmax(-1).tolist()

    fake.rated, fake.max_logprobs = rated, len(fake.tokenizer)
    yield fake
    fake.close()


@pytest.fixture
def rows():
    return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in sums(6)]


@pytest.fixture
def losses(models, rows, tmp_path):
    """``losses(teacher, **settings)``: of each step of a run of the student."""
    student, _ = models

    def losses(teacher, **settings):
        settings = {"batch_size": 3, "steps": 2, "learning_rate": 1e-3, "shuffle": False} | settings
        run = burnish.distill(str(student), rows, teacher=teacher, output=None, **settings)
        return [step.metrics["distillation"] for step in run]

    return losses


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl"])
def test_with_all_of_the_vocabulary_the_loss_is_that_of_the_teacher_in_memory(
    divergence, models, fake, losses
):
    own = losses({"model": str(models[1]), "divergence": divergence})
    served = {"server": fake.url, "top_k": fake.vocab, "divergence": divergence}
    assert losses(served) == pytest.approx(own, rel=0, abs=1e-6)


def test_with_fewer_tokens_it_is_a_lower_bound_that_grows_with_them(models, fake, losses):
    """Merging tokens of both distributions into one never adds to their divergence."""
    whole = losses({"model": str(models[1])}, steps=1)[0]
    bounds = [losses({"server": fake.url, "top_k": k}, steps=1)[0] for k in (1, 4, 16, 64)]
    assert 0 < bounds[0] < bounds[1] < bounds[2] < bounds[3] < whole


def test_each_step_asks_for_its_own_completions_and_no_others(models, fake, rows, losses):
    losses({"server": fake.url, "top_k": 3})
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    asked = [body for path, body in fake.calls if path == "/v1/completions"]
    met, *asked = asked
    assert met["prompt"] == [0, len(tokenizer) - 1]
    assert all(body["prompt_logprobs"] == 3 and body["max_tokens"] == 1 for body in asked)
    said = sorted(tokenizer.decode(body["prompt"]) for body in asked)
    assert len(said) == len(rows)
    for row in rows:
        question = row["prompt"][0]["content"]
        answer = row["completion"][0]["content"]
        assert any(question in text and answer in text for text in said)


def test_a_teacher_reads_prompts_of_its_own_on_a_server_too(models, fake, rows, losses):
    for row in rows:
        answer = row["completion"][0]["content"]
        row["hint"] = [{"role": "user", "content": f"The answer is {answer}"}]
    plain = losses({"server": fake.url, "top_k": 8})
    own = losses({"model": str(models[1]), "prompt": "hint"})
    served = losses({"server": fake.url, "top_k": fake.vocab, "prompt": "hint"})
    assert served == pytest.approx(own, rel=0, abs=1e-6) and served != plain


@pytest.mark.parametrize("loss", ["distillation", "sampled_reverse_kl"])
def test_a_server_rates_what_the_student_samples(loss, models, fake, rows):
    settings = {"on_policy": 1.0, "batch_size": 3, "steps": 2, "max_tokens": 5, "loss": loss}
    settings |= {"output": None, "seed": 3, "show_every": 0}
    teacher = {"server": fake.url}
    if loss == "distillation":
        teacher["top_k"] = fake.vocab

    def losses(teacher):
        run = burnish.distill(str(models[0]), rows, teacher=teacher, **settings)
        return [step.metrics[loss] for step in run]

    assert losses(teacher) == pytest.approx(losses({"model": str(models[1])}), rel=0, abs=1e-5)


def test_columns_follow_the_order_of_the_batchs_tokens():
    """Two completions a prompt, of which some tokens are not trained; and no examples at all."""
    examples = make_examples(3, completions=2)
    batch = collate(examples)

    def rate(passages):
        return [
            Rating(
                [-float(each.tokens[place]) for place in each.places],
                [[each.tokens[place], 0] for place in each.places],
                [[-1.0, -2.0] for _ in each.places],
            )
            for each in passages
        ]

    prepared, empty = ServedTeacher(rate, 2).prepare([batch, collate([])])
    assert torch.equal(prepared.columns["teacher_logp"], -batch.target.float())
    assert torch.equal(prepared.columns["teacher_ids"][:, 0].long(), batch.target)
    assert empty.columns["teacher_ids"].shape == (0, 2)
    outputs = outputs_of_columns(Teacher(server="s", top_k=2, divergence="reverse_kl"), prepared)
    assert outputs.beta == 1 and outputs.top_k[0].dtype == torch.int64


@pytest.fixture
def command(models, rows, tmp_path, capsys):
    """``command(*flags)``: the status of the command, and what it said."""

    def command(*flags):
        data = write_rows(tmp_path / "data.jsonl", rows)
        place = ["--model", str(models[0]), "--data", str(data), "--output", str(tmp_path / "run")]
        try:
            status = main(["distill", *place, "--steps", "1", *map(str, flags)])
        except SystemExit as refused:  # of settings that contradict each other
            status = refused.code
        said = capsys.readouterr()
        return status, said.out + said.err

    return command


def test_more_log_probs_than_the_server_gives_are_told_with_the_flag(fake, command):
    fake.max_logprobs = 20
    status, said = command("--teacher.server", fake.url, "--teacher.top_k", 21)
    assert status == 1
    assert f"teacher.top_k: the server at {fake.url} gives fewer than 21 log-probs" in said
    assert "restart it with --max-logprobs 21, or lower teacher.top_k" in said


def test_a_server_with_other_tokens_is_refused(fake, command, models, tmp_path):
    flags = ["--teacher.server", fake.url, "--teacher.top_k", 2]
    fake.odd["/tokenize"] = lambda body: (200, {"tokens": [1, 2, 3]})
    status, said = command(*flags)
    assert status == 1 and "is another one than the trainer's" in said
    del fake.odd["/tokenize"]
    fake.vocab -= 1
    status, said = command(*flags)
    assert status == 1 and f"the model at {fake.url} lacks tokens of the student" in said


def answering(fake, change):
    """Have the stand-in's log-probs changed: ``change(places)``."""
    usual = fake.do_v1_completions

    def answer(body):
        status, reply = usual(body)
        change(reply["choices"][0]["prompt_logprobs"])
        return status, reply

    fake.odd["/v1/completions"] = answer


def clear(place):
    return lambda places: places[place].clear()


def to(number):
    def change(places):
        for at in places[1].values():
            at["logprob"] = number

    return change


def unknown(places):
    places[1]["999"] = {"logprob": -1e-9, "rank": 1}


def only_own(places):
    for at in places[1:]:
        for token in list(at)[1:]:
            del at[token]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places.pop(), "it was sent 2 tokens, and gives log-probs of 1"),
        (clear(1), "it gives no log-prob of token"),
        (only_own, "it gives 1 log-probs of a token, and teacher.top_k is 2"),
        (unknown, "among its likeliest tokens is 999, and the student has 258"),
        (to(2.5), "the log-prob of a token is 2.5, above 0; restart it without --logprobs-mode"),
        (to(-0.01), "likeliest tokens add up to 1.98"),
        (to(float("nan")), "its weights give no log-probs"),
        (to(-9999.0), "look for NaN in its weights"),
        (to("x"), "its answer has no prompt_logprobs as vLLM gives them"),
    ],
)
def test_an_answer_that_is_no_rating_is_told_in_one_sentence(change, message, fake, command):
    answering(fake, change)
    status, said = command("--teacher.server", fake.url, "--teacher.top_k", 2)
    assert status == 1 and message in said


def test_a_server_that_is_busy_is_asked_again_and_a_lost_one_told(fake, models):
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    server = RatingServer(open_client(fake.url, timeout=5.0, key=None), 3, backoff=0.01)
    run(server.meet(tokenizer, 2, fake.vocab))
    refusals = iter([error(503, "busy"), (None, 0.01)])
    usual = fake.do_v1_completions
    fake.odd["/v1/completions"] = lambda body: next(refusals, None) or usual(body)
    passages = [Passage([5, 6, 7], [1, 2]), Passage([8, 9], [1])]
    first, second = run(server.rate(passages, 2, fake.vocab))
    expected = torch.tensor(fake.rated([5, 6, 7]), dtype=torch.float64)
    assert first.logp == [expected[0, 6].item(), expected[1, 7].item()]
    top = expected.topk(2)
    assert first.ids == top.indices.tolist() and first.logprobs == top.values.tolist()
    assert len(second.logp) == 1
    asked = len(fake.calls)
    assert run(server.rate([Passage([5, 6], [])], 2, fake.vocab)) == [Rating([], [], [])]
    assert len(fake.calls) == asked, "of no token nothing is asked"
    fake.odd["/v1/completions"] = lambda body: error(503, "busy")
    with pytest.raises(
        SourceError, match=r"could not be asked in 3 attempts over \d+ s: .*busy; check"
    ):
        run(server.rate(passages[:1], 2, fake.vocab))
    fake.odd["/v1/completions"] = lambda body: error(400, "no such field")
    with pytest.raises(SourceError, match=r"answered 400: no such field$"):
        run(server.rate(passages[:1], 2, fake.vocab))


def test_a_key_is_asked_for_by_the_name_of_its_setting(fake, command, monkeypatch):
    fake.key = "sesame-1234"
    flags = ["--teacher.server", fake.url, "--teacher.top_k", 2]
    status, said = command(*flags)
    assert status == 1 and "set teacher.api_key to the key" in said
    monkeypatch.setenv("TEACHER_KEY", "sesame-1234")
    status, said = command(*flags, "--teacher.api_key", "${ENV:TEACHER_KEY}")
    assert status == 0 and "sesame" not in said


def test_a_row_beyond_the_servers_context_is_named_before_the_first_step(fake, command):
    models = fake.do_v1_models

    def short(body):
        status, reply = models(body)
        reply["data"][0]["max_model_len"] = 9
        return status, reply

    fake.odd["/v1/models"] = short
    status, said = command("--teacher.server", fake.url, "--teacher.top_k", 2)
    assert status == 1 and "data.jsonl line 1: the teacher's prompt of" in said
    assert "the teacher's context is 8; shorten rows (max_length)" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--teacher.top_k", 999],
            "teacher.top_k: must be in [1, 258], the size of the vocabulary",
        ),
        ([], "teacher.top_k: a server gives the likeliest tokens, and how many is missing"),
        (["--teacher.top_k", 2, "--teacher.temperature", 2], "at temperature 1, and those of k"),
        (["--teacher.top_k", 2, "--teacher.model", "x"], "teacher: distillation needs one; give"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags, message, fake, command):
    status, said = command("--teacher.server", fake.url, *flags)
    assert status in (1, 2) and message in said
    assert not fake.calls


def test_the_loss_and_the_weights_do_not_depend_on_the_split(models, fake, losses):
    served = {"server": fake.url, "top_k": 8}
    whole = losses(served, steps=3)
    assert losses(served, steps=3, micro_tokens=40) == pytest.approx(whole, rel=1e-5)
    assert len(set(whole)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_two_ranks_ask_for_their_own_completions_under_autocast(
    shards, models, fake, rows, losses, tmp_path
):
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = [models[0], fake.url, data, tmp_path / "run"]
    for status, printed in run_forked(2, "rank_served", *map(str, settings), shards):
        assert status == 0, printed[-3000:]
    asked = [body["prompt"] for path, body in fake.calls if path == "/v1/completions"]
    assert len(asked) == 1 + 2 * 4  # the main process met the server, and each step has 4 rows
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    alone = burnish.distill(
        str(models[0]),
        str(data),
        teacher={"server": fake.url, "top_k": 8},
        dtype="bfloat16",
        batch_size=4,
        steps=2,
    )
    for step, line in zip(alone, lines[-2:], strict=True):
        assert line["distillation"] == pytest.approx(step.metrics["distillation"], rel=2e-3)


def test_a_rank_may_stand_for_as_long_as_all_attempts_at_the_teacher_take(
    fake, losses, monkeypatch
):
    """When it meets the server, and in each of two steps."""
    allowed = []

    @contextmanager
    def may_stand(seconds):
        before = len(fake.calls)
        yield
        assert len(fake.calls) > before
        allowed.append(seconds)

    monkeypatch.setattr("burnish.loops.rl.served_teacher.may_stand", may_stand)
    losses({"server": fake.url, "top_k": 2, "timeout": 100.0, "attempts": 3})
    assert allowed == [3 * (100 + 30)] * 3


@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_teacher_are_not_ended(models, fake, rows, tmp_path):
    """For three times as long as they may stand otherwise: to meet it, and in a step."""
    data = write_rows(tmp_path / "rows.jsonl", rows)
    usual = fake.do_v1_completions
    asked = itertools.count()

    def slow(body):
        if next(asked) in (0, 6):
            time.sleep(9)
        return usual(body)

    fake.odd["/v1/completions"] = slow
    settings = [models[0], fake.url, data, tmp_path / "run", 1, "--hang_seconds", 3]
    for status, printed in run_forked(2, "rank_served", *map(str, settings)):
        assert status == 0, printed[-3000:]
    assert next(asked) == 1 + 2 * 4


@pytest.mark.slow
def test_vllm_teaches_as_the_model_in_memory(tmp_path, rows):
    vllm_python()
    student = vllm_model.save_model(tmp_path / "student", seed=1)
    flags = [*FLAGS, "--max-logprobs", "-1"]
    with start(tmp_path, flags=flags) as server:
        teacher = str(tmp_path / "model")
        served = {"server": server.url, "api_key": server.key}
        settings = {"batch_size": 3, "steps": 2, "output": None, "learning_rate": 1e-3}

        def losses(teacher, loss="distillation", **more):
            run = burnish.distill(str(student), rows, teacher=teacher, **settings | more, loss=loss)
            return [step.metrics[loss] for step in run]

        whole = losses({"model": teacher})
        vocabulary = len(AutoTokenizer.from_pretrained(teacher))
        assert losses({**served, "top_k": vocabulary}) == pytest.approx(whole, rel=0, abs=2e-5)
        bound = losses({**served, "top_k": 4})
        assert 0 < bound[0] < whole[0]
        sampled = {"on_policy": 1.0, "max_tokens": 5, "show_every": 0, "seed": 2}
        reverse = losses({"model": teacher}, "sampled_reverse_kl", **sampled)
        assert losses(served, "sampled_reverse_kl", **sampled) == pytest.approx(reverse, abs=1e-4)
        long = Passage([5] * 499, [498])
        rating = RatingServer(open_client(server.url, timeout=60, key=server.key), 1)
        run(rating.meet(AutoTokenizer.from_pretrained(teacher), 2, vocabulary))
        assert rating.context == 500
        assert run(rating.rate([long], 2, vocabulary))[0].logp[0] < 0
        with pytest.raises(SourceError, match="max_tokens must be at least 1, got 0"):
            run(rating.rate([Passage([5] * 500, [499])], 2, vocabulary))
