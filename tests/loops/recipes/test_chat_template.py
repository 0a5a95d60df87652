"""The chat template of a run: its own, a file, or its text, and what the template is told."""

import pytest
from burnish.data.records import DataError
from burnish.loops.recipes.settings import SFT
from burnish.loops.recipes.sft import open_sft
from tiny import save_model, sums, write_rows


def test_a_template_and_its_arguments_may_stand_in_the_configuration(tmp_path):
    model = save_model(tmp_path / "start")
    data = write_rows(
        tmp_path / "messages.jsonl",
        [{"messages": pair["prompt"] + pair["chosen"]} for pair in sums(4)],
    )
    template = (
        "{% for m in messages %}{{ '0' if zeros and m.role == 'assistant' else '' }}{{ m.content }}{{ eos_token }}"
        "{% endfor %}"
    )

    def tokens(name, **settings):
        paths = {"model": str(model), "data": str(data), "output": str(tmp_path / name)}
        config = SFT(**paths, steps=1, batch_size=4, chat_template=template, **settings)
        return open_sft(config).train()["tokens"]

    assert tokens("zeros", chat_template_kwargs={"zeros": True}) == tokens("plain") + 4
    with pytest.raises(DataError, match="zero"):
        tokens("misspelled", chat_template_kwargs={"zero": True})
