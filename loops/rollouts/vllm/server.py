"""Completions from a vLLM server, over HTTP.

The server runs in an environment of its own and is started by `ServerProcess`, or by hand with the
same flags. Everything that could make its log-probs differ from the trainer's is checked when the
source is created, and again after every restart.
"""

import asyncio
import base64
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from ....data.images import ImageReader, as_png
from ..event_loops import gather_or_cancel, off_loop, run
from ..sample import Request, Sample, SamplingParams, VersionSpan, check_request
from ..source import (
    NamedWeights,
    SourceBusy,
    SourceError,
    SourceLost,
    check_completions,
    refuse_closed,
)
from ..stop_words import stop_words
from .answers import check_finish, check_logprobs, check_tokens, read_completion, shown
from .client import Rejected, VLLMClient
from .preflight import check_model, check_server, parameter_check
from .weights import Adapters, Files, Nccl, send_weights

log = logging.getLogger(__name__)
T = TypeVar("T")
_Completion = tuple[int, int, int]  # key, task and index of its request

# Tested versions of vLLM. Its endpoints for training are not covered by its promises of stability.
VERSIONS = ("0.32",)
# seconds beyond the patience; the wait for a server that starts ends first, and says better what is
# wrong
_SLACK = 3.0
# seconds that the slowest of several servers is waited for where another one has answered
_STRAGGLER = 30.0


def sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """The arguments of vLLM's ``SamplingParams``, which raises a temperature just above 0 without a
    word.
    """
    if 0 < sampling.temperature < 0.01:
        raise ValueError(
            f"temperature: vLLM samples at 0.01 or above, got {sampling.temperature:g}; or set it to 0"
        )
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop),
        "stop": list(sampling.stop_words),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # only what the request calls a stop token is one
        "seed": seed,
        "logprobs": 0,  # log-probs of the drawn tokens only
        "detokenize": bool(sampling.stop_words),
    }


def end_at_images(request: Request, reader: ImageReader | None) -> Request:
    """The request, whose completions end with an image token, if one is drawn: no image belongs to
    it, and the last token of a completion is none that the model reads.

    Raises:
        ValueError: if the prompt shows images, and there is no reader of them.
    """
    if reader is None:
        if request.images:
            raise ValueError(
                f"task {request.task}: its prompt shows images, and the source has no processor to read them; give "
                "it images=ImageReader(processor)"
            )
        return request
    stop = (*request.sampling.stop, *sorted(reader.stop_tokens))
    return replace(request, sampling=replace(request.sampling, stop=stop))


def check_prompt(request: Request, tokens: Sequence[int] | None) -> None:
    """Raise SourceError unless vLLM has made the request's prompt of placeholders and images."""
    if list(tokens or ()) != list(request.prompt):
        raise SourceError(
            f"vllm: task {request.task}: it makes other tokens of the prompt's images than the trainer's processor "
            "does; start it with the same model, and without mm_processor_kwargs"
        )


async def sample_each(
    complete: Callable[[Request, int], Coroutine[Any, Any, Sample]],
    request: Request,
    *,
    vocab: int,
    context: int,
) -> list[Sample]:
    """The completions of a request, each of which is a request of its own to vLLM."""
    check_request(request, vocab=vocab, context=context)
    samples = await gather_or_cancel(complete(request, index) for index in request.indices)
    check_completions(samples, request, "vllm", vocab=vocab)
    return samples


def to_sample(
    request: Request,
    index: int,
    tokens: list[int],
    drawn: list[tuple[int, float]],
    reason: str,
    spans: list[VersionSpan],
    tokenizer: PreTrainedTokenizerBase,
    vocab: int,
) -> Sample:
    """A sample from the parts of a completion, which ``drawn`` has the log-probs of, each with its
    token.

    Args:
        reason: why it ended, in vLLM's word.

    Raises:
        SourceLost: if it is empty, since it was broken off.
        SourceError: if the parts disagree with each other.
    """
    who = f"vllm: completion {index} of task {request.task}"
    sampling = request.sampling
    if [token for token, _ in drawn] != tokens:
        raise SourceError(
            f"{who}: it came with {len(drawn)} log-probs for {len(tokens)} tokens, or of other ones"
        )
    if not tokens:
        raise SourceLost(f"{who}: it was broken off before its first token")
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(tokens):
        raise SourceError(
            f"{who}: which weights its {len(tokens)} tokens are from is not said, but {spans}"
        )
    logprobs = [logprob for _, logprob in drawn]
    check_tokens(who, tokens, vocab)
    check_logprobs(who, logprobs)
    end = None
    if sampling.stop_words:
        end = stop_words(tokenizer, sampling.stop_words).end(tokens)
    if end is not None:
        tokens, logprobs = tokens[:end], logprobs[:end]
        spans = [span._replace(end=min(span.end, end)) for span in spans if span.start < end]
        reason = "stop"
    finish = check_finish(who, tokens, reason, sampling)
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    trained = [True] * len(tokens)
    return Sample(
        request.task, index, list(request.prompt), tokens, trained, logprobs, spans, finish, text
    )


