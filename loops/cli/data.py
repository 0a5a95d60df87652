"""``burnish data <recipe>``: rows as they will be trained on, and the account of all.

The trained tokens are in color, or in ⟦ ⟧ where there is none.
"""

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ... import data
from ...data.images import decoded
from ..config import Common
from ..models.io import load_tokenizer
from ..recipes import encoder_of
from ..redaction import hide, resolved_data
from ..runs.context import open_images, tokenization


def show(recipe: str, config: Common, rows: int) -> None:
    """Print the first examples of each part of the data, and the account. No model is loaded.

    Raises:
        DataError: as a run would.
    """
    tokenizer = load_tokenizer(config)
    reader, no_images = open_images(config, tokenizer)
    how = tokenization(config, no_images)
    encode = encoder_of(recipe, config)
    console = Console(highlight=False, soft_wrap=True)
    named = resolved_data(config.data)
    held_out = resolved_data(config.eval_data)
    for parts in data.load_data(named, held_out, seed=config.seed):
        if not parts:
            continue
        encoded, accounting = encode(parts, reader or tokenizer, how)
        start = 0
        for part in accounting.parts or [accounting]:
            for number in range(min(rows, part.examples)):
                example = data.example(encoded, start + number)
                console.rule(f"{hide(part.source)}, example {number + 1}", align="left")
                for text in _texts(example, tokenizer, color=console.is_terminal):
                    console.print(text)
            start += part.examples
        console.rule()
        console.print(hide(str(accounting)), markup=False)


def _images(example: data.Example) -> Iterator[Text]:
    """A line for each image: its name, its size and its tokens."""
    for image in example.images:
        width, height = decoded(image).size
        yield Text(f"image {image.name}, {width} x {height}, {image.length:,} tokens", style="dim")


def _texts(
    example: data.Example, tokenizer: PreTrainedTokenizerBase, *, color: bool
) -> Iterator[Text]:
    """The count of tokens, the prompt, and the completions of an example."""
    tokens = len(example.prompt) + sum(map(len, example.completions))
    trained = sum(map(sum, example.trained))
    of_prompt = f"{tokens:,} tokens of a prompt"
    of_all = f"{tokens:,} tokens, {trained:,} of them trained"
    yield Text(of_all if example.completions else of_prompt, style="dim")
    yield from _images(example)
    yield Text(str(tokenizer.decode(list(example.prompt))), style="dim")
    names = _names(len(example.completions))
    for name, ids, mask in zip(names, example.completions, example.trained, strict=True):
        text = Text(name, style="bold")
        marked = zip(ids, mask, strict=True)
        for is_trained, run in groupby(marked, key=lambda token: token[1]):
            piece = str(tokenizer.decode([token for token, _ in run]))
            if is_trained and not color:
                piece = f"⟦{piece}⟧"
            text.append(piece, "not bold green" if is_trained else "not bold dim")
        yield text


def _names(count: int) -> list[str]:
    """What completions are called: nothing if there is one, and a pair chosen and rejected."""
    if count == 1:
        return [""]
    if count == 2:
        return ["chosen: ", "rejected: "]
    return [f"completion {number}: " for number in range(1, count + 1)]
