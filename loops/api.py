"""The recipes as functions of Python objects:
``for step in burnish.dpo(model, dataset, beta=0.2): ...``

Each takes the fields of its settings, in `recipes.settings`, which are those of the command line,
and returns a `Training`: iterate over it, or call its ``train``. A field that names a model, a
tokenizer, data, a loss, a reward, an optimizer, a teacher or a tracker may hold the object itself:

    model       trained in place, as the command would train it: converted to ``dtype``, its dropout turned off; one
                with adapters, or quantized, keeps its precision
    output      without a directory no files are written, and what needs one (checkpoints, a precomputed reference, a
                vLLM server) is refused
    resume      wants the settings of the run: functions by module and name, a model by a digest of the weights that it
                began with, which the reference is a copy of, data by a digest of its tokens
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from .config import Lora
from .recipes import opener
from .recipes.settings import (
    CPO,
    DPO,
    GRPO,
    KTO,
    ORPO,
    PPO,
    PRM,
    RLOO,
    SFT,
    Distill,
    OnlineDPO,
    Reward,
)
from .registry import build

if TYPE_CHECKING:
    from .runs.training import Training

P = ParamSpec("P")


def _recipe(name: str, settings: Callable[P, Any]) -> "Callable[P, Training]":
    """A recipe as a function with the signature of its settings."""

    def recipe(*args: P.args, **kwargs: P.kwargs) -> "Training":
        values = inspect.signature(settings).bind_partial(*args).arguments | kwargs
        _refuse_names_of_trl(name, settings, values)
        if "lora" in values:
            values["lora"] = _lora(name, values["lora"])
        opened: Training = opener(name)(build(name, settings, values))
        return opened

    vars(recipe)["__signature__"] = inspect.signature(settings).replace(
        return_annotation="Training"
    )
    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = _documented(settings)
    return recipe


def _refuse_names_of_trl(name: str, settings: Any, values: Mapping[str, Any]) -> None:
    """Raise ValueError if arguments are TRL's, with ours in their place."""
    foreign = {
        each: value
        for each, value in values.items()
        if each not in inspect.signature(settings).parameters
    }
    if not foreign:
        return
    from .cli.trl_python import complaint  # reads tables that other calls don't need

    if message := complaint(name, settings, foreign):
        raise ValueError(message)


def _lora(name: str, given: Any) -> Any:
    """The settings of adapters; a LoraConfig of peft's in ours."""
    if type(given).__module__.partition(".")[0] == "peft":
        from .models.adapters import settings_of_peft

        return settings_of_peft(given)
    if isinstance(given, Mapping) and (complaint := Lora.complaint(given)):
        raise ValueError(f"{name}: {complaint}")
    return given


def _documented(settings: Callable[..., Any]) -> str:
    """The docstring of a recipe: that of its settings, and the text under each of their fields, as
    ``Args:``.
    """
    texts = _field_docs(settings)
    lines = [
        f"{settings.__doc__}",
        "",
        "Objects may stand for names, as of the model; see `burnish.loops.api`.",
        "",
    ]
    lines += ["Args:"]
    for name in inspect.signature(settings).parameters:
        entry = f"{name}: {texts.get(name, '')}".rstrip()
        lines += textwrap.wrap(entry, 110, initial_indent="    ", subsequent_indent=" " * 8)
    return "\n".join(lines)


def _field_docs(settings: Any) -> dict[str, str]:
    """The text under each field of a dataclass and its bases, by field."""
    texts: dict[str, str] = {}
    for each in reversed(settings.__mro__[:-1]):  # without `object`
        texts |= _documented_fields(inspect.getfile(each)).get(each.__name__, {})
    return texts


@cache
def _documented_fields(path: str) -> dict[str, dict[str, str]]:
    """The string under each annotated name of every class of a file, by class; none where there is
    no source.
    """
    if not Path(path).is_file():
        return {}
    classes = [
        node for node in ast.parse(Path(path).read_text()).body if isinstance(node, ast.ClassDef)
    ]
    return {node.name: _strings_below(node) for node in classes}


def _strings_below(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, text in pairwise(node.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(words))
            ):
                found[name] = " ".join(words.split())
    return found


sft = _recipe("sft", SFT)
dpo = _recipe("dpo", DPO)
cpo = _recipe("cpo", CPO)
orpo = _recipe("orpo", ORPO)
kto = _recipe("kto", KTO)
reward = _recipe("reward", Reward)
prm = _recipe("prm", PRM)
distill = _recipe("distill", Distill)
grpo = _recipe("grpo", GRPO)
rloo = _recipe("rloo", RLOO)
ppo = _recipe("ppo", PPO)
online_dpo = _recipe("online_dpo", OnlineDPO)
