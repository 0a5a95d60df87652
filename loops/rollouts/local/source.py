"""Completions from the trainer's own module: no server and no copy of the weights, also on a
CPU.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ...models.backbone import Backbone
from ...models.io import detached_copy
from ...models.policy import Policy
from ..sample import Request, Sample, check_request
from ..source import NamedWeights, SourceError, check_weights, refuse_closed
from ..stop_words import stop_words
from .decode import DecodeSequence, ModelRunner, draw, penalize
from .graph_batch import Drawn, GraphBatch
from .probe import DecodeBatch, ProbedBatch, choose_batch

# Token steps, of which the packing of weights takes the time that it saves in 8 to 10 of them.
_WORTH_PACKING = 16


class LocalSource:
    """Draws from the weights that are being trained: `publish` only announces a new version.

    Nothing may train while completions are under way, as nothing does where `RolloutScheduler` is
    synchronous; otherwise use a `DetachedSource`. Completions grow by one token at a time, and
    other tasks of the event loop may run in between. Requests that arrive together are sorted, so
    that the same requests make up the same batches.

    Args:
        policy: its module generates, with its adapters and in its precision, in evaluation mode.
        tokenizer: for the text of samples; only its tokens are drawn.
        vocab: draw only ids below it; the tokenizer's length if not given, or else the model's.
        cache_bytes: of keys and values held at once, in the precision that they are held in;
            further sequences wait. None takes `free_share` of the device. How many sequences are
            read together depends on it, and on that their rounding, hence now and then a token:
            with the same number, the same bits.
        context: ``context()`` is entered around every forward pass, such as
            ``accelerator.autocast``.
        version: of the weights at the start; None where they have none yet.
        cuda_graphs: on a CUDA GPU, replay each token step as one graph, and read its tokens while
            the next one runs: see `GraphBatch`. It has never run on a GPU. Elsewhere the same steps
            are plain calls, which take longer than without it.
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
        cuda_graphs: bool = False,
    ) -> None:
        self.policy = policy if isinstance(policy, Policy) else Policy(policy)
        self.tokenizer = tokenizer
        config: Any = self.policy.plain.config.get_text_config()
        known = config.vocab_size if tokenizer is None else len(tokenizer)
        self.vocab: int = vocab or min(config.vocab_size, known)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.runner = ModelRunner(self.policy, self.vocab, context)
        if cache_bytes is None:  # asked now, before training takes memory
            cache_bytes = free_share(self.policy.device)
        self._make_batch = choose_batch(self.runner, cache_bytes, cuda_graphs=cuda_graphs)
        self._version = version
        self._closed = False
        self._arrived: list[DecodeSequence] = []
        self._awaited: dict[asyncio.Future[None], list[DecodeSequence]] = {}
        self._engine: asyncio.Task[None] | None = None

    async def sample(self, request: Request) -> list[Sample]:
        refuse_closed(self._closed, "local")
        check_request(request, vocab=self.vocab, context=self.context)
        request = self._with_images(request)
        if self._version is None:
            raise SourceError(
                "local: it has no weights yet; publish a version before asking for completions"
            )
        words = None
        if request.sampling.stop_words:
            words = stop_words(self.tokenizer, request.sampling.stop_words)
        sequences = [DecodeSequence(request, index, words) for index in request.indices]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrived += sequences
        self._awaited[done] = sequences
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
        try:
            await done
        finally:
            del self._awaited[done]
            for sequence in sequences:  # of a cancelled request
                sequence.finish = sequence.finish or "aborted"
        return [self._sample_of(sequence) for sequence in sequences]

    def _with_images(self, request: Request) -> Request:
        """The request, whose completions end with an image token, if one is drawn.

        No image belongs to such a token, so the model could not read it; the last token of a
        completion is none that it reads, and its log-prob stays that of the policy.

        Raises:
            ValueError: if the prompt shows images, and the policy sees none.
        """
        images = self.policy.images
        if images is None:
            if request.images:
                raise ValueError(
                    f"task {request.task}: its prompt shows images, and the policy has no processor to read "
                    "them; give it images=ImageInputs(ImageReader(processor))"
                )
            return request
        stop = (*request.sampling.stop, *sorted(images.reader.stop_tokens))
        return replace(request, sampling=replace(request.sampling, stop=stop))

    def _sample_of(self, sequence: DecodeSequence) -> Sample:
        text = ""
        if self.tokenizer is not None:
            text = str(self.tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        return Sample(
            sequence.request.task,
            sequence.index,
            list(sequence.request.prompt),
            sequence.tokens,
            [True] * len(sequence.tokens),
            sequence.logprobs,
            sequence.spans,
            sequence.finish or "aborted",
            text,
        )

    async def publish(self, weights: NamedWeights, version: int) -> None:
        refuse_closed(self._closed, "local")
        self._version = version

    async def version(self) -> int | None:
        return self._version

    async def close(self) -> None:
        self._closed = True
        if self._engine is not None and not self._engine.done():
            self._engine.cancel()
            await asyncio.gather(self._engine, return_exceptions=True)
        self._fail(SourceError("local: the source was closed while completions were under way"))

    async def _run(self) -> None:
        """Draw a token for every sequence of the batch, repeatedly, until no request is left."""
        queue: list[DecodeSequence] = []
        batch: DecodeBatch | None = None
        read_version: int | None = None
        try:
            while True:
                await asyncio.sleep(0)  # requests of the same turn of the event loop begin together
                queue = self._unfinished(queue)
                if read_version != self._version:
                    self.runner.packed.clear()
                    if isinstance(batch, GraphBatch):
                        self._append(batch.take())
                        self._answer_finished()
                if batch is not None:
                    batch.drop_finished()
                if batch is None or not batch.sequences:
                    if not queue:
                        return
                    batch = self._make_batch(queue[0].max_length)
                elif read_version != self._version:  # a detached copy got new weights
                    batch = self._read_again(batch.sequences)
                count = batch.admit(queue)
                joining = queue[:count]
                queue = queue[count:]
                assert self._version is not None
                read_version = self._version
                self._draw_tokens(batch, joining, read_version)
                self._answer_finished()
        except torch.OutOfMemoryError as error:
            self._fail(
                SourceError(
                    f"local: too many sequences at once for this device; lower cache_bytes ({error})"
                )
            )
        except Exception as error:
            self._fail(error)
        finally:
            self.runner.packed.clear()  # training may change the weights now, and wants the memory

    def _pack_weights(self, sequences: list[DecodeSequence]) -> None:
        """Pack the weights for the next token steps, unless they are, if so many may follow that it
        saves time.

        It is called where the weights are computed with, in the precision of that.
        """
        packed = self.runner.packed
        if packed:
            return
        most = max(sequence.sampling.max_tokens - len(sequence.tokens) for sequence in sequences)
        if most >= _WORTH_PACKING and packed.worthwhile(len(sequences)):
            packed.pack()

    def _unfinished(self, queue: list[DecodeSequence]) -> list[DecodeSequence]:
        """The sequences that wait, and after them those that have arrived, sorted.

        Without those of a request that was cancelled.
        """
        arrived = sorted(self._arrived, key=lambda sequence: sequence.place)
        self._arrived = []
        return [sequence for sequence in [*queue, *arrived] if sequence.finish is None]

    def _read_again(self, under_way: list[DecodeSequence]) -> DecodeBatch:
        """A batch of the same sequences, without the keys and values that other weights have
        computed.
        """
        batch = self._make_batch(max(sequence.max_length for sequence in under_way))
        with self.runner.inference():
            batch.join(under_way)
        return batch

    def _draw_tokens(self, batch: DecodeBatch, joining: list[DecodeSequence], version: int) -> None:
        """Draw a token for every sequence of a batch, and for those that join it.

        A `GraphBatch` only begins to, and those that it began before are appended.
        """
        with self.runner.inference():
            if isinstance(batch, GraphBatch):
                drawn = batch.advance(joining, version)
            else:
                drawn = [self._drawn_now(batch, joining, version)]
            self._pack_weights(batch.sequences)
        self._append(drawn)

    def _drawn_now(self, batch: ProbedBatch, joining: list[DecodeSequence], version: int) -> Drawn:
        states = []
        if batch.sequences:
            states.append(batch.step())
        if joining:
            states.append(batch.join(joining))
        uniform = [sequence.uniform[len(sequence.tokens)] for sequence in batch.sequences]
        sampling = [sequence.sampling for sequence in batch.sequences]
        seen = [sequence.seen for sequence in batch.sequences]
        logits = penalize(self.runner.logits(torch.cat(states)), seen, sampling)
        tokens, logprobs = draw(logits, uniform, sampling)
        return Drawn(batch.sequences, tokens, logprobs, version)

    def _append(self, drawn: list[Drawn]) -> None:
        """Append tokens to their sequences, but for those that are finished."""
        for each in drawn:
            tokens, logprobs = each.read()
            for sequence, token, logprob in zip(each.sequences, tokens, logprobs, strict=True):
                if sequence.finish is not None:
                    continue
                if not logprob > float("-inf"):
                    raise SourceError(
                        f"local: the weights of version {each.version} give log-probs of {logprob}, so they hold "
                        "NaN or overflow; lower the learning rate, and continue from a checkpoint before this step"
                    )
                sequence.append(token, logprob, each.version)

    def _answer_finished(self) -> None:
        """Wake the requests whose sequences are all finished."""
        for done, sequences in self._awaited.items():
            if not done.done() and all(sequence.finish is not None for sequence in sequences):
                done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._arrived.clear()
        for done in self._awaited:
            if not done.done():
                done.set_exception(error)


class DetachedSource(LocalSource):
    """Draws from a copy of the policy, while the policy trains.

    `publish` copies the weights, between two tokens.

    Takes the arguments of `LocalSource`; adapters are merged in the copy. That of a sharded policy
    is whole: all ranks make theirs, and publish, at the same time.
    """

    overlaps = True

    def __init__(self, policy: Policy | nn.Module, *arguments: Any, **options: Any) -> None:
        backbone = policy if isinstance(policy, Backbone) else Backbone(policy)
        copied = detached_copy(backbone).requires_grad_(False).eval()
        super().__init__(Policy(copied, images=backbone.images), *arguments, **options)

    @torch.no_grad()
    async def publish(self, weights: NamedWeights, version: int) -> None:
        refuse_closed(self._closed, "local")
        plain: Any = self.policy.plain
        parameters = plain.state_dict()
        for name, tensor in check_weights(weights, plain, "detached"):
            parameters[name].copy_(tensor)
        self._version = version


def free_share(device: torch.device) -> int:
    """Bytes for keys and values: on a GPU a quarter of what is free, elsewhere 2 GiB.

    A source is made before the first step, when only the model is in memory: the rest must suffice
    for gradients and the two moments of AdamW, three times the weights that train, for activations,
    and while tokens are drawn for logits, the prompts that are being read, and one layer's keys and
    values once more. Of whole GiB, so that some megabytes that another process takes don't change
    which answers are read together when a run is resumed.
    """
    if device.type != "cuda":
        return 2 << 30
    free = torch.cuda.mem_get_info(device)[0]
    # ours already
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = (free + unused) // 4
    gib = 1 << 30
    return share if share < gib else share // gib * gib
