"""Where a recipe's answers come from: the settings that choose it, as they are written in a
configuration.
"""

import random
import types
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from burnish.data import records
from burnish.loops.config import Lora
from burnish.loops.environments import Limits
from burnish.loops.environments.games import guess_rows
from burnish.loops.recipes.grpo import open_grpo
from burnish.loops.recipes.settings import GRPO
from burnish.loops.rl import sources as sampling
from burnish.loops.rl.context import open_rl
from burnish.loops.rl.settings import VLLM
from burnish.loops.rl.sources import check_sampling, flags_of, open_updates
from burnish.loops.rollouts.event_loops import Gate
from burnish.loops.rollouts.source import SourceError
from burnish.loops.rollouts.vllm.server import VLLMServer
from burnish.loops.rollouts.vllm.weights import transit_directory
from online import lines, prepare, stored
from peft import LoraConfig
from safetensors.torch import load_file
from tiny import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_fake import Fake, choice, error


@pytest.fixture
def fields(tmp_path):
    # The stand-in's log-probs are made up.
    return {
        **prepare(tmp_path),
        "output": str(tmp_path / "run"),
        "max_logp_difference": float("inf"),
    }


@pytest.fixture
def fake(fields):
    fake = Fake(AutoTokenizer.from_pretrained(fields["model"]))
    fake.root = fields["model"]
    fake.config["model_config"]["max_model_len"] = 256
    generate = fake.do_inference_v1_generate

    def answer(body):  # answers that differ in how many of their tokens are even
        seed = body["sampling_params"].get("seed", 0)
        tokens = [10 + (seed >> shift) % 200 for shift in range(6)]
        status, said = generate(body)
        return (status, said) if status != 200 else (200, {"choices": [choice(tokens, fake.label)]})

    fake.do_inference_v1_generate = answer
    yield fake
    fake.close()


def orders(fake, path):
    return [body for asked, body in fake.calls if asked == path]


def test_a_running_server_gets_the_weights_of_each_step_and_its_completions_train(fake, fields):
    open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url))).train()
    labels = [
        body["weight_version"].split("@")[0] for body in orders(fake, "/finish_weight_update")
    ]
    samples = stored(Path(fields["output"]))
    assert labels == ["0", "1"]
    assert len(samples) == 2 * 4 * 4
    # what the stand-in says
    assert {logprob for sample in samples for logprob in sample["logprobs"]} == {-1.0}


@pytest.mark.parametrize(("share", "factor"), [(0.1, 1.15), (0.3, 1.6)])
def test_a_server_that_refuses_some_completions_trains_the_same_weights(
    share, factor, fake, fields, monkeypatch
):
    monkeypatch.setattr("burnish.loops.rollouts.retries._LONGEST", 0.01)
    fields = {**fields, "prompts_per_rollout": 8, "group_size": 8}
    output = Path(fields["output"])
    open_grpo(
        GRPO(**{**fields, "output": f"{output}-quiet"}, source="vllm", vllm=VLLM(url=fake.url))
    ).train()
    usual, asked = fake.do_inference_v1_generate, Counter()

    def refuse_some(body):
        seed = body["sampling_params"].get("seed")
        if seed is None:  # a control call
            return usual(body)
        asked[seed] += 1
        rng = random.Random(f"{seed}, {asked[seed]}")
        return error(rng.choice([429, 500, 503]), "busy") if rng.random() < share else usual(body)

    fake.do_inference_v1_generate = refuse_some
    open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url))).train()
    completions = 2 * 8 * 8
    assert len(asked) == completions < asked.total() <= factor * completions
    assert lines(output)[-1]["sampling/retries"] == asked.total() - completions
    weights = [
        (Path(run) / "model/model.safetensors").read_bytes() for run in (output, f"{output}-quiet")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("form", [", ".join, list], ids=["with commas", "a list"])
def test_several_servers_share_the_requests_and_all_have_the_weights(form, fake, fields):
    other = Fake(fake.tokenizer)
    try:
        other.root, other.config = fake.root, fake.config
        asked, generate = [], other.do_inference_v1_generate
        other.do_inference_v1_generate = lambda body: (asked.append(body), generate(body))[1]
        open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=form([fake.url, other.url])))).train()
        for server in (fake, other):
            labels = [
                body["weight_version"].split("@")[0]
                for body in orders(server, "/finish_weight_update")
            ]
            assert labels == ["0", "1"]
        assert sum(body["sampling_params"]["max_tokens"] > 1 for body in asked) == 2 * 2 * 4
        assert len(stored(Path(fields["output"]))) == 2 * 4 * 4
    finally:
        other.close()


