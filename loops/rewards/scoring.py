"""Score completions by several functions at the same time, without letting a failure end the run.

A reward is a function ``(row, sample) -> float | None``, plain or async. A function of several
completions, ``(rows, samples) -> list``, is marked by `batched`. Attributes may add:

    over           "sample", "group" (all completions of a prompt) or "step" (all that are scored at once: in a
                   recipe, those of a prompt)
    columns        names of the columns that its rows must have
    concurrency    maximal number of its calls at the same time

``sample.rewards`` then holds, for each function:

    a number       its score
    None           it does not apply: the weighted sum is over the other functions (as in TRL)
    a word         a key of `ADVICE`: it failed, so the score is unknown and the completion is masked, whatever the
                   other functions give

Masked completions, and completions to which no function applies, are excluded from training and
from the statistics of their group. A function of weight 0 masks nothing. Missing scores are counted
by their reason, and are never 0.

Functions get copies of rows and samples, so that nothing that they change is trained on. What they
store in ``sample.info`` is kept.
"""

import asyncio
import dis
import inspect
import logging
import math
import os
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from numbers import Real
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from ..registry import nearest
from ..rollouts.event_loops import MOST_ABANDONED, off_loop, refuse_abandoned, watched
from ..rollouts.sample import Row, Sample, copied, plain
from .isolation import isolated
from .watchdog import watchdog

log = logging.getLogger(__name__)

T = TypeVar("T")

CONCURRENCY = 32
"""Calls of a function that run at the same time, unless it has an attribute of this name."""

_PACKAGE = f"{__name__.partition('.')[0]}.loops."
# parameters that tell a function written for TRL
_OF_TRL = {"prompts", "completions", "completion_ids"}
_LARGEST = 3.4e38  # about the largest float32, so that neither sums nor squares overflow in float64

ADVICE = {
    "nan": "return None for a completion that the function does not apply to, and a number otherwise",
    "infinite": "return numbers that float32 can hold; clip them where they may grow",
    "not a number": "return one number per completion, or None: a float, an int, a bool, or a tensor of one element",
    "wrong length": "a batched function returns one entry per completion, in their order",
    "timeout": "raise its timeout, or make the function faster",
    "error": "the function should return None for a completion that it does not apply to",
}

# Failures that come again with every call. A timeout does not: at first a judge may still be
# loading its model.
_LASTING = ("error", "not a number", "nan", "infinite", "wrong length")


class OutOfTime(Exception):
    """A call took longer than its time limit."""


class _WrongLength(Exception):
    """A function of several completions returned more or fewer entries, or no list."""


