"""Completions from vLLM inside this process, on the trainer's own GPU: no server, and no network
between them.
"""

import asyncio
import functools
import os
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ....data.images import ImageReader, decoded
from ..sample import Request, Sample
from ..source import NamedWeights, SourceError, refuse_closed
from .client import Rejected
from .launch import SHARE
from .plugin import burnish_vllm_files as plugin
from .preflight import check_version, parameter_check
from .server import (
    VERSIONS,
    check_prompt,
    end_at_images,
    sample_each,
    sampling_params,
    to_sample,
)
from .weights import Files, send_weights

# operations that take their arguments as one request
_REQUESTS = ("init_weight_transfer_engine", "update_weights")


def start_engine(
    model: str | Path, *, dtype: Literal["float32", "bfloat16", "float16"], **options: object
) -> Any:
    """``vllm.LLM`` with the settings that training needs.

    Args:
        model: directory or name; its weights are replaced by the first that are published.
        dtype: the precision that it computes in; the trainer's, or else log-probs differ.
        options: further arguments of ``vllm.LLM``, such as ``max_model_len``,
            ``gpu_memory_utilization`` (`SHARE`), or ``enable_sleep_mode``, where vLLM's build can
            (on GPUs).

    Raises:
        SourceError: if vLLM is not installed, or is of another version than those that are known to
            work.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are taken here
    try:
        import vllm
        from vllm.config import WeightTransferConfig
    except ImportError as error:
        raise SourceError(
            "vllm: it is not installed in this environment; pip install 'burnish[vllm]', or use a server in another "
            "one with VLLMServer"
        ) from error
    remedy = "here, or set source to vllm and --vllm.python to the interpreter of an environment that has it"
    check_version("the one that is installed", vllm.__version__, VERSIONS, remedy)
    plugin.register()
    return vllm.LLM(
        str(model),
        dtype=dtype,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=plugin.BACKEND),
        async_scheduling=False,  # otherwise a step could be running while weights change
        **{"gpu_memory_utilization": SHARE, **options},
    )


class VLLMEngine:
    """vLLM's engine, which this process takes a step of at a time.

    Weights change between two steps.

    Args:
        llm: from `start_engine`; with ``enable_sleep_mode`` it frees its memory while there is
            nothing to complete.
        config, tokenizer: of the trained model.
        images: reads the images of prompts, as the trainer's policy does; None for text alone.
        directory: for weights in transit, see `Files`.
    """

    overlaps = stored = False  # trainer and engine share one device
    separate = True

    def __init__(
        self,
        llm: Any,
        *,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageReader | None = None,
        directory: str | Path | None = None,
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm = llm
        self._engine = llm.llm_engine
        # A completion comes once, when it is whole.
        self._params = functools.partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY)
        self.updates = Files(directory)
        self._check_weights = parameter_check(config)
        self.tokenizer = tokenizer
        self.images = images
        self.vocab = max(config.get_text_config().vocab_size, len(tokenizer))
        self.context: int = llm.model_config.max_model_len
        self._asleep = self._closed = False
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._driver: asyncio.Task[None] | None = None

    async def sample(self, request: Request) -> list[Sample]:
        request = end_at_images(request, self.images)
        return await sample_each(self._complete, request, vocab=self.vocab, context=self.context)

    def _prompt_of(self, request: Request) -> dict[str, Any]:
        """The prompt as vLLM takes it: its tokens; with images, a placeholder for each of them, and
        their pictures.
        """
        if self.images is None or not request.images:
            return {"prompt_token_ids": list(request.prompt)}
        short = self.images.with_placeholders(request.prompt, request.images)
        pictures = [decoded(image) for image in request.images]
        return {"prompt_token_ids": short, "multi_modal_data": {"image": pictures}}

    async def publish(self, weights: NamedWeights, version: int) -> None:
        refuse_closed(self._closed, "vllm")
        await send_weights([self], self._check_weights(weights), version)

    async def update(
        self, step: Callable[..., Coroutine[Any, Any, None]], *arguments: object
    ) -> None:
        await step(self, *arguments)

    async def version(self) -> int | None:
        refuse_closed(self._closed, "vllm")
        return await self.updates.version(self)

    async def close(self) -> None:
        """Cancel pending requests. The engine stays, and may be used by another source."""
        self._closed = True
        self._fail(SourceError("vllm: the source was closed while completions were under way"))
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)

    async def weight_version(self) -> str:
        return str(await self.control("get_weight_version"))

    async def pause(self) -> None:
        self._running.clear()
        self._engine.reset_prefix_cache(True)  # also of unfinished completions
        self._engine.reset_encoder_cache()  # what the old weights saw in images

    async def resume(self) -> None:
        self._running.set()

    async def control(self, operation: str, **arguments: object) -> Any:
        """An operation of weight updates by vLLM's name, such as ``update_weights``."""
        self._wake()
        function = getattr(self._llm, operation)
        try:
            return function(arguments) if operation in _REQUESTS else function(**arguments)
        except (RuntimeError, ValueError) as error:
            raise Rejected(f"vllm: {operation}: {error}", 500) from error

    async def _complete(self, request: Request, index: int) -> Sample:
        refuse_closed(self._closed, "vllm")
        name = uuid.uuid4().hex
        completion = self._waiting[name] = asyncio.get_running_loop().create_future()
        params = self._params(**sampling_params(request.sampling, request.seed(index)))
        output = None
        try:
            self._wake()
            self._engine.add_request(name, self._prompt_of(request), params)
            if self._driver is None or self._driver.done():
                self._driver = asyncio.create_task(self._drive())
            whole = await completion
            output = whole.outputs[0]
        finally:
            del self._waiting[name]
            if output is None:
                self._engine.abort_request([name])
        if request.images:
            check_prompt(request, whole.prompt_token_ids)
        drawn: list[tuple[int, float]] = []
        for top in output.logprobs:
            # vLLM lists the drawn token first, and with ``logprobs: 0`` alone: {id: Logprob}
            token, entry = next(iter(top.items()))
            drawn.append((token, float(entry.logprob)))
        labels = [(span.version, span.start, span.end) for span in output.weight_versions]
        spans = self.updates.spans(labels, None)
        return to_sample(
            request,
            index,
            list(output.token_ids),
            drawn,
            output.finish_reason,
            spans,
            self.tokenizer,
            self.vocab,
        )

    async def _drive(self) -> None:
        """Take steps while a completion is waited for.

        Other tasks of the event loop run in between.
        """
        try:
            while self._waiting:
                await self._running.wait()
                for output in self._engine.step():
                    completion = self._waiting.get(output.request_id)
                    if output.finished and completion is not None and not completion.done():
                        completion.set_result(output)
                await asyncio.sleep(0)
            may_sleep = self._llm.model_config.enable_sleep_mode
            if may_sleep and not self._engine.has_unfinished_requests():
                self._llm.sleep(level=1)  # weights go to host memory, the cache is dropped
                self._asleep = True
        except Exception as error:
            self._fail(error)

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _fail(self, error: Exception) -> None:
        for completion in self._waiting.values():
            if not completion.done():
                completion.set_exception(error)
