"""The recipes as functions of Python objects:
``for step in burnish.dpo(model, dataset, beta=0.2): ...``

Each takes the fields of its settings, in `recipes.settings`, which are those of the command line,
and returns a `Training`: iterate over it, or call its ``train``. A field that names a model, a
tokenizer, data, a loss, a reward, an environment, an agent, an order, an optimizer, a teacher or a
tracker may hold the object itself:

    model       trained in place, as the command would train it: converted to ``dtype``, its dropout
                turned off; one with adapters, or quantized, keeps its precision
    output      without a directory no files are written, and what needs one (checkpoints, a
                precomputed reference, a vLLM server) is refused
    resume      wants the settings of the run: functions by module and name, a model by a digest of
                the weights that it began with, which the reference is a copy of, data by a digest
                of its tokens
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


def _recipe(name: str, settings: Callable[P, object]) -> "Callable[P, Training]":
    """A recipe as a function with the signature of its settings."""

    def recipe(*args: P.args, **kwargs: P.kwargs) -> "Training":
        values = inspect.signature(settings).bind_partial(*args).arguments | kwargs
        _refuse_names_of_trl(name, settings, values)
        if "lora" in values:
            values["lora"] = _lora(name, values["lora"])
        opened: Training = opener(name)(build(name, settings, values))
        return opened

    # what `help` and editors show: the fields of the settings, their types and their texts
    signature = inspect.signature(settings).replace(return_annotation="Training")
    vars(recipe)["__signature__"] = signature
    recipe.__name__ = name
    recipe.__qualname__ = name
    recipe.__doc__ = _documented(settings)
    return recipe


def _refuse_names_of_trl(
    name: str, settings: Callable[..., object], values: Mapping[str, object]
) -> None:
    """Raise ValueError if arguments are TRL's, with ours in their place."""
    known = inspect.signature(settings).parameters
    foreign = {each: value for each, value in values.items() if each not in known}
    if not foreign:
        return
    from .cli.trl_python import complaint  # reads tables that other calls don't need

    message = complaint(name, settings, foreign)
    if message:
        raise ValueError(message)


def _lora(name: str, given: object) -> object:
    """The settings of adapters; a LoraConfig of peft's in ours."""
    if type(given).__module__.partition(".")[0] == "peft":
        from .models.adapters import settings_of_peft  # imports torch and peft

        return settings_of_peft(given)
    if isinstance(given, Mapping):
        complaint = Lora.complaint(given)
        if complaint:
            raise ValueError(f"{name}: {complaint}")
    return given


def _documented(settings: Callable[..., object]) -> str:
    """The docstring of a recipe: its settings' own, and the text of each field as ``Args:``."""
    texts = field_docs(settings)
    lines = [
        str(settings.__doc__),
        "",
        "Objects may stand for names, as of the model; see `burnish.loops.api`.",
        "",
        "Args:",
    ]
    for name in inspect.signature(settings).parameters:
        entry = f"{name}: {texts.get(name, '')}".rstrip()
        lines += textwrap.wrap(entry, 110, initial_indent="    ", subsequent_indent=" " * 8)
    return "\n".join(lines)


def field_docs(settings: Any) -> dict[str, str]:
    """The text under each field of a dataclass and its bases, by field."""
    texts: dict[str, str] = {}
    # A class that sets a field anew documents it anew: bases first, without `object`.
    for each in reversed(settings.__mro__[:-1]):
        texts |= _documented_fields(inspect.getfile(each)).get(each.__name__, {})
    return texts


@cache
def _documented_fields(path: str) -> dict[str, dict[str, str]]:
    """The string under each annotated name, for each class of a file; none without its source."""
    if not Path(path).is_file():
        return {}
    found = {}
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _strings_below(node)
    return found


def _strings_below(node: ast.ClassDef) -> dict[str, str]:
    """The string that follows each annotated name in the body of a class."""
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
