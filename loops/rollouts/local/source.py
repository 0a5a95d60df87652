"""Completions from the trainer's own module: no server, no copy of the weights, on a CPU too."""

import asyncio
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...models.policy import Policy
from ..sample import Request, Sample, check_request
from ..source import NamedWeights, SourceError, check_weights
from .decode import DecodeSequence, ModelRunner
from .kv_cache import DecodeBatch
from .probe import advance, choose_memory

_CACHE_CPU = 2 << 30  # bytes
_SHARE = 4  # of a GPU's free memory, one part in so many: see `free_share`


class LocalSource:
    """Draws from the weights that are being trained: `publish` moves nothing, it announces a new version.

    Nothing may train while completions are under way, as nothing does where `RolloutScheduler` is synchronous;
    otherwise use a `DetachedSource`. Completions grow by one token at a time, and other tasks of the event loop may run
    in between. Requests that arrive together are sorted before they are begun, so that the same requests make up the
    same batches.

    Args:
        policy: its module generates, with its adapters and in its precision, in evaluation mode.
        tokenizer: for the text of samples; only its tokens are drawn.
        vocab: draw only ids below it; the tokenizer's length if not given, or else the model's.
        cache_bytes: of keys and values held at once, in the precision that they are held in; further sequences wait.
            None takes `free_share` of the device. How many sequences are read together depends on it, and on that their
            rounding, hence now and then a token: with the same number, the same bits.
        context: ``context()`` is entered around every forward pass, such as ``accelerator.autocast``.
        version: of the weights at the start; None where they have none yet.
    """

    overlaps = stored = False

    def __init__(
        self,
        policy: Policy | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        vocab: int | None = None,
        cache_bytes: int | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        version: int | None = None,
    ) -> None:
        self.policy = policy if isinstance(policy, Policy) else Policy(policy)
        self.tokenizer = tokenizer
        config: Any = self.policy.plain.config.get_text_config()
        known = config.vocab_size if tokenizer is None else len(tokenizer)
        self.vocab: int = vocab or min(config.vocab_size, known)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.runner = ModelRunner(self.policy, self.vocab, context)
        self._make_batch = choose_memory(
            self.runner, free_share(self.policy.device) if cache_bytes is None else cache_bytes
        )
        self._version = version
        self._closed = False
        self._arrived: list[_Pending] = []
        self._pending: list[_Pending] = []
        self._engine: asyncio.Task[None] | None = None

    async def sample(self, request: Request) -> list[Sample]:
        self._check_open()
        check_request(request, vocab=self.vocab, context=self.context)
        if self._version is None:
            raise SourceError("local: it has no weights yet; publish a version before asking for completions")
        pending = _Pending(request)
        self._arrived.append(pending)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
        await pending.done
        return [self._sample(sequence) for sequence in pending.sequences]

    async def publish(self, weights: NamedWeights, version: int) -> None:
        self._check_open()
        self._version = version

    async def version(self) -> int | None:
        return self._version

    async def close(self) -> None:
        self._closed = True
        if self._engine is not None and not self._engine.done():
            self._engine.cancel()
            await asyncio.gather(self._engine, return_exceptions=True)
        self._fail(SourceError("local: the source was closed while completions were under way"))

    def _check_open(self) -> None:
        if self._closed:
            raise SourceError("local: the source is closed; make a new one")

    async def _run(self) -> None:
        """Generate until no request is left."""
        try:
            await asyncio.sleep(0)  # requests of the same turn of the event loop begin together
            await self._generate()
        except torch.OutOfMemoryError as error:
            self._fail(SourceError(f"local: too many sequences at once for this device; lower cache_bytes ({error})"))
        except Exception as error:
            self._fail(error)

    async def _generate(self) -> None:
        queue: list[DecodeSequence] = []
        batch, cached_version = None, self._version
        while self._arrive(queue) or (batch is not None and batch.sequences):
            self._give_up(queue, batch)
            if batch is None or not batch.sequences:
                if not queue:
                    continue
                batch = self._make_batch(queue[0].max_length)
            elif cached_version != self._version:
                with self.runner.inference():
                    batch.read_again()
            count = batch.admit(queue)
            joining, queue[:count] = queue[:count], []
            cached_version = self._version
            assert cached_version is not None
            advance(batch, self.runner, joining, cached_version)
            self._pending = [pending for pending in self._pending if not pending.settled()]
            await asyncio.sleep(0)

    def _arrive(self, queue: list[DecodeSequence]) -> bool:
        """Queue the requests since the last token, in an order that does not depend on which was first."""
        arrived = sorted(self._arrived, key=lambda pending: pending.place)
        self._arrived.clear()
        self._pending += arrived
        queue += [x for pending in arrived for x in sorted(pending.sequences, key=lambda sequence: sequence.index)]
        return bool(queue)

    def _give_up(self, queue: list[DecodeSequence], batch: DecodeBatch | None) -> None:
        """Drop the sequences of requests that were cancelled."""
        for pending in self._pending:
            if pending.done.cancelled():
                for sequence in pending.sequences:
                    sequence.finish = "aborted"
        queue[:] = [sequence for sequence in queue if sequence.finish is None]
        if batch is not None:
            batch.drop_finished()

    def _fail(self, error: Exception) -> None:
        for pending in [*self._pending, *self._arrived]:
            if not pending.done.done():
                pending.done.set_exception(error)
        self._pending, self._arrived = [], []

    def _sample(self, sequence: DecodeSequence) -> Sample:
        assert sequence.finish is not None
        text = "" if self.tokenizer is None else self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        request, tokens, spans = sequence.request, sequence.tokens, sequence.spans
        trained, text = [True] * len(tokens), str(text)
        return Sample(request.task, sequence.index, list(request.prompt), tokens, trained, sequence.logprobs, spans,
                      sequence.finish, text)  # fmt: skip


