"""``burnish data``: rows as they will be trained on, and the account, without a model."""

import json

import pytest
import vision
from burnish.loops.cli import main
from tiny import save_model, write_rows

ASK, ANSWER = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = save_model(tmp_path_factory.mktemp("model"))
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    return directory


@pytest.fixture
def shown(tokenizer, tmp_path, capsys):
    """``shown(recipe, rows, *flags)`` returns (exit status, output, errors)."""

    def shown(recipe, rows, *flags):
        write_rows(tmp_path / "data.jsonl", rows)
        status = main(
            [
                "data",
                recipe,
                "--model",
                str(tokenizer),
                "--data",
                str(tmp_path / "data.jsonl"),
                *flags,
            ]
        )
        said = capsys.readouterr()
        assert not (tmp_path / "none").exists()
        return status, said.out, said.err

    return shown


def test_trained_tokens_are_marked_and_rows_counted(shown):
    status, out, _ = shown("sft", [{"prompt": "1 + 2 =", "completion": " 3"}] * 5, "--rows", "2")
    assert status == 0
    assert out.count("⟦") == 2
    assert "1 + 2 =" in out and "3" in out.partition("⟦")[2].partition("⟧")[0]
    assert "data.jsonl, example 2" in out and "data.jsonl, example 3" not in out
    assert "data.jsonl: 5 rows read, 5 kept" in out


@pytest.mark.parametrize(
    ("recipe", "row", "flags"),
    [
        ("sft", {"completion": [ANSWER]}, []),
        ("grpo", {}, ["--rewards", "{exact_match: 1.0}"]),
        ("reward", {"chosen": [ANSWER], "rejected": [ASK | {"role": "assistant"}]}, []),
        ("prm", {"completions": ["2", "3"], "labels": [True, False]}, []),
        ("distill", {"completion": [ANSWER]}, []),
    ],
)
def test_images_are_shown_by_name_and_size(recipe, row, flags, tmp_path, capsys):
    model = vision.save(tmp_path / "model", "idefics3")
    vision.picture(60, 30).save(tmp_path / "cat.png")
    write_rows(tmp_path / "rows.jsonl", [{"images": ["cat.png"], "prompt": [ASK], **row}])
    flags = ["--model", str(model), "--data", str(tmp_path / "rows.jsonl"), *flags]
    assert main(["data", recipe, *flags]) == 0
    out = capsys.readouterr().out
    assert "cat.png, 60 x 30, 18 tokens" in out
    assert "1 images, 18 of the tokens" in out


def test_both_completions_of_a_pair_are_named(shown):
    status, out, _ = shown("dpo", [{"prompt": "1 + 2 =", "chosen": " 3", "rejected": " 4"}])
    assert status == 0
    assert "chosen: ⟦ 3" in out and "rejected: ⟦ 4" in out


@pytest.mark.parametrize(
    ("recipe", "row", "flags"),
    [
        ("kto", {"prompt": "1", "completion": " 2", "label": 1}, ()),
        ("prm", {"prompt": "1", "completions": ["2", "3"], "labels": [1, 0]}, ()),
        (
            "reward",
            {"prompt": "1", "completion": " 2", "score": 0.5},
            ("--loss", "score_regression"),
        ),
        ("grpo", {"prompt": "1 + 2", "answer": "3"}, ()),
        ("distill", {"prompt": "1", "completion": " 2"}, ()),
    ],
)
def test_rows_of_every_kind_are_shown(recipe, row, flags, shown):
    status, out, _ = shown(recipe, [row], *flags)
    assert status == 0
    assert "data.jsonl: 1 rows read, 1 kept" in out


def test_prompts_alone_are_no_completions_of_which_nothing_is_trained(shown):
    _, out, _ = shown("grpo", [{"prompt": "1 + 2", "answer": "3"}])
    assert "tokens of a prompt" in out and "trained" not in out


def test_each_part_of_a_mixture_and_the_held_out_rows_are_shown(shown, tmp_path):
    write_rows(
        tmp_path / "more.jsonl", [{"prompt": f"{i} + 2 =", "completion": " 3"} for i in range(8)]
    )
    data = {str(tmp_path / "data.jsonl"): 2, str(tmp_path / "more.jsonl"): 0.5}
    rows = [{"prompt": "1", "completion": "2"}]
    status, out, _ = shown(
        "sft", rows, "--data", json.dumps(data), "--eval_data", "2", "--rows", "1"
    )
    assert status == 0
    assert "data.jsonl, example 1" in out and "more.jsonl, example 1" in out
    assert "rows read of 8, " in out
    assert out.count("tokens, ") >= 3


def test_a_file_is_shown_as_its_recipe_reads_it(shown, tmp_path, tokenizer, capsys):
    rows = [{"question": "1 + 2 =", "answer": " 3"}]
    write_rows(tmp_path / "data.jsonl", rows)
    data = {
        "path": str(tmp_path / "data.jsonl"),
        "columns": {"question": "prompt", "answer": "completion"},
    }
    (tmp_path / "sft.yaml").write_text(
        json.dumps({"model": str(tokenizer), "data": data, "output": "x"})
    )
    assert main(["data", "sft", str(tmp_path / "sft.yaml")]) == 0
    assert "⟦ 3" in capsys.readouterr().out


def test_what_a_run_would_refuse_is_refused_in_a_line(shown):
    status, _, err = shown("dpo", [{"prompt": "1", "chosen": "2", "rejected": "2"}])
    assert status == 1
    assert (
        err.startswith("burnish dpo: ")
        and "data.jsonl line 1: 'chosen' and 'rejected' are identical" in err
    )


@pytest.mark.parametrize("words", [[], ["nonsense"], ["demo", "x"]])
def test_without_a_recipe_the_usage_is_told(words, capsys):
    assert main(["data", *words]) == 2
    assert "usage: burnish data <recipe>" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rows", "many", "--model", "m"], "--rows: invalid int value: 'many'"),
        ([], "needed as well: --model, --data"),
    ],
)
def test_a_mistake_in_the_words_is_told(words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["data", "sft", *words])
    assert told in capsys.readouterr().err
