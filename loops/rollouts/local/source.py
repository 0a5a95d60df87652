"""Answers from the trainer's own module: no server, no copy of the weights, on a CPU too."""

import asyncio
import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ...models.policy import Policy
from ..sample import Request, Sample, check_request
from ..source import SourceError
from .decode import advance, choose_memory, read_again
from .kv_cache import Memory
from .runner import Answer, Context, Reader

_CACHE_CPU = 2 << 30  # bytes
_SHARE = 4  # of a GPU's free memory, one part in so many: see `free_share`


class LocalSource:
    """Draws from the weights that are being trained: `publish` moves nothing, it says that they are other ones.

    Nothing may train while answers are under way, as nothing does where `RolloutScheduler` is synchronous; what is
    to go
    on meanwhile needs a `DetachedSource`. Answers under way are continued one token at a time, and others may run in
    the
    event loop in between. Requests that arrive together are put in order before they are begun, so that the same
    requests make up the same batches.

    Args:
        policy: its module generates, with its adapters and in its precision, in evaluation mode.
        tokenizer: for the text of samples; only its tokens are drawn.
        vocab: draw only ids below it; the tokenizer's length if not given, or else the model's.
        cache_bytes: keys and values that are held at once, in the precision that they are held in; what does not fit
            waits its turn. None takes `free_share` of the device. How many answers are read together depends on it,
            and on that their rounding, hence now and then a token: with the same number, the same bits.
        context: ``context()`` is entered around every forward pass, such as the trainer's autocast.
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
        context: Context = nullcontext,
        version: int | None = None,
    ) -> None:
        self.policy = policy if isinstance(policy, Policy) else Policy(policy)
        self.tokenizer = tokenizer
        config: Any = self.policy.plain.config.get_text_config()
        self.vocab: int = vocab or min(
            config.vocab_size, len(tokenizer) if tokenizer is not None else config.vocab_size
        )
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.reader = Reader(self.policy, self.vocab, context)
        self._choose = choose_memory(
            self.reader, free_share(self.policy.device) if cache_bytes is None else cache_bytes
        )
        self._version = version
        self._closed = False
        self._arrived: list[_Call] = []
        self._calls: list[_Call] = []
        self._engine: asyncio.Task[None] | None = None

    async def sample(self, request: Request) -> list[Sample]:
        self._check_open()
        check_request(request, vocab=self.vocab, context=self.context)
        if self._version is None:
            raise SourceError("embedded: it has no weights yet; publish a version before asking for answers")
        call = _Call(request)
        self._arrived.append(call)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
        await call.done
        return [self._sample(answer) for answer in call.answers]

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._check_open()
        self._version = version

    async def version(self) -> int | None:
        return self._version

    async def close(self) -> None:
        self._closed = True
        if self._engine is not None and not self._engine.done():
            self._engine.cancel()
            await asyncio.gather(self._engine, return_exceptions=True)
        self._fail(SourceError("embedded: the source was closed while answers were under way"))

    def _check_open(self) -> None:
        if self._closed:
            raise SourceError("embedded: the source is closed; make a new one")

    async def _run(self) -> None:
        """Generate until nothing is asked for any more."""
        try:
            await asyncio.sleep(0)  # whoever asks in the same turn of the event loop is begun with
            await self._generate()
        except torch.OutOfMemoryError as error:
            self._fail(SourceError(f"embedded: too many answers at once for this device; lower cache_bytes ({error})"))
        except Exception as error:
            self._fail(error)

    async def _generate(self) -> None:
        queue: list[Answer] = []
        memory, read_by = None, self._version
        while self._arrive(queue) or (memory is not None and memory.answers):
            self._give_up(queue, memory)
            if memory is None or not memory.answers:
                if not queue:
                    continue
                memory = self._choose(queue[0].longest)
            elif read_by != self._version:
                read_again(memory, self.reader)
            count = memory.room(queue)
            joining, queue[:count] = queue[:count], []
            read_by = self._version
            assert read_by is not None
            advance(memory, self.reader, joining, read_by)
            self._calls = [call for call in self._calls if not call.settled()]
            await asyncio.sleep(0)

    def _arrive(self, queue: list[Answer]) -> bool:
        """Queue up what has been asked for since the last token, in an order that does not depend on who was first."""
        arrived = sorted(self._arrived, key=lambda call: call.place)
        self._arrived.clear()
        self._calls += arrived
        queue += [answer for call in arrived for answer in sorted(call.answers, key=lambda answer: answer.index)]
        return bool(queue)

    def _give_up(self, queue: list[Answer], memory: Memory | None) -> None:
        for call in self._calls:
            if call.done.cancelled():
                for answer in call.answers:
                    answer.finish = "aborted"
        queue[:] = [answer for answer in queue if answer.finish is None]
        if memory is not None:
            memory.drop_finished()

    def _fail(self, error: Exception) -> None:
        for call in [*self._calls, *self._arrived]:
            if not call.done.done():
                call.done.set_exception(error)
        self._calls, self._arrived = [], []

    def _sample(self, answer: Answer) -> Sample:
        assert answer.finish is not None
        text = "" if self.tokenizer is None else self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        return Sample(
            task=answer.request.task,
            index=answer.index,
            prompt=list(answer.request.prompt),
            tokens=answer.tokens,
            trained=[True] * len(answer.tokens),
            logprobs=answer.logprobs,
            spans=answer.spans,
            finish=answer.finish,
            text=str(text),
        )


class DetachedSource(LocalSource):
    """Draws from a copy of the policy, while the policy trains; `publish` copies the weights, between two tokens.

    Takes the arguments of `LocalSource`; adapters are merged in the copy.
    """

    overlaps = True

    def __init__(self, policy: Policy | nn.Module, *arguments: Any, **options: Any) -> None:
        model = policy.model if isinstance(policy, Policy) else policy
        own: Any = copy.deepcopy(model)
        own = own.merge_and_unload() if isinstance(own, PeftModel) else own
        super().__init__(Policy(own.requires_grad_(False).eval()), *arguments, **options)

    @torch.no_grad()
    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._check_open()
        mine = dict(self.policy.plain.named_parameters(remove_duplicate=False))
        left = {id(parameter) for parameter in mine.values()}
        for name, tensor in weights:
            if name not in mine or mine[name].shape != tensor.shape:
                raise SourceError(
                    f"detached: {name} {list(tensor.shape)} is no parameter of this model; publish the weights by the "
                    "names that transformers gives them, adapters merged"
                )
            mine[name].copy_(tensor)
            left.discard(id(mine[name]))
        if left:
            missing = next(name for name, parameter in mine.items() if id(parameter) in left)
            raise SourceError(f"detached: version {version} came without {missing}; publish all of the weights")
        self._version = version


class _Call:
    """One request, its answers, and who waits for them."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answers = [Answer.of(request, index) for index in request.indices]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def place(self) -> tuple[int, int, list[int]]:
        return self.request.task, self.request.turn, sorted(self.request.indices)

    def settled(self) -> bool:
        if not self.done.done() and all(answer.finish is not None for answer in self.answers):
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