class VLLMServer:
    """A source on a server, which may die and be restarted.

    Args:
        url: ``http://host:port``.
        config, tokenizer: of the trained model; those of the server's model, which must be readable
            here, unless given.
        images: reads the images of prompts, as the trainer's policy does; None for text alone.
        updates: how weights get there, see `burnish.loops.rollouts.vllm.weights`; by default
            `Files` in memory, on this machine.
        dtype: the precision that the server must compute in: the trainer's, or else log-probs
            differ. None takes any.
        concurrency: completions under way at once; further ones wait here. None: as many as the
            server has room for by its keys and values, where it says so, else 64.
        timeout: seconds that one completion may take; it is requested again then.
        patience: seconds in which the server must start, complete one of all requests, or take new
            weights. After that, further attempts are useless.
        key: sent to the server with every request, such as `ServerProcess.key`.
        revive: called when the server is gone, such as `ServerProcess.revive`.
        end: called when the source is closed, such as `ServerProcess.close`.
        versions: of vLLM, to be tried at your own risk.

    Raises:
        SourceError: at once, if there is no such server, or it is not what is needed; says what to
            change.
    """

    overlaps, stored = True, False
    separate = True

    def __init__(
        self,
        url: str,
        *,
        config: PretrainedConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        images: ImageReader | None = None,
        updates: Files | Nccl | Adapters | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        concurrency: int | None = None,
        timeout: float = 600.0,
        patience: float = 1200.0,
        key: str | None = None,
        revive: Callable[[], None] | None = None,
        end: Callable[[], None] = lambda: None,
        versions: tuple[str, ...] = VERSIONS,
    ) -> None:
        self.updates = Files() if updates is None else updates
        self.images = images
        self.dtype = dtype
        self._patience = patience
        self._revive = revive
        self._end = end
        self._versions = versions
        self._meeting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )
        self._calls: set[asyncio.Task[Any]] = set()
        self._heard = 0.0  # since when its patience runs, in seconds of the monotonic clock
        self._late = False  # whether the last attempt took too long
        self._closed = False
        self._completions = 0  # that it has completed
        self._tokens = 0  # of all of these
        self._reviving: threading.Thread | None = None
        timeout = min(timeout, patience)
        self._client = VLLMClient(
            url, concurrency=concurrency, timeout=timeout, patience=patience, key=key
        )
        try:
            run(self._meet(config, tokenizer))
            self.check_weights = parameter_check(self._config) if self.updates.merged else iter
        except BaseException:
            end()
            raise

    async def sample(self, request: Request) -> list[Sample]:
        request = end_at_images(request, self.images)
        complete = partial(self._complete, self._prompt_of(request))
        return await sample_each(complete, request, vocab=self.vocab, context=self.context)

    def _prompt_of(self, request: Request) -> dict[str, Any]:
        """The prompt as the server takes it: its tokens; with images, a placeholder for each of
        them, and their files.
        """
        if self.images is None or not request.images:
            return {"token_ids": list(request.prompt)}
        parts = []
        for image in request.images:
            encoded = base64.b64encode(as_png(image)).decode()
            parts.append({"type": "image_url", "url": f"data:image/png;base64,{encoded}"})
        short = self.images.with_placeholders(request.prompt, request.images)
        return {"token_ids": short, "content_parts": parts, "return_token_ids": True}

    async def publish(self, weights: NamedWeights, version: int) -> None:
        await send_weights([self], self.check_weights(weights), version)

    async def update(
        self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: object
    ) -> None:
        await self._within_patience(step(self._client, *arguments))
        self._note_heard()

    async def version(self) -> int | None:
        """Wait for a server that is down, or revive it.

        None after a restart; then the server is checked again.
        """
        return await self._within_patience(self._known_version(), _SLACK)

    async def close(self) -> None:
        """Cancel all calls, which closes their connections."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        self._end()

    def revive_beside(self) -> None:
        """Begin to revive a server that is down, while others go on; no error of it is raised."""
        if self._revive is None or (self._reviving is not None and self._reviving.is_alive()):
            return
        self._reviving = threading.Thread(
            target=self._try_to_revive, daemon=True, name="burnish-revive"
        )
        self._reviving.start()

    def _try_to_revive(self) -> None:
        assert self._revive is not None
        try:
            self._revive()
        except (SourceError, OSError) as error:
            if not self._closed:
                log.warning("%s", error)

    def _expected(self, sampling: SamplingParams) -> int:
        """The tokens that a completion is expected to have: as many as others had on average."""
        if self._completions == 0:
            return sampling.max_tokens
        return min(sampling.max_tokens, math.ceil(self._tokens / self._completions))

    async def _known_version(self) -> int | None:
        try:
            version = await self.updates.version(self._client)
        except (SourceLost, Rejected) as error:
            log.warning("%s", error)
            version = None
        if version is None:
            await self._meet(self._config, self.tokenizer)
            self._note_heard()  # it has answered a request for one token
        return version

    async def _meet(
        self, config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Wait for the server, or revive it, and check that it is the required one.

        Raises:
            SourceError: if that takes longer than the patience, however fast each single answer
                comes.
        """
        try:
            async with asyncio.timeout(self._patience + _SLACK):
                await self._meet_in_time(config, tokenizer)
        except TimeoutError as error:
            raise SourceError(
                f"vllm: the server at {self._client.url} did not start, and answer what it was asked, in "
                f"{self._patience:g} s; read its log, or raise vllm.patience"
            ) from error

    async def _meet_in_time(
        self, config: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        async with self._meeting.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self._revive is not None and not await self._client.alive():
                await off_loop(self._revive)
            await self._client.wait(self._patience)
            self.context, model = await check_server(
                self._client, self.updates, self.dtype, self._versions
            )
        self._config = _read(AutoConfig, model, "config") if config is None else config
        self.tokenizer = (
            _read(AutoTokenizer, model, "tokenizer") if tokenizer is None else tokenizer
        )
        self.config: Any = self._config.get_text_config()
        self.vocab: int = max(self.config.vocab_size, len(self.tokenizer))
        await check_model(self._client, model, self.config, self.tokenizer, self.vocab)

    async def _within_patience(self, work: Coroutine[Any, Any, T], slack: float = 0.0) -> T:
        """Return the result of the work.

        Attempts that come too late, one after the other, share one patience.

        Raises:
            SourceLost: also for a refusal that may pass; `SourceBusy`, if the weights are still
                there.
            SourceError: if the server has been asked, and has given nothing, for longer than that.
        """
        if not (self._calls or self._late):
            self._note_heard()
        call = asyncio.create_task(work)
        self._calls.add(call)
        try:
            while not (call.done() or self._closed):
                left = self._heard + self._patience + slack - time.monotonic()
                if left <= 0:
                    self._late = False
                    raise SourceError(
                        f"vllm: the server at {self._client.url} has answered nothing in "
                        f"{self._patience:g} s; check it and continue with --resume true, or raise vllm.patience if it "
                        "takes that long"
                    )
                await asyncio.wait({call}, timeout=left)
            refuse_closed(self._closed, "vllm")
            return call.result()
        except (SourceLost, Rejected) as error:
            if isinstance(error.__cause__, TimeoutError):
                self._late = True
            else:
                self._note_heard()  # it refuses, or has ended: wait for it from now on
            if isinstance(error, Rejected) and error.busy:
                raise SourceBusy(str(error)) from error
            if isinstance(error, Rejected) and error.may_pass:
                raise SourceLost(str(error)) from error
            raise
        finally:
            call.cancel()
            self._calls.remove(call)

    def _note_heard(self) -> None:
        self._heard = time.monotonic()
        self._late = False

    async def _complete(self, prompt: Mapping[str, Any], request: Request, index: int) -> Sample:
        params = sampling_params(request.sampling, request.seed(index))
        with self.updates.model() as model:
            body = {"model": model, "sampling_params": params, **prompt}
            tokens = len(request.prompt) + self._expected(request.sampling)
            generating = self._client.generate(body, request.priority, tokens)
            response = await self._within_patience(generating)
            self._note_heard()
            try:
                answer = read_completion(
                    response, f"vllm: completion {index} of task {request.task}"
                )
            except (LookupError, TypeError, ValueError) as error:
                known = " or ".join(self._versions)
                raise SourceError(
                    f"vllm: its answer is not understood ({error!r}); is {self._client.url} vLLM {known}? It says "
                    f"{shown(response)}"
                ) from error
            if request.images:
                check_prompt(request, response.get("prompt_token_ids"))
            spans = self.updates.spans(answer.labels, model)
            self._completions += 1
            self._tokens += len(answer.tokens)
        return to_sample(
            request,
            index,
            answer.tokens,
            answer.drawn,
            answer.reason,
            spans,
            self.tokenizer,
            self.vocab,
        )


class VLLMServers:
    """Servers of one model as one source: weights go to all, and completions are dealt out so that
    each has as many under way.

    Completions that are asked for at the same time are dealt together, those of one prompt to one
    server as far as that goes, whose prefix cache holds the prompt. The turns of a conversation
    stay on one server, until that refuses one. A server that is lost gets no requests, and those
    that it had go to the others, until it takes new weights again; one that the run has started is
    revived meanwhile.
    """

    overlaps, stored = True, False
    separate = True

    def __init__(self, servers: Sequence[VLLMServer]) -> None:
        first = servers[0]
        self.servers = servers
        self.config = first.config
        self.tokenizer = first.tokenizer
        self.vocab = first.vocab
        self.context = min(server.context for server in servers)
        self._ready: list[VLLMServer] = []  # with the weights that were published last
        self._version: int | None = None
        self._under_way: Counter[VLLMServer] = Counter()  # completions
        self._home: dict[_Completion, VLLMServer] = {}
        self._undealt: set[_Completion] = set()

    async def sample(self, request: Request) -> list[Sample]:
        if len(request.indices) == 1:
            return await self._complete(request)
        parts = [replace(request, indices=[index]) for index in request.indices]
        samples = await gather_or_cancel(map(self._complete, parts))
        return [sample for (sample,) in samples]

    async def _complete(self, request: Request) -> list[Sample]:
        (index,) = request.indices
        completion = (request.key, request.task, index)
        while True:
            server = await self._server_of(completion)
            self._under_way[server] += 1
            try:
                return await server.sample(request)
            except SourceBusy:
                others = [other for other in self._ready if other is not server]
                if others:  # the next attempt is theirs
                    self._home[completion] = min(others, key=self._under_way.__getitem__)
                raise
            except SourceLost as error:
                self._drop({server: error})
            finally:
                self._under_way[server] -= 1

    async def _server_of(self, completion: _Completion) -> VLLMServer:
        """The server that this completion was dealt to, unless that was lost; or else a new one."""
        while True:
            server = self._home.get(completion)
            if server is not None and server in (self._ready or self.servers):
                return server
            self._undealt.add(completion)
            await asyncio.sleep(0)  # for the others that are asked for at the same time
            if completion in self._undealt:
                self._deal()

    def _deal(self) -> None:
        """Give each completion a server, so that all will have as many under way, or one more."""
        servers = self._ready or self.servers
        under_way = Counter({server: self._under_way[server] for server in servers})
        share = math.ceil((under_way.total() + len(self._undealt)) / len(servers))
        server = servers[0]
        last_prompt = None
        for completion in sorted(self._undealt):
            prompt = completion[:2]  # key and task: its prefix is in the cache of one server
            if prompt != last_prompt or under_way[server] >= share:
                server = min(servers, key=under_way.__getitem__)
                last_prompt = prompt
            self._home[completion] = server
            under_way[server] += 1
        self._undealt.clear()

    async def publish(self, weights: NamedWeights, version: int) -> None:
        up = await self._up() or self.servers
        for server in self.servers:
            if server not in up:
                server.revive_beside()
        failed = await send_weights(up, up[0].check_weights(weights), version)
        self._ready = list(up)
        self._drop(failed)
        self._version = version
        self._home.clear()  # the caches of prompts are empty

    async def version(self) -> int | None:
        """Version of the live servers; if none is up, wait for the first that comes back."""
        up = await self._up()
        asked = {asyncio.create_task(server.version()): server for server in up or self.servers}
        try:
            done, late = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            if up and late:  # one that dies just now may be long in coming back
                answered, _ = await asyncio.wait(late, timeout=_STRAGGLER)
                done |= answered
        finally:
            for task in asked:
                task.cancel()
        failed: dict[VLLMServer, BaseException] = {}
        current: list[VLLMServer] = []  # with the weights that were published last
        for task in done:
            error = task.exception()
            if error is not None:
                failed[asked[task]] = error
            elif task.result() == self._version:
                current.append(asked[task])
        self._ready = [asked[task] for task in done]
        self._drop(failed)
        self._ready = current
        return self._version if self._ready else None

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _up(self) -> list[VLLMServer]:
        alive = await asyncio.gather(*(server._client.alive() for server in self.servers))
        return [server for server, answered in zip(self.servers, alive, strict=True) if answered]

    def _drop(self, failed: Mapping[VLLMServer, BaseException]) -> None:
        """Go on without these; raise what is not worth a retry, or if there are no others."""
        left = [server for server in self._ready if server not in failed]
        for server, error in failed.items():
            if not isinstance(error, SourceLost) or not left:
                self._ready = left
                raise error
            if server in self._ready:
                log.warning(
                    "%s; %d of %d servers continue without it", error, len(left), len(self.servers)
                )
        self._ready = left


def _read(auto: Any, model: str, what: str) -> Any:
    try:
        return auto.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"vllm: the {what} of the server's model, {model}, can't be read here ({error}); pass {what}=, that of "
            "the trained model"
        ) from error
