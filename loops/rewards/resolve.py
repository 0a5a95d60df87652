"""Reward functions from the names in a configuration.

rewards:
  math: 1.0                                     # a shipped reward and its weight
  format: {weight: 0.2, pattern: "Answer: .*"}  # with settings of its own
  my_module:function: 0.5                       # your own: function, class, or one written for TRL
  brief: {function: length, target: 100}        # under another name, of which it may be one of several

In Python, a function may take the place of its name, and one or a list of them that of a mapping
with weights of 1.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..config import RewardMix
from ..redaction import resolved
from ..registry import build, find, nearest
from ..rollouts.sample import Row, Sample
from .isolation import isolated
from .scoring import RewardFunction, adapted, check_signature, name_of

SHIPPED = {
    "math": ".math:MathEquivalence",
    "exact_match": ".text:ExactMatch",
    "format": ".text:Format",
    "code": ".code:CodeTests",
    "length": ".length:LengthTarget",
    "soft_overlong": ".length:SoftOverlong",
    "repetition": ".length:Repetition",
    "cosine": ".length:CosineLength",
    "reasoning_gym": ".reasoning_gym:ReasoningGym",
    "environment": ".resolve:environment_reward",
    "reward_model": ".reward_models:RewardModel",
    "prm": ".reward_models:ProcessRewardModel",
}
# sympy may take forever on a policy's expressions, and code is a policy's own
_ISOLATED = ("math", "cosine", "code")


def resolve_rewards(spec: RewardMix, **given: object) -> list[RewardFunction]:
    """The functions that a configuration names.

    Settings of every reward are ``weight`` (1), ``timeout`` in seconds (30), ``isolate`` and
    ``function`` (the reward, if the key is another name); others are its own. With
    ``isolate: true`` it runs in a process of its own, as math, cosine and code do, or with a mapping of
    arguments of `isolated`, such as {memory: 8, jail: true}; with false it never does; otherwise
    once a call has taken too long.

    Args:
        given: values that a reward may request by the name of a parameter, such as the policy's
            ``tokenizer``, and the ``device`` to load a model on.

    Raises:
        ValueError: lists the available names if one is not found.
    """
    if not spec:
        raise ValueError(
            f"rewards: none is named; there are {', '.join(SHIPPED)}, or module:function"
        )
    rewards: dict[str, RewardFunction] = {}
    for key, value in _by_name(spec).items():
        if isinstance(value, bool) or not isinstance(value, int | float | Mapping):
            hint = "; your own function is a key: {function: 1.0}" if callable(value) else ""
            raise ValueError(
                f"reward {key}: wanted its weight, or a mapping of settings, got {value!r}{hint}"
            )
        settings = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight, timeout = float(settings.pop("weight", 1.0)), float(settings.pop("timeout", 30.0))
        what = settings.pop("function", key)
        name = key.rpartition(":")[2] if isinstance(key, str) else name_of(key)
        isolate = settings.pop("isolate", what in _ISOLATED or None)
        reward = RewardFunction(
            name, _function(what, settings, given), weight, timeout, isolate is None
        )
        if isolate:
            reward.function = _isolated(name, reward.function, isolate)
        if name in rewards:
            raise ValueError(
                f"rewards: two are called {name}; rename one, as in {{other: {{function: {name}}}}}"
            )
        rewards[name] = reward
    if not any(reward.weight for reward in rewards.values()):
        raise ValueError(
            "rewards: every weight is 0, so nothing would be learned; give one above 0"
        )
    return list(rewards.values())


def _by_name(spec: RewardMix) -> Mapping[Any, object]:
    """The weight or the settings of each reward; one or a list of them have weights of 1."""
    if isinstance(spec, Mapping):
        return spec
    several = [spec] if callable(spec) or isinstance(spec, str) else spec
    return dict.fromkeys(several, 1.0)


def _isolated(name: str, function: Callable[..., object], how: object) -> isolated:
    """The function in processes of its own; ``how`` is true, or has arguments of `isolated`."""
    if how is True:
        return isolated(function)
    known = [each for each in inspect.signature(isolated).parameters if each != "function"]
    if not isinstance(how, Mapping):
        wanted = f"true, false, or a mapping of {', '.join(known)}"
        raise ValueError(f"reward {name}: isolate: wanted {wanted}, got {how!r}")
    for each in how:
        if each not in known:
            raise ValueError(nearest(f"reward {name}: isolate has no setting", each, known))
    return isolated(function, **how)


def environment_reward(row: Row, sample: Sample) -> float | None:
    """The environment's rewards summed over the turns of a conversation.

    NaN if it failed in one of them.
    """
    if "environment_reward" not in sample.info:
        raise ValueError(
            "environment: this completion comes from no environment; name one, or leave this reward out"
        )
    reward: float | str | None = sample.info["environment_reward"]
    return math.nan if isinstance(reward, str) else reward


def _function(name: Any, settings: dict[str, Any], given: Mapping[str, Any]) -> Any:
    inner = settings.get("correct")
    if isinstance(inner, str):  # the reward that another one calls
        settings["correct"] = adapted(_function(inner, {}, given))
    factory = name
    if isinstance(name, str):
        factory = find("reward", name, SHIPPED, __package__)
        if name not in SHIPPED:
            _look_at(name, factory)
    name = name if isinstance(name, str) else name_of(name)
    function = build(f"reward {name}", factory, resolved(settings), **given)
    if not callable(function):
        raise ValueError(
            f"reward {name}: wanted a function or a class with __call__, got {type(function).__name__}"
        )
    return function


def _method(kind: type, name: str) -> object:
    """The method of this name that a class defines or inherits; None without one."""
    for base in kind.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


def _look_at(name: str, found: object) -> None:
    """Check that what a configuration names can score completions, before it is built or called.

    Raises:
        ValueError: if it is no function and no class with ``__call__``, or its parameters are not
            those of a reward.
    """
    scores = found
    kind = type(found).__name__
    if inspect.isclass(found):
        # Of the class: every class itself has a `__call__`, that of its metaclass.
        scores = _method(found, "__call__")
        kind = f"the class {found.__name__} without it"
    if not callable(scores):
        raise ValueError(f"reward {name}: wanted a function or a class with __call__, got {kind}")
    try:
        signature = inspect.signature(scores)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward {name}: its parameters can't be read; write a function in Python around it"
        ) from error
    if inspect.isclass(found):
        _, *parameters = signature.parameters.values()  # without self
        signature = signature.replace(parameters=parameters)
    check_signature(name.rpartition(":")[2], signature)