@dataclass
class RewardFunction:
    """A reward function with the name that it is logged by.

    Attributes:
        function: in one of our forms, or of text or TRL, see `adapted`.
        weight: weight of its score in the sum; at 0 it is only measured.
        timeout: seconds that one call may take; a batched function has one call for all its
            completions.
        isolate: whether it moves to processes of its own once a call has taken too long.
        reported: the first failure of each kind, as logged.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    timeout: float = 30.0
    isolate: bool = True
    reported: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _gates: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name}: its weight must be finite, got {self.weight}")
        if not self.timeout > 0:
            raise ValueError(
                f"reward {self.name}: its timeout must be > 0 seconds, got {self.timeout}"
            )
        self.function = adapted(self.function)
        over = getattr(self.function, "over", "sample")
        if over not in ("sample", "group", "step"):
            raise ValueError(
                f"reward {self.name}: its attribute over must be sample, group or step, got {over!r}"
            )
        concurrency = getattr(self.function, "concurrency", 1)
        # at 0 each call would wait for ever
        if not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(
                f"reward {self.name}: its attribute concurrency must be >= 1, got {concurrency!r}"
            )


def batched(
    function: Callable[..., object], over: Literal["group", "step"] = "step"
) -> Callable[..., Any]:
    """Mark a function of several completions, all of a prompt or all of a call."""
    if over not in ("group", "step"):
        raise ValueError(f"batched: over must be group or step, got {over!r}")
    return with_attributes(partial(function), function, over=over)


def adapted(function: Callable[..., object]) -> Callable[..., Any]:
    """A reward function as one of ours: the names of its parameters tell whether it was written for
    TRL or for text.

    A function of text, ``f(completion, ...)``, is called by the names of its parameters:
    ``completion`` is the text, ``row`` the whole row, others are its columns, such as ``prompt``;
    ``**columns`` gets all of these.

    One of TRL, ``f(prompts, completions, **columns) -> list[float]``, gets what it would get there:
    prompts as the rows have them, completions as messages if the prompts are messages and as text
    otherwise, ``completion_ids``, and all other columns by their names. What it logs by
    ``log_extra`` and ``log_metric`` is kept in ``sample.info``.

    Raises:
        ValueError: if it has other parameters, or can't do without TRL's trainer; or if it is a
            name.
    """
    if isinstance(function, str):
        raise ValueError(
            f"reward: wanted a function, got {function!r}; `resolve_rewards` makes those that have a name"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions have none that can be read
        return function
    check_signature(name_of(function), signature)
    parameters = signature.parameters
    required = []
    takes_all = False
    for name, parameter in parameters.items():
        takes_all |= parameter.kind == parameter.VAR_KEYWORD
        collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not collects:
            required.append(name)
    if parameters.keys() & _OF_TRL:
        ours = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
        columns = ["prompt", *(name for name in required if name not in ours)]
        takes = None if takes_all else tuple(parameters)
        return with_attributes(
            partial(_call_trl, function, takes), function, over="step", columns=columns
        )
    if "completion" in parameters:
        columns = [name for name in required if name not in ("completion", "row", "sample")]
        by_names = partial(_call_by_names, function, tuple(parameters), takes_all)
        return with_attributes(by_names, function, columns=columns)
    return function


def check_signature(name: str, signature: inspect.Signature) -> None:
    """Check that the parameters of a reward fit one of the forms that `adapted` knows.

    Raises:
        ValueError: shows the signature; or names the parameter that only TRL's trainer could fill.
    """
    parameters = signature.parameters
    if parameters.keys() & _OF_TRL:
        required = [each.name for each in parameters.values() if each.default is each.empty]
        needs = {"trainer_state", "environments"}.intersection(required)
        if needs:
            raise ValueError(
                f"reward {name}: needs {min(needs)}, which only TRL's trainer has; give that parameter a default"
            )
        return
    if "completion" in parameters:
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        wanted = "wanted the parameters (completion, and columns of the data), or (row, sample)"
        raise ValueError(f"reward {name}: {wanted}, got {signature}") from error


def with_attributes(
    reward: Callable[..., object], function: Callable[..., object], **attributes: object
) -> Callable[..., Any]:
    """A `functools.partial`, which can be pickled, with name and attributes of the function that it
    calls, and more.
    """
    kept = {
        name: getattr(function, name)
        for name in ("columns", "concurrency")
        if hasattr(function, name)
    }
    vars(reward).update(kept | attributes, __name__=name_of(function))
    return reward


def name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


async def score_samples(
    rewards: Sequence[RewardFunction], rows: Sequence[Row], samples: Sequence[Sample]
) -> None:
    """Score every sample by every function, and write ``sample.rewards[name]``.

    A sample without a token, of a conversation that never began, is shown to no function: "aborted"
    is its score. Numbers of numpy and torch that functions store in ``sample.info`` become
    Python's.

    Args:
        rows: for each sample, the row of the data that its prompt came from.

    Raises:
        ValueError: if two functions have the same name, or one stored a value in ``sample.info``
            that can't be saved.
    """
    refuse_abandoned()
    names = [reward.name for reward in rewards]
    if len(set(names)) < len(names):
        raise ValueError(f"score: rewards must have different names, got {', '.join(names)}")
    if len(rows) != len(samples):
        raise ValueError(f"score: wanted one row per sample, {len(samples)}, got {len(rows)}")
    began = [i for i, sample in enumerate(samples) if sample.finish != "aborted" or sample.tokens]
    never_began = set(range(len(samples))).difference(began)
    calls = []
    for reward in rewards:
        for i in never_began:
            samples[i].rewards[reward.name] = "aborted"
        over = getattr(reward.function, "over", "sample")
        for unit in _units(over, samples, began):
            its_rows = [rows[i] for i in unit]
            its_samples = [samples[i] for i in unit]
            calls.append(_score(reward, its_rows, its_samples, single=over == "sample"))
    await asyncio.gather(*calls)
    for sample in samples:
        who = f"completion {sample.index} of task {sample.task}, scored by {', '.join(names)}"
        # a copy: a late call may write to it
        sample.info = plain(dict(sample.info), f"{who}: sample.info")


def _units(over: str, samples: Sequence[Sample], indices: Sequence[int]) -> list[list[int]]:
    """The completions of each call: one, all of a prompt (group), or all (step).

    None makes no call.
    """
    if over == "sample":
        return [[i] for i in indices]
    if over == "step":
        return [list(indices)] if indices else []
    groups: dict[int, list[int]] = {}
    for i in indices:
        groups.setdefault(samples[i].task, []).append(i)
    return list(groups.values())


def refuse_broken(rewards: Sequence[RewardFunction], samples: Sequence[Sample]) -> None:
    """Raise ValueError, with the first failure, if a function has failed in each of its calls for
    these samples.

    Calls that took too long don't count: in the first rollout they may have waited for a model to
    be loaded.
    """
    for reward in rewards:
        failures = list(dict.fromkeys(sample.rewards[reward.name] for sample in samples))
        if samples and all(failure in _LASTING for failure in failures):
            first = next((reward.reported[str(f)] for f in failures if f in reward.reported), None)
            raise ValueError(
                f"reward {reward.name}: {' or '.join(map(str, failures))} in every one of its calls, for all "
                f"{len(samples)} completions of the first rollout, so nothing can be learned from it; fix it or leave "
                f"it out. The first one:\n{first or '(in the log of the process that called it)'}"
            )


def refuse_silent(rewards: Sequence[RewardFunction], samples: Sequence[Sample]) -> None:
    """Raise ValueError if a function without a return statement, or all functions, gave these
    samples no score.

    A function may return None for all of a rollout, if it applies to other prompts and others score
    these.
    """
    if not samples:
        return
    silent = []
    for reward in rewards:
        if all(sample.rewards[reward.name] is None for sample in samples):
            silent.append(reward)
    for reward in silent:
        if len(silent) == len(rewards) or returns_nothing(reward.function):
            raise ValueError(
                f"reward {reward.name}: returned None in every one of its calls, for all {len(samples)} completions "
                "of the first rollout, as a function without a return statement does, so nothing can be learned from "
                "it; return a number, or leave it out"
            )


def returns_nothing(function: object) -> bool:
    """True if a Python function has no return statement with a value.

    False where that can't be read.
    """
    # of `adapted`, whose function is the first argument, or of `batched`
    while isinstance(function, partial):
        ours = str(getattr(function.func, "__module__", "")).startswith(_PACKAGE)
        function = function.args[0] if ours and function.args else function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        return False
    last = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_VALUE" and not (
            last and last.opname == "LOAD_CONST" and last.argval is None
        ):
            return False
        # in Python 3.12 and 3.13
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        last = instruction
    return True


def check_columns(
    rewards: Sequence[RewardFunction], columns: Iterable[str], source: str = "the data"
) -> None:
    """Raise ValueError, before anything is sampled, if a column that a function reads is
    missing.
    """
    there = set(columns)
    for reward in rewards:
        for wanted in getattr(reward.function, "columns", ()):
            if wanted not in there:
                advice = "rename a column, or tell the reward which one to read"
                raise ValueError(
                    nearest(
                        f"reward {reward.name}: {advice}; {source} has no column", wanted, there
                    )
                )


def as_score(value: object) -> float | str | None:
    """The number that a reward function returned, or the kind of failure; None stays None."""
    if value is None:
        return None
    try:
        if hasattr(value, "item"):  # a tensor, an array, or a scalar of numpy
            value = value.item()
        if not isinstance(value, Real):
            return "not a number"
        number = float(value)
    except OverflowError:  # an int beyond all floats
        return "infinite"
    except Exception:  # of several elements, or whatever an object of another library raises
        return "not a number"
    if math.isnan(number):
        return "nan"
    return "infinite" if abs(number) > _LARGEST else number


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a user's function: an async one is awaited, and must not block the event loop.

    A plain one is called in a daemon thread, which is abandoned when its time is up: threads can't
    be stopped, and one that never releases the interpreter (a regular expression that backtracks
    forever) blocks all others; see `isolated`.
    """
    try:
        if is_async(function):
            coroutine = function(*arguments, **named)
            if not _is_ours(function):
                coroutine = watched(coroutine, _full_name(function))
            return await coroutine
        value = await _in_thread(partial(function, *arguments, **named))
        if inspect.iscoroutine(value):
            return await watched(value, _full_name(function))
        return await value if inspect.isawaitable(value) else value
    except (Exception, asyncio.CancelledError, KeyboardInterrupt):
        raise
    except (
        BaseException
    ) as error:  # sys.exit, a panic in Rust, time-outs of some libraries: they would end the run
        raise RuntimeError(f"the function raised {error!r}") from error