def test_adapters_go_to_a_server_under_a_name_for_each_version(fake, fields):
    fake.config |= {"weight_transfer_config": None, "lora_config": {}}
    written = []
    load = fake.do_v1_load_lora_adapter
    fake.do_v1_load_lora_adapter = lambda body: (
        written.append(load_file(Path(body["lora_path"]) / "adapter_model.safetensors")),
        load(body),
    )[1]
    open_grpo(
        GRPO(**fields, lora=Lora(r=2), source="vllm", vllm=VLLM(url=fake.url, updates="adapters"))
    ).train()
    first, second = written
    assert all("lora_" in name for name in first)
    # the step between them has changed it
    assert any(not torch.equal(first[name], second[name]) for name in first)


class Computing(Fake):
    """A stand-in that samples from a model of its own, whose weights are those that it is sent,
    unless it is stale.
    """

    def __init__(self, model, tokenizer, *, stale=False):
        super().__init__(tokenizer)
        self.model, self.stale = model, stale

    def do_update_weights(self, body):
        if not self.stale:
            self.model.load_state_dict(load_file(body["update_info"]["path"]), strict=False)
        return 200, {}

    def do_inference_v1_generate(self, body):
        how = body["sampling_params"]
        if how["max_tokens"] == 1:
            return super().do_inference_v1_generate(body)
        random = torch.Generator().manual_seed(how["seed"])
        row, content = list(body["token_ids"]), []
        for _ in range(how["max_tokens"]):
            with torch.no_grad():
                logprobs = self.model(torch.tensor([row])).logits[0, -1].log_softmax(-1)
            logprobs[how["stop_token_ids"]] = -torch.inf  # so that completions are of one length
            row.append(int(logprobs.exp().multinomial(1, generator=random)))
            content.append({"token_id": row[-1], "logprob": float(logprobs[row[-1]])})
        tokens = row[len(body["token_ids"]) :]
        return 200, {"choices": [choice(tokens, self.label, logprobs={"content": content})]}


@pytest.mark.parametrize("stale", [False, True])
def test_a_server_that_did_not_take_the_weights_ends_the_run_in_its_first_step(stale, fields):
    model = AutoModelForCausalLM.from_pretrained(fields["model"])
    with torch.no_grad():
        model.lm_head.weight.mul_(100)  # another model: a few tokens are likely
    fake = Computing(model, AutoTokenizer.from_pretrained(fields["model"]), stale=stale)
    fake.config["model_config"]["max_model_len"] = 256
    run = Path(fields["output"])
    del fields["max_logp_difference"]
    training = open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url), save_every=1))
    try:
        if not stale:
            training.train()
            assert [line["sampling/logp_difference"] < 0.1 for line in lines(run)] == [True, True]
            return
        with pytest.raises(
            SourceError,
            match=r"differ from the trainer's by .* max_logp_difference is 1: it sampled",
        ):
            training.train()
        assert not list((run / "checkpoints").glob("step-*")) and not (run / "model").exists()
        assert len(orders(fake, "/finish_weight_update")) == 1, "the first rollout was the last"
    finally:
        fake.close()


def test_a_server_that_is_started_is_told_its_options_and_ends_with_the_run(
    fake, fields, monkeypatch
):
    asked, ended = {}, []

    class Started:
        url = fake.url
        key = fake.key = "of this run"

        def __init__(self, model, **options):
            asked.update(options, model=model)

        def revive(self):
            raise AssertionError("it is well")

        def close(self):
            ended.append(True)

    monkeypatch.setattr(sampling, "ServerProcess", Started)
    options = {"max_model_len": 64, "enforce_eager": True, "enable_prefix_caching": False}
    vllm = VLLM(python="/bin/sh", options=options, environment={"CUDA_VISIBLE_DEVICES": "1"})
    open_grpo(GRPO(**fields, source="vllm", vllm=vllm)).train()
    assert asked["flags"] == [
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    ]
    assert (asked["model"], asked["dtype"], asked["python"]) == (
        fields["model"],
        "float32",
        "/bin/sh",
    )
    assert asked["environment"] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert ended == [True]


