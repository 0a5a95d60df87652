"""``burnish data <recipe>``: rows as they will be trained on, the trained tokens in color, and the
account of all.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from ... import data
from ..models.io import load_tokenizer
from ..recipes.reward import encoder
from ..redaction import hide, resolved_data
from ..runs.context import tokenization


def show(recipe: str, config: Any, rows: int) -> None:
    """Print the first examples of each part of the data, and the account. No model is loaded.

    Raises:
        DataError: as a run would.
    """
    tokenizer = load_tokenizer(config)
    encode = _encoder(recipe, config)
    console = Console(highlight=False, soft_wrap=True)
    for parts in data.load_data(
        resolved_data(config.data), resolved_data(config.eval_data), seed=config.seed
    ):
        if not parts:
            continue
        encoded, accounting = encode(parts, tokenizer, tokenization(config))
        start = 0
        for part in accounting.parts or [accounting]:
            for number in range(min(rows, part.examples)):
                example = data.example(encoded, start + number)
                console.rule(f"{hide(part.source)}, example {number + 1}", align="left")
                for text in _texts(example, tokenizer, recipe, color=console.is_terminal):
                    console.print(text)
            start += part.examples
        console.rule()
        console.print(hide(str(accounting)), markup=False)


def _encoder(recipe: str, config: Any) -> Callable[..., Any]:
    """The way in which the recipe encodes its data."""
    if recipe in ("sft", "distill"):
        return partial(data.encode_supervised, train_on=config.train_on)
    if recipe == "prm":
        options = {name: getattr(config, name) for name in ("separator", "train_on_last_step_only")}
        return partial(data.encode_stepwise, **options)
    if recipe == "reward":
        return encoder(config)[0]
    pairs = {
        "dpo": data.encode_preference,
        "orpo": data.encode_preference,
        "cpo": data.encode_preference,
    }
    prompts = (
        data.encode_prompts if getattr(config, "environment", None) is None else data.encode_rows
    )
    return {**pairs, "kto": data.encode_unpaired}.get(recipe, prompts)


def _texts(example: data.Example, tokenizer: Any, recipe: str, *, color: bool) -> Iterator[Text]:
    """Prompt and completions; without color, trained tokens are in ⟦ ⟧."""
    tokens = len(example.prompt) + sum(map(len, example.completions))
    trained = sum(map(sum, example.trained))
    is_prompt = not example.completions
    yield Text(
        f"{tokens:,} tokens" + (" of a prompt" if is_prompt else f", {trained:,} of them trained"),
        style="dim",
    )
    yield Text(tokenizer.decode(example.prompt), style="dim")
    pair = recipe in ("dpo", "orpo", "cpo", "reward") and len(example.completions) == 2
    for number, (ids, mask) in enumerate(zip(example.completions, example.trained, strict=True)):
        name = ("chosen", "rejected")[number] if pair else f"completion {number + 1}"
        text = Text(f"{name}: " if len(example.completions) > 1 else "", style="bold")
        for is_trained, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
            piece = tokenizer.decode([token for token, _ in run])
            text.append(
                piece if color or not is_trained else f"⟦{piece}⟧",
                "not bold green" if is_trained else "not bold dim",
            )
        yield text