async def _in_thread(function: Callable[[], T]) -> T:
    try:
        return await off_loop(function)
    except KeyboardInterrupt as error:  # the function's own: Ctrl-C reaches the main thread alone
        raise RuntimeError(f"the function raised {error!r}") from error


def _full_name(function: object) -> str:
    """The function's name, after the name of its class if it has one."""
    return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition(
        "<locals>."
    )[2]


def _is_ours(function: object) -> bool:
    """True for functions of this package, whose calls of a user's function are watched on their
    own.
    """
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith(_PACKAGE)


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, or `OutOfTime`: then it is cancelled without waiting, because it
    might ignore that.
    """
    # Not `asyncio.wait_for`, which waits until a cancelled coroutine has ended.
    task = asyncio.ensure_future(coroutine)
    # if given up, nothing else retrieves it
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if not done:
        raise OutOfTime(f"took longer than {seconds:g} s")
    # by itself: a task that it awaits, shared with other calls perhaps, was cancelled
    if task.cancelled():
        raise RuntimeError("the function was cancelled from within")
    return task.result()


def is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


async def _call_by_names(
    function: Callable[..., object],
    names: Sequence[str],
    all_columns: bool,
    row: Row,
    sample: Sample,
) -> Any:
    known = {**row, "row": row, "sample": sample, "completion": sample.text}
    passed = {*names, *row} if all_columns else names
    return await call(function, **{name: known[name] for name in passed if name in known})


async def _call_trl(
    function: Callable[..., object],
    takes: Sequence[str] | None,
    rows: Sequence[Row],
    samples: Sequence[Sample],
) -> Any:
    def log_extra(name: str, values: Sequence[object]) -> None:
        for sample, value in zip(samples, values, strict=True):
            sample.info[name] = plain(value, f"reward {name_of(function)}, which logs {name!r}")

    def log_metric(name: str, value: object) -> None:
        log_extra(name, [value] * len(samples))

    # As TRL calls a reward: a list of each column, whose rows may have different ones.
    columns = set(chain.from_iterable(rows)) - {"prompt", "completion", "completion_ids"}
    named: dict[str, object] = {name: [row.get(name) for row in rows] for name in columns}
    named |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": list(map(_completion_of_trl, rows, samples)),
        "completion_ids": [list(sample.tokens) for sample in samples],
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    if takes is not None:
        named = {name: value for name, value in named.items() if name in takes}
    return await call(function, **named)


def _completion_of_trl(row: Row, sample: Sample) -> str | list[dict[str, Any]]:
    """A completion as TRL's rewards get it: text if the prompt is text, otherwise the messages
    after the prompt.
    """
    if isinstance(row["prompt"], str):
        return sample.text
    alone = [{"role": "assistant", "content": sample.text}]
    messages: list[dict[str, Any]] = copied(sample.info.get("messages", alone))
    return messages


async def _score(
    reward: RewardFunction, rows: Sequence[Row], samples: Sequence[Sample], single: bool
) -> None:
    """Call a function once, write the scores, and log the first failure of each kind.

    Further ones are counted.
    """
    own_rows = [copied(row) for row in rows]
    own_samples = [sample.copy() for sample in samples]
    arguments: Any = (own_rows[0], own_samples[0]) if single else (own_rows, own_samples)
    values: Sequence[Any] = []
    failure = detail = ""
    try:
        async with _turn(reward) as function:  # waiting for it does not count as the call's time
            with _watched_over(reward):
                values = await within(reward.timeout, _returned(function, arguments, single))
    except OutOfTime as late:
        failure, detail = "timeout", str(late)
        _isolate(reward)
    except _WrongLength as error:
        failure, detail = "wrong length", str(error)
    except Exception as error:
        failure, detail = "error", _explained(error, rows[0])
    else:
        for sample, own in zip(samples, own_samples, strict=True):
            # nothing is new there, unless the function gave its copy another info
            sample.info.update(own.info)
    for i, sample in enumerate(samples):
        score = failure or as_score(values[i])
        sample.rewards[reward.name] = score
        if isinstance(score, str) and score not in reward.reported:
            reward.reported[score] = detail or _shown(values[i])
            _report(reward, sample, score)


def _report(reward: RewardFunction, sample: Sample, failure: str) -> None:
    """Log the first failure of a kind."""
    masks = "it is masked, and" if reward.weight else "at weight 0 nothing is masked;"
    log.warning(
        "reward %s: completion %d of task %d has no score (%s: %s); %s further ones are counted. %s",
        reward.name,
        sample.index,
        sample.task,
        failure,
        reward.reported[failure],
        masks,
        ADVICE[failure],
    )


@asynccontextmanager
async def _turn(reward: RewardFunction) -> AsyncIterator[Callable[..., Any]]:
    """Wait until a further call of the function may begin, and in which process, if it has some of
    its own.
    """
    while True:
        function = reward.function
        free = asyncio.Semaphore(getattr(function, "concurrency", CONCURRENCY))
        async with reward._gates.setdefault(asyncio.get_running_loop(), free):
            if reward.function is not function:  # it was isolated while this call waited
                continue
            if isinstance(function, isolated):
                await function.start()  # its imports take none of the call's time
            yield function
            return


def _watched_over(reward: RewardFunction) -> AbstractContextManager[None]:
    """The watchdog over a call in this process of a function that is not burnish's own."""
    function = _users(reward.function)
    if isinstance(function, isolated) or is_async(function) or _is_ours(function):
        return nullcontext()
    return watchdog.calling(reward.name, reward.timeout)


