"""What a report of a bug says, and what a shell completes."""

import hashlib
import os
import subprocess
from importlib.metadata import version

import pytest
from burnish.loops.cli import main
from burnish.loops.recipes import RECIPES


def test_env_says_versions_devices_and_the_digest_of_a_configuration(tmp_path, capsys):
    (tmp_path / "dpo.yaml").write_text("beta: 0.2\n")
    assert main(["env", str(tmp_path / "dpo.yaml")]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (
        shown["torch"] == version("torch")
        and {"burnish", "transformers", "python", "cpu", "gpu"} <= shown.keys()
    )
    assert (
        shown["dpo.yaml"] == f"sha256 {hashlib.sha256(b'beta: 0.2' + bytes([10])).hexdigest()[:16]}"
    )


def test_env_says_ranks_and_neither_secrets_nor_paths(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    (tmp_path / "dpo.yaml").write_text("vllm: {environment: {KEY: yaml_secret}}\n")
    assert main(["env", str(tmp_path / "dpo.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "WORLD_SIZE      4" in shown
    assert (
        "secret" not in shown
        and os.path.expanduser("~") not in shown
        and str(tmp_path) not in shown
    )


def test_env_names_a_file_that_is_not_there(capsys):
    assert main(["env", "nosuch.yaml"]) == 1
    assert capsys.readouterr().err == "burnish env: nosuch.yaml: No such file or directory\n"


def test_bash_completes_recipes_flags_and_choices(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words):
        ask = f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_burnish; "
        command = ["bash", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"']
        return set(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        )

    assert completed("burnish", "d") == {"dpo", "distill", "demo"}
    assert "--learning_rate" in completed("burnish", "dpo", "--learn")
    assert {"reverse_kl", "forward_kl"} <= completed("burnish", "dpo", "--divergence", "''")


@pytest.mark.parametrize("arguments", [["completion"], ["completion", "fish"]], ids=" ".join)
def test_a_shell_that_is_not_known_is_answered_with_those_that_are(capsys, arguments):
    assert main(arguments) == 2
    assert "bash, or zsh" in capsys.readouterr().err


def test_help_after_a_completion_is_as_before(capsys):
    main(["completion", "zsh"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["dpo", "--help"])
    assert "print_completion" not in capsys.readouterr().out


def test_the_usage_has_a_line_for_each_command(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command in (*RECIPES, "bench", "completion", "env", "translate"):
        assert sum(line.startswith(f"  {command} ") for line in shown.splitlines()) == 1
