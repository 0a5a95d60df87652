"""Answers from a vLLM server, over HTTP.

The server runs in an environment of its own and is started by `launch`, or by hand with the same flags. Whatever could
make its log-probs others than the trainer's is looked at when the source is made, and again after every restart.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, TypeVar

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..checks import check_request
from ..sample import Request, Sample
from ..source import SourceError, SourceLost
from .answer import FINISH, VERSIONS, made, parameters
from .client import Http, SourceLate
from .preflight import Expected, check_model, check_server
from .weights import Updates

log = logging.getLogger(__name__)
T = TypeVar("T")

_SLACK = 30.0  # seconds; who waits for a server that starts says better what is wrong


class VLLMServer:
    """A source that is a server, which may die and come back.

    Args:
        url: ``http://host:port``.
        config: of the model that is trained.
        tokenizer: of the model that is trained.
        updates: how weights get there, see `burnish.loops.rollouts.vllm.weights`.
        dtype: that the server is to compute in; the trainer's, or else log-probs differ.
        concurrency: answers under way at once. More of them wait here.
        timeout: seconds that one completion may take; it is asked for again then.
        patience: seconds in which the server must start, or give something of all that it is asked for: a completion,
            or to take new weights. When they are over there is no use in asking again.
        revive: called when the server is gone, such as ``Launched.revive``.
        end: called when the source is closed, such as ``Launched.close``.
        versions: of vLLM, to be tried at your own risk.

    Raises:
        SourceError: at once, if there is no such server, or it is not what is needed; says what to change.
    """

    overlaps, stored = True, False

    def __init__(
        self,
        url: str,
        *,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        updates: Updates,
        dtype: Literal["float32", "bfloat16", "float16"],
        concurrency: int = 64,
        timeout: float = 600.0,
        patience: float = 1200.0,
        revive: Callable[[], None] | None = None,
        end: Callable[[], None] = lambda: None,
        versions: tuple[str, ...] = VERSIONS,
    ) -> None:
        self.config: Any = config.get_text_config()
        self.tokenizer = tokenizer
        self.updates = updates
        self.dtype = dtype
        self.context = 0
        self.vocab = max(self.config.vocab_size, len(tokenizer))
        self._patience, self._revive, self._end, self._versions = patience, revive, end, versions
        self._expected, self._meeting = Expected(config), threading.Lock()
        self._awaited, self._heard, self._late = 0, 0.0, False
        self._http = Http(url, concurrency=concurrency, timeout=min(timeout, patience), patience=patience)
        try:
            self._meet()
        except BaseException:
            self._hang_up()
            raise

    async def sample(self, request: Request) -> list[Sample]:
        check_request(request, vocab=self.vocab, context=self.context)
        answers = [asyncio.ensure_future(self._answer(request, index)) for index in request.indices]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        given = self._expected.all_of(weights) if self.updates.merged else weights
        await self._within_patience(self.updates.publish(self._http, given, version))
        self._note_heard()

    async def version(self) -> int | None:
        """Waits for a server that is down, or revives it. None after a restart, and then the server is checked anew."""
        return await self._within_patience(self._known_version(), _SLACK)

    async def close(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        self._http.close()
        self._end()

    async def _known_version(self) -> int | None:
        try:
            version = await self.updates.version(self._http)
        except SourceLost as error:
            log.warning("%s", error)
            version = None
        if version is None:
            await asyncio.to_thread(self._meet)
            self._note_heard()  # it has answered a request for one token
        return version

    async def _within_patience(self, work: Coroutine[Any, Any, T], slack: float = 0.0) -> T:
        """What it gives. Attempts that come too late, one after the other, share one patience.

        Raises:
            SourceError: if the server has been asked, and has given nothing, for longer than that.
        """
        if not (self._awaited or self._late):
            self._note_heard()
        task = asyncio.ensure_future(work)
        self._awaited += 1
        try:
            while not task.done():
                left = self._heard + self._patience + slack - time.monotonic()
                if left <= 0:
                    self._late = False
                    raise SourceError(
                        f"vllm: the server at {self._http.url} has given nothing of what it was asked for in "
                        f"{self._patience:g} s; see to it and go on with --resume true, or raise vllm.patience if that "
                        "is how long it takes"
                    )
                await asyncio.wait({task}, timeout=left)
            return task.result()
        except SourceLate:
            self._late = True
            raise
        except SourceLost:
            self._note_heard()  # of its end: from now on it is waited for
            raise
        finally:
            task.cancel()
            self._awaited -= 1

    def _note_heard(self) -> None:
        self._heard, self._late = time.monotonic(), False

    def _meet(self) -> None:
        with self._meeting:
            if self._revive is not None and not self._http.alive():
                self._revive()
            self._http.wait(self._patience)
            self.context = check_server(self._http, self.updates.settings, self.dtype, self._versions)
            check_model(self._http, self.config, self.tokenizer, self.vocab)

    async def _answer(self, request: Request, index: int) -> Sample:
        how = parameters(request.sampling, request.seed(index))
        with self.updates.model() as model:
            asked = {"model": model, "token_ids": list(request.prompt), "sampling_params": how}
            answer = await self._within_patience(self._http.ask("/inference/v1/generate", asked))
            self._note_heard()
            try:
                choice = answer["choices"][0]
                content = choice["logprobs"]["content"]
                labels = choice["weight_versions"] or []
                tokens, logprobs = choice["token_ids"], [float(entry["logprob"]) for entry in content]
                drawn = [entry["token_id"] for entry in content]
                finish = FINISH[choice["finish_reason"]]
            except (LookupError, TypeError, ValueError) as error:
                raise SourceError(f"vllm: its answer is not understood ({error!r}); is {self._http.url} vLLM "
                                  f"{' or '.join(self._versions)}? It says {str(answer)[:200]}") from error  # fmt: skip
            spans = self.updates.spans(labels, model)
        return made(request, index, tokens, drawn, logprobs, finish, spans, self.tokenizer)