def test_a_run_that_loses_one_of_two_servers_ends_in_the_same_weights(fake, fields):
    output = Path(fields["output"])
    quiet = {**fields, "output": f"{output}-quiet"}
    open_grpo(GRPO(**quiet, source="vllm", vllm=VLLM(url=fake.url))).train()
    other, asked = Fake(fake.tokenizer), []
    other.root, other.config = fake.root, fake.config

    def die(body):
        """In the middle of the second rollout; of one that it has answered already, too."""
        if body["sampling_params"].get("seed") is not None:
            asked.append(body)
        if len(asked) <= 12:
            return fake.do_inference_v1_generate(body)
        other.odd = dict.fromkeys(["/health", "/inference/v1/generate"], lambda body: (None, 0))
        return None, 0

    other.do_inference_v1_generate = die
    try:
        urls = [fake.url, other.url]
        open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=urls))).train()
    finally:
        other.close()
    assert len(asked) > 12
    weights = [
        (Path(run) / "model/model.safetensors").read_bytes() for run in (output, f"{output}-quiet")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"url": "http://127.0.0.1:1", "servers": 2}, "leave out python, .* and servers, or the"),
        ({"servers": 2, "options": {"port": 8001}}, "port is that of one server"),
        (
            {"servers": 2, "environment": {"CUDA_VISIBLE_DEVICES": "0,1,2"}},
            "names 3 devices, which vllm.servers=2 can't have equally many of",
        ),
    ],
)
def test_settings_that_contradict_several_servers_are_refused(changed, message):
    config = GRPO(model="m", data="d", output="o", source="vllm", vllm=VLLM(**changed))
    with pytest.raises(ValueError, match=message):
        config.refuse_contradictions()


def test_several_servers_that_are_started_divide_devices_and_memory(fake, fields, monkeypatch):
    other, asked, ended = Fake(fake.tokenizer), {}, []
    other.root, other.config = fake.root, fake.config
    other.do_inference_v1_generate = fake.do_inference_v1_generate
    urls = {"vllm.log": fake.url, "vllm-2.log": other.url}

    class Started:
        key = None

        def __init__(self, model, **options):
            self.name = Path(options["log"]).name
            self.url = urls[self.name]
            asked[self.name] = options

        def revive(self):
            raise AssertionError("it is well")

        def close(self):
            ended.append(self.name)

    monkeypatch.setattr(sampling, "ServerProcess", Started)
    vllm = VLLM(servers=2, environment={"CUDA_VISIBLE_DEVICES": "1, 2,5,7", "A": "b"})
    try:
        open_grpo(GRPO(**fields, source="vllm", vllm=vllm)).train()
    finally:
        other.close()
    assert fake.label == other.label and fake.label.startswith("1@"), "files are written once"
    assert sorted(ended) == sorted(urls)
    environments = [asked[name]["environment"] for name in urls]
    assert environments == [
        {"CUDA_VISIBLE_DEVICES": "1,2", "A": "b"},
        {"CUDA_VISIBLE_DEVICES": "5,7", "A": "b"},
    ]
    assert [asked[name]["share"] for name in urls] == [0.2, 0.2]


def test_a_server_that_the_user_runs_gets_the_key_that_is_configured(fake, fields):
    fake.key = "of the user"
    with pytest.raises(
        SourceError, match=r"answered 401: Unauthorized; set vllm\.api_key to the key"
    ):
        open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url, api_key="another")))
    open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url, api_key="of the user"))).train()


def test_a_servers_limits_are_settings(fake, fields, monkeypatch):
    made = {}

    class Watched(VLLMServer):
        def __init__(self, url, **options):
            made.update(options)
            super().__init__(url, **options)

    monkeypatch.setattr(sampling, "VLLMServer", Watched)
    limits = {"timeout": 50.0, "concurrency": 5, "patience": 70.0}
    config = GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url, attempts=3, **limits))
    context = open_rl(config)
    assert context.scheduler.attempts == 3 and {name: made[name] for name in limits} == limits
    context.scheduler.close()


def test_a_context_can_be_copied_after_a_reference_was_made(fake, fields):
    config = GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url), ref_model_sync_steps=1)
    context = open_rl(config)
    context.run.reference("copy")
    assert context.run.synced is not None
    assert replace(context, rewards=()).run is context.run
    assert replace(context.run, config=replace(config, seed=1)).model is context.run.model
    context.scheduler.close()


