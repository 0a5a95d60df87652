"""The quick starts of the peer's README, and ours for the same: none is longer, and each runs as it
is printed.
"""

import importlib.metadata
import io
import re
import shlex
import tokenize

import pytest
from burnish.loops.cli import main
from datasets import Dataset
from grids import slow
from tiny import save_model, sums

# By the trainer, or the command, in the peer's.
OURS = {
    "SFTTrainer": """
        import burnish

        burnish.sft("Qwen/Qwen2.5-0.5B", "trl-lib/Capybara").train()
    """,
    "DPOTrainer": """
        import burnish

        burnish.dpo("Qwen/Qwen3-0.6B", "trl-lib/ultrafeedback_binarized").train()
    """,
    "KTOTrainer": """
        import burnish

        burnish.kto("Qwen/Qwen3-0.6B", "trl-lib/kto-mix-14k").train()
    """,
    "RewardTrainer": """
        import burnish

        burnish.reward("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/ultrafeedback_binarized").train()
    """,
    "GRPOTrainer": """
        import burnish
        from trl.rewards import accuracy_reward

        burnish.grpo("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/DeepMath-103K", rewards=accuracy_reward).train()
    """,
    "sft": "burnish sft --model Qwen/Qwen2.5-0.5B --data trl-lib/Capybara --output Qwen2.5-0.5B-SFT",
    "dpo": """burnish dpo --model Qwen/Qwen2.5-0.5B-Instruct --data argilla/Capybara-Preferences \\
        --output Qwen2.5-0.5B-DPO""",
    "kto": "burnish kto --model Qwen/Qwen2.5-0.5B-Instruct --data trl-lib/kto-mix-14k --output Qwen2.5-0.5B-KTO",
}
PAIRS = sums(8)
DATA = {
    "trl-lib/Capybara": [{"messages": pair["prompt"] + pair["chosen"]} for pair in PAIRS],
    "trl-lib/ultrafeedback_binarized": PAIRS,
    "argilla/Capybara-Preferences": PAIRS,
    "trl-lib/kto-mix-14k": [{"prompt": p["prompt"], "completion": p["chosen"], "label": i % 2 == 0}
                            for i, p in enumerate(PAIRS)],
    "trl-lib/DeepMath-103K": [{"prompt": p["prompt"], "solution": p["chosen"][0]["content"]} for p in PAIRS],
}  # fmt: skip


def theirs():
    """By the trainer, or the command, the code of the peer's README."""
    readme = str(
        importlib.metadata.metadata("trl").get_payload()
        or importlib.metadata.metadata("trl")["Description"]
    )
    blocks = re.findall(r"```(python|bash)\n(.*?)```", readme, re.S)
    python = [
        code
        for language, code in blocks
        if language == "python" and "Trainer(" in code and ".train()" in code
    ]
    shell = [code for language, code in blocks if language == "bash" and code.startswith("trl ")]
    found = {re.search(r"(\w+Trainer)\(", code)[1]: code for code in python}
    return found | {code.split()[1]: code for code in shell}


def length(code):
    """Lines that are not blank, and tokens."""
    words = shlex.split(code.replace("\\\n", " "))
    if words[0] not in ("trl", "burnish"):
        kinds = (tokenize.NAME, tokenize.OP, tokenize.STRING, tokenize.NUMBER)
        words = [
            token
            for token in tokenize.generate_tokens(io.StringIO(code).readline)
            if token.type in kinds
        ]
    return len([line for line in code.splitlines() if line.strip()]), len(words)


def dedent(code):
    return "\n".join(line.strip() for line in code.strip().splitlines())


def test_every_quick_start_of_the_peer_has_one_of_ours():
    assert theirs().keys() == OURS.keys()


@pytest.mark.parametrize("name", OURS)
def test_ours_is_no_longer(name):
    (our_lines, our_tokens), (lines, tokens) = length(dedent(OURS[name])), length(theirs()[name])
    assert our_lines <= lines and our_tokens <= tokens


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A directory in which each name is that of a small model, or of a few rows."""
    directory = tmp_path_factory.mktemp("hub")
    for name in set(re.findall(r"Qwen/[\w.-]+", " ".join(OURS.values()))):
        save_model(directory / name)
    for name, rows in DATA.items():
        Dataset.from_list(rows).save_to_disk(str(directory / name))
    return directory


@pytest.mark.parametrize("name", [slow(name) if name == "GRPOTrainer" else name for name in OURS])
def test_ours_runs_as_it_is_printed(name, hub, monkeypatch, capsys):
    monkeypatch.chdir(hub)
    code = dedent(OURS[name])
    if code.startswith("burnish"):
        assert main(shlex.split(code.replace("\\\n", " "))[1:]) == 0
    else:
        exec(compile(code, name, "exec"), {})
    assert re.search(r"step 1/1  loss [\d.-]+|step \d/8", capsys.readouterr().out)