class DetachedSource(LocalSource):
    """Draws from a copy of the policy, while the policy trains; `publish` copies the weights, between two tokens.

    Takes the arguments of `LocalSource`; adapters are merged in the copy.
    """

    overlaps = True

    def __init__(self, policy: Policy | nn.Module, *arguments: Any, **options: Any) -> None:
        model = policy.model if isinstance(policy, Policy) else policy
        copied: Any = copy.deepcopy(model)
        copied = copied.merge_and_unload() if isinstance(copied, PeftModel) else copied
        super().__init__(Policy(copied.requires_grad_(False).eval()), *arguments, **options)

    @torch.no_grad()
    async def publish(self, weights: NamedWeights, version: int) -> None:
        self._check_open()
        plain: Any = self.policy.plain
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        required = [name for name, _ in plain.named_parameters()]  # tied ones once
        for name, tensor in check_weights(weights, shapes, required, "detached"):
            parameters[name].copy_(tensor)
        self._version = version


class _Pending:
    """A request, its sequences, and the future that `LocalSource.sample` waits for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences = [DecodeSequence.of(request, index) for index in request.indices]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> tuple[int, int, list[int]]:
        return self.request.task, self.request.turn, sorted(self.request.indices)

    def settled(self) -> bool:
        if not self.done.done() and all(sequence.finish is not None for sequence in self.sequences):
            self.done.set_result(None)
        return self.done.done()


def free_share(device: torch.device) -> int:
    """Bytes for keys and values: on a GPU a quarter of what is free, elsewhere 2 GiB.

    A source is made before the first step, when the model is all that is there: the rest must do for gradients and the
    two moments of AdamW, three times the weights that train, for activations, and while tokens are drawn for logits,
    the prompts that are being read, and one layer's keys and values once more. Of whole GiB, so that some megabytes
    that another process takes don't change which answers are read together when a run is resumed.
    """
    if device.type != "cuda":
        return _CACHE_CPU
    free = torch.cuda.mem_get_info(device)[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # ours already
    share = (free + unused) // _SHARE
    return share >> 30 << 30 or share