def test_a_run_goes_on_with_another_server_and_more_patience(fake, fields):
    open_grpo(
        GRPO(**fields | {"steps": 1}, save_every=1, source="vllm", vllm=VLLM(url=fake.url))
    ).train()
    moved = VLLM(url=f"http://localhost:{fake.port}", patience=70.0)
    open_grpo(GRPO(**fields, resume=True, source="vllm", vllm=moved)).train()
    assert [line["step"] for line in lines(Path(fields["output"]))] == [1, 2]


@pytest.mark.parametrize("lora", [Lora(), Lora(r=2)], ids=["whole", "adapters"])
def test_a_disk_without_room_for_the_weights_is_told_of_at_the_start(
    lora, fake, fields, tmp_path, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(fields["model"])
    needed = sum(4 * p.numel() for p in model.parameters())
    asked = []

    def usage_with(free):
        def disk_usage(path):
            asked.append(path)
            return types.SimpleNamespace(free=free)

        return disk_usage

    vllm = VLLM(url=fake.url, directory=str(tmp_path / "not/there/yet"))
    config = GRPO(**fields, source="vllm", lora=lora, vllm=vllm)
    monkeypatch.setattr("shutil.disk_usage", usage_with(needed - 1))
    with pytest.raises(
        ValueError, match=r"vllm.directory: .*there/yet has 0.00\d GiB free, and the"
    ):
        open_rl(config)
    assert asked == [tmp_path]
    monkeypatch.setattr("shutil.disk_usage", usage_with(needed))
    open_rl(replace(config, output=str(tmp_path / "other"))).scheduler.close()


def test_a_rank_may_stand_while_its_server_starts(fields, monkeypatch):
    allowed = []

    @contextmanager
    def may_stand(seconds):
        allowed.append(seconds)
        yield
        allowed.pop()

    class Started:
        def __init__(self, *arguments, **options):
            raise SourceError(f"allowed {allowed}")

    monkeypatch.setattr(sampling, "may_stand", may_stand)
    monkeypatch.setattr(sampling, "ServerProcess", Started)
    vllm = VLLM(python="/bin/sh", patience=70.0)
    with pytest.raises(SourceError, match=r"allowed \[70.0\]"):
        open_rl(GRPO(**fields, source="vllm", vllm=vllm))


@pytest.mark.parametrize("directory", [None, "there"])
def test_an_engine_has_room_for_the_weights_wherever_they_lie(
    directory, fields, tmp_path, monkeypatch
):
    place = str(tmp_path if directory else transit_directory())

    def disk_usage(path):
        assert str(path) == place
        return types.SimpleNamespace(free=1000)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    vllm = VLLM(directory=directory and str(tmp_path / directory))
    with pytest.raises(
        ValueError, match=rf"^vllm.directory: {place}.* has 0.000 GiB free, and the"
    ):
        open_rl(GRPO(**fields, source="vllm_engine", vllm=vllm))


@pytest.mark.parametrize("address", [None, "10.0.0.5"])
def test_nccl_is_given_the_trainers_address(address):
    vllm = VLLM(url="http://192.0.2.7:8000", updates="nccl", trainer_address=address)
    config = GRPO(model="m", data="d", output="o", source="vllm", vllm=vllm)
    assert (
        open_updates(types.SimpleNamespace(config=config, directory=Path("o"))).address == address
    )


def test_flags_are_written_as_vllm_reads_them():
    assert flags_of({"max_num_seqs": 8, "quantization": "fp8"}) == [
        "--max-num-seqs",
        "8",
        "--quantization",
        "fp8",
    ]
    assert flags_of({"speculative_config": {"k": 1}}) == ["--speculative-config", '{"k": 1}']


def test_a_server_that_is_down_ends_the_run_before_the_first_step_and_says_so(fields):
    with pytest.raises(
        SourceError, match=r"no healthy server at http://127\.0\.0\.1:9 .* start it"
    ):
        open_grpo(
            GRPO(**fields, source="vllm", vllm=VLLM(url="http://127.0.0.1:9", patience=0.2))
        ).train()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"source": "vllm", "vllm": VLLM(updates="adapters"), "lora": Lora(r=513)},
            "up to rank 512, got 513; lower",
        ),
        (
            {
                "source": "vllm",
                "vllm": VLLM(updates="adapters", options={"max_lora_rank": 8}),
                "lora": Lora(r=9),
            },
            "max_lora_rank=8 has no room for lora.r=9; leave it out, or set it to 16",
        ),
        *(
            ({"source": "vllm", "vllm": VLLM(updates="adapters"), "lora": lora}, message)
            for lora, message in (
                (
                    Lora(r=2, use_dora=True),
                    "^lora.use_dora: vLLM can't load adapters with use_dora=True",
                ),
                (
                    Lora(r=2, modules_to_save=["lm_head"]),
                    r"^lora.modules_to_save: .*=\['lm_head'\]; leave it out, or set vllm",
                ),
                (
                    Lora(r=2, init_lora_weights="pissa_niter_4"),
                    "^lora.init_lora_weights: .*=pissa_niter_4",
                ),
                (Lora(r=2, kwargs={"lora_bias": True}), "^lora.lora_bias: .* with lora_bias=True"),
                (Lora(r=2, kwargs={"bias": "all"}), "^lora.bias: .* with bias=all"),
                (Lora(r=2, kwargs={"rank_pattern": {"q": 600}}), "up to rank 512, got 600; lower"),
            )
        ),
        (
            {"source": "vllm", "vllm": VLLM(options={"host": "0.0.0.0"})},
            "opens the server .*address in vllm.host",
        ),
        (
            {"source": "vllm", "vllm": VLLM(options={"api-key": "k"})},
            "vllm.options: api-key: all users of the machine",
        ),
    ],
)
def test_what_vllm_must_not_get_is_refused_before_anything_is_loaded(changed, message):
    with pytest.raises(ValueError, match=message):
        check_sampling(GRPO(model="m", data="d", output="o", **changed))


