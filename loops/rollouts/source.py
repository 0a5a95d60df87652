"""The contract of every source of completions: the trainer's own module, a server, or stored
completions.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from .sample import Request, Sample, check_sample

NamedWeights = Iterable[tuple[str, Tensor]]


class SourceError(RuntimeError):
    """The source can't complete the request, now or later.

    The message says what is wrong and how to fix it.
    """


class SourceLost(SourceError):
    """The source is gone, or has lost its weights: query its `version`, publish, and repeat the
    same requests.
    """


class SourceBusy(SourceLost):
    """The source refuses for now, and has kept its weights: repeat the same request after a
    while.
    """


def refuse_closed(closed: bool, who: str) -> None:
    if closed:
        raise SourceError(f"{who}: the source is closed; make a new one")


def check_completions(
    samples: Sequence[Sample],
    request: Request,
    who: str,
    *,
    vocab: int | None = None,
    conversations: bool = False,
) -> None:
    """Raise unless these are the requested completions, in order, each one whole.

    Args:
        vocab: exclusive upper limit of token ids, if it is known.
        conversations: they may be longer than was requested, have prompts of their own, and several
            contexts.

    Raises:
        SourceError: says what was requested.
    """
    who = f"{who}: task {request.task}"
    received = [(sample.task, sample.index) for sample in samples]
    if received != [(request.task, index) for index in request.indices]:
        raise SourceError(
            f"{who}: asked for its completions {list(request.indices)}, got {received}"
        )
    for sample in samples:
        try:
            check_sample(sample, vocab=vocab)
        except ValueError as error:
            raise SourceError(f"{who}: {error}") from error
        if not conversations:
            _refuse_another(sample, request, who)


def _refuse_another(sample: Sample, request: Request, who: str) -> None:
    """Raise SourceError unless the sample continues the request's prompt, within its limit."""
    if list(sample.prompt) != list(request.prompt):
        raise SourceError(
            f"{who}: completion {sample.index} is of another prompt than the one asked for"
        )
    if sample.further:
        raise SourceError(
            f"{who}: completion {sample.index} has {len(sample.contexts)} contexts; asked for one"
        )
    longest = request.sampling.max_tokens
    if len(sample.tokens) > longest:
        raise SourceError(f"{who}: asked for at most {longest} tokens, got {len(sample.tokens)}")


def check_weights(weights: NamedWeights, model: nn.Module, who: str) -> NamedWeights:
    """Yield the weights unchanged; raise if one is not the model's. Tied weights may appear once.

    Raises:
        SourceError: if one is not the model's, or in the end if one is missing.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    missing = {name for name, _ in model.named_parameters()}  # tied ones once
    for name, tensor in weights:
        if shapes.get(name) != tensor.shape:
            raise SourceError(
                f"{who}: {name} {list(tensor.shape)} is no parameter of this model; publish the weights by the names "
                "that transformers gives them, adapters merged"
            )
        missing.discard(name)
        yield name, tensor
    if missing:
        raise SourceError(f"{who}: the weights came without {min(missing)}; publish all of them")


class RolloutSource(Protocol):
    """Tokens in, tokens out.

    A sample holds the drawn tokens, and their log-probs under the distribution that they were drawn
    from. Its seed is a hash of (key, task, index, turn), so that the same request under the same
    weights gives the same tokens, whatever other requests are pending.
    ``tests/support/conformance.py`` is this contract as tests.

    `SourceLost` and ``OSError`` are worth retrying; any other error ends the run. The scheduler
    asks again for the completions that are missing, `SourceBusy` without looking after the weights.

    Attributes:
        overlaps: true if the trainer may train while completions are being sampled.
        stored: true if the completions come from another run, whose versions are unrelated to this
            one's.
        separate: optional; true if each completion of a request is a request of its own to what
            samples it. The scheduler then asks for each by itself, so that one that fails is
            repeated at once, and none is kept waiting by another.
    """

    overlaps: bool
    stored: bool

    async def sample(self, request: Request) -> list[Sample]:
        """Complete a prompt, in the order of ``request.indices``.

        Requests may run at the same time.
        """

    async def publish(self, weights: NamedWeights, version: int) -> None:
        """Draw from these weights from now on.

        Pending requests continue; their spans say where weights changed.

        ``weights`` are the parameters by the names that transformers gives them, adapters merged;
        it is read once.
        """

    async def version(self) -> int | None:
        """The version of the weights that the source draws from.

        None where it is unknown, as after a restart.
        """

    async def close(self) -> None: ...


class SourceOnAnother:
    """What a source of conversations, or one that repeats requests, passes on to the source that it
    samples from.
    """

    source: RolloutSource

    async def publish(self, weights: NamedWeights, version: int) -> None:
        await self.source.publish(weights, version)

    async def version(self) -> int | None:
        return await self.source.version()

    async def close(self) -> None:
        await self.source.close()