def _isolate(reward: RewardFunction) -> None:
    """Have a function whose call has taken too long called in processes of its own, which can be
    killed.
    """
    function = _users(reward.function)
    if not reward.isolate or isinstance(function, isolated) or is_async(function):
        return
    reward.isolate = False  # it is tried once
    some = min(getattr(reward.function, "concurrency", CONCURRENCY), os.cpu_count() or 1, 4)
    try:
        # It has run in this process, so it has seen all of the environment, and could take all of
        # the memory.
        reward.function = isolated(
            reward.function, processes=some, memory=16.0, environment=tuple(os.environ)
        )
    except ValueError as error:
        log.warning(
            "reward %s: it is still called in threads of this process: %s", reward.name, error
        )
        return
    reward._gates.clear()
    log.warning(
        "reward %s: a call has taken longer than %g s, so from now on it is called in %d processes of its own, which "
        "are killed when their time is up; what it keeps in global variables begins anew there. Set isolate: true "
        "to begin so, or isolate: false to stay with threads, of which at most %d may be stuck",
        *(reward.name, reward.timeout, some, MOST_ABANDONED),
    )


def _users(function: object) -> Any:
    """The user's own function, within the ones that `adapted` and `batched` make of it."""
    while isinstance(function, partial):
        ours = str(getattr(function.func, "__module__", "")).startswith(_PACKAGE)
        function = function.args[0] if ours and function.args else function.func
    return function