def test_an_adapter_to_go_on_from_is_one_that_vllm_can_load(tmp_path):
    vllm = VLLM(updates="adapters")
    config = GRPO(
        model="m", data="d", output="o", source="vllm", vllm=vllm, lora=Lora(path=str(tmp_path))
    )
    LoraConfig(r=2).save_pretrained(str(tmp_path))
    check_sampling(config)
    LoraConfig(r=2, use_dora=True).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=r"lora\.use_dora: vLLM can't load"):
        check_sampling(config)


def test_an_engine_is_refused_beside_other_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"source: an engine .* with several ranks set it to vllm"):
        check_sampling(GRPO(model="m", data="d", output="o", source="vllm_engine"))


@pytest.mark.parametrize("name", ["timeout", "attempts", "concurrency", "patience"])
def test_a_servers_limits_are_above_zero(name):
    with pytest.raises(ValueError, match=f"vllm.{name}: must be > 0, got 0"):
        VLLM(**{name: 0})


def test_the_policy_converses_with_an_environment_and_learns_from_what_it_gives(fake, fields):
    tokens = iter(range(10**6))
    end = fake.tokenizer.eos_token_id
    refuse = fake.do_inference_v1_generate

    def said(body):  # an answer that ends by itself, so that there is a next turn
        status, answer = refuse(body)
        tokens_said = [10 + next(tokens) % 200, end]
        return (
            (status, answer)
            if status != 200
            else (200, {"choices": [choice(tokens_said, fake.label, finish_reason="stop")]})
        )

    fake.do_inference_v1_generate = said
    fields |= {"rewards": {}, "environment": "online:Echo", "limits": Limits(turns=3)}
    open_grpo(GRPO(**fields, source="vllm", vllm=VLLM(url=fake.url))).train()
    samples = stored(Path(fields["output"]))
    for sample in samples:
        assert sample["info"]["turns"] == 3
        # what the environment said is context
        assert sum(sample["trained"]) == 6 < len(sample["tokens"])
        assert sample["rewards"] == {"environment": sample["info"]["environment_reward"]}
    step = lines(Path(fields["output"]))[-1]
    assert step["turns/mean"] == 3 and step["turns/aborted"] == 0
    assert step["rewards/environment/unscored"] == 0 and step["grad_norm"] > 0