async def _returned(function: Callable[..., Any], arguments: Any, single: bool) -> list[Any]:
    """The entries that a function returned for its completions, of a list, an array, a column [n,
    1] or a generator.

    Raises:
        _WrongLength: if these are not as many as completions.
    """
    value = await call(function, *arguments)
    if single:
        return [value]
    count = len(arguments[1])
    value = await _entries(value, count + 1)  # one more than wanted, of a generator that never ends
    if not isinstance(value, list | tuple):
        raise _WrongLength(f"returned {_shown(value)} for {count} completions")
    if len(value) != count:
        raise _WrongLength(f"returned {len(value)} for {count} completions")
    if all(isinstance(entry, list | tuple) and len(entry) == 1 for entry in value):
        return [entry[0] for entry in value]
    return list(value)


async def _entries(value: object, enough: int) -> Any:
    """A generator's or an array's entries as a list, ``enough`` of a generator's at most; other
    values as they are.
    """
    if isinstance(value, AsyncIterator):
        entries = []
        async for entry in value:
            entries.append(entry)
            if len(entries) == enough:
                break
        return entries
    if isinstance(value, Iterator):  # a generator, whose code runs only now
        return await call(list, islice(value, enough))
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: object) -> str:
    """The beginning of a returned value as text; an error in its own ``__repr__`` ends nothing."""
    try:
        return f"{value!r:.200}"
    except Exception as error:
        return f"a {type(value).__name__}, whose repr raises {type(error).__name__}"


def _explained(error: Exception, row: Row) -> str:
    """The traceback of a function's error, from its own first line on, and what its author should
    know.
    """
    where = error.__traceback__
    while where and where.tb_next:
        if not where.tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            break
        where = where.tb_next  # our own frames tell its author nothing
    explained = "".join(traceback.format_exception(error.with_traceback(where))).strip()
    if isinstance(error, KeyError):
        explained += f"\nthe row has the columns ({', '.join(map(str, row))})"
    if "signal only works in main thread" in str(error):
        explained += "\nwith isolate: true (`isolated` in code) it runs in the main thread of a process of its own"
    return explained