def test_held_out_prompts_are_conversations_too(fields, tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", guess_rows(3, high=7))
    rows = write_rows(tmp_path / "games.jsonl", guess_rows(8, high=7))
    games = {
        "rewards": {},
        "environment": "guess_number",
        "data": str(rows),
        "eval_data": str(held_out),
    }
    open_grpo(GRPO(**fields | games)).train()
    assert "eval/rewards/environment/mean" in lines(Path(fields["output"]))[0]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_held_out_prompts_are_sampled_by_the_server_after_those_that_train(
    max_staleness, fake, fields, tmp_path, monkeypatch
):
    """From the weights of the step before, which the next rollout is not given once more."""
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "5+5="}, {"prompt": "1+1="}])
    asked, greedy = Counter(), fake.do_inference_v1_generate

    def note(body):
        temperature = body["sampling_params"].get("temperature")
        asked[fake.label.split("@")[0], temperature] += 1
        return greedy(body)

    fake.do_inference_v1_generate = note
    priorities, passed = Counter(), Gate.passed

    def passed_by(gate, priority=0, size=1):
        priorities[priority] += 1
        return passed(gate, priority, size)

    monkeypatch.setattr(Gate, "passed", passed_by)
    monkeypatch.setattr(
        "burnish.loops.rl.context.open_local", lambda *_, **__: pytest.fail("the policy samples")
    )
    evaluated = {
        "eval_data": str(held_out),
        "eval_samples": 3,
        "eval_temperature": 0.5,
        "eval_every": 1,
        "eval_right": 0.4,
        "steps": 3,
        "max_staleness": max_staleness,
    }
    open_grpo(GRPO(**fields | evaluated, source="vllm", vllm=VLLM(url=fake.url))).train()
    published = [
        body["weight_version"].split("@")[0] for body in orders(fake, "/finish_weight_update")
    ]
    assert published == ["0", "1", "2", "3"]  # each once
    found = [line for line in lines(Path(fields["output"])) if "eval/version" in line]
    assert [line["eval/version"] for line in found][-3:] == [1.0, 2.0, 3.0]
    for version in "123":
        assert asked[version, 0.5] == 2 * 3
    assert priorities[1] == 2 * 3 * len(found)
    assert priorities[0] >= 3 * 4 * 4
    for line in found:
        assert line["eval/pass@1/low"] <= line["eval/pass@1"] <= line["eval/pass@1/high"]
        assert line["eval/pass@1"] <= line["eval/pass@2"] <= line["eval/pass@3"]
        assert line["eval/avg@3"] == pytest.approx(line["eval/reward"])


def test_within_a_rollout_held_out_prompts_are_sampled_from_the_weights_that_began_it(
    fake, fields, tmp_path
):
    held_out = write_rows(tmp_path / "held_out.jsonl", [{"prompt": "5+5="}])
    several = {"eval_data": str(held_out), "eval_every": 1, "epochs_per_rollout": 2, "steps": 4}
    open_grpo(GRPO(**fields | several, source="vllm", vllm=VLLM(url=fake.url))).train()
    versions = {
        line["step"]: line["eval/version"]
        for line in lines(Path(fields["output"]))
        if "eval/version" in line
    }
    assert versions.items() >= {1: 0.0, 2: 1.0, 3: 1.0, 4: 2.0}.items()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"eval_samples": 2}, "eval_samples: there are no prompts"),
        ({"eval_samples": 2, "eval_data": "x"}, "eval_samples: at eval_temperature 0 all 2"),
        ({"eval_temperature": 0.001, "source": "vllm"}, "eval_temperature: vLLM samples at 0, or"),
    ],
)
def test_settings_of_an_evaluation_that_make_no_sense_are_refused(settings, says, fields):
    with pytest.raises(ValueError, match=says):
        open_grpo(GRPO(**fields | settings))


def test_each_file_of_data_is_read_once(fields, tmp_path, monkeypatch):
    read, from_path = [], records._from_path
    monkeypatch.setattr(
        records, "_from_path", lambda path, **how: read.append(path) or from_path(path, **how)
    )
    held_out = str(write_rows(tmp_path / "held_out.jsonl", [{"prompt": "1?", "answer": "2"}]))
    open_rl(GRPO(**fields, eval_data=held_out)).scheduler.close()
    assert read == [fields["data"], held_out]


def test_an_environment_that_is_not_there_is_named_before_anything_is_loaded(fields):
    with pytest.raises(ValueError, match="environment: no 'guess', did you mean 'guess_number'"):
        open_grpo(GRPO(**fields | {"model": "nowhere"}, environment="guess")).train()
