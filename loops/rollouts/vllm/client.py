"""The HTTP interface of one vLLM server.

No connection is kept: a new one is cheap next to a completion that takes seconds. So nothing is bound to an event loop,
and nothing remains of a server that died.
"""

import asyncio
import logging
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

import httpx2

from ..source import SourceError, SourceLost

log = logging.getLogger(__name__)

_LOOK = 60.0  # seconds that a request without a body, which changes nothing, may take


class Rejected(SourceError):
    """A healthy server refuses a request; a server error, an overload, or an adapter lost in a restart may pass."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.busy = status >= 500 or status in (408, 429)  # it has its weights, and may complete the request later
        self.may_pass = self.busy or status == 404


class VLLMClient:
    """Calls to a server; every method may raise what `get` raises. Weights go to it by the methods of a `VLLMEngine`.

    Args:
        url: ``http://host:port``.
        concurrency: completions under way at once; further ones wait. Control calls never wait for them.
        timeout: seconds that a completion may take.
        patience: seconds that any other request with a body may take.
    """

    def __init__(self, url: str, *, concurrency: int, timeout: float, patience: float) -> None:
        self.url = url.rstrip("/")
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"vllm: the server's address must look like http://127.0.0.1:8000, got {url!r}")
        secure = ssl.create_default_context() if address.scheme == "https" else False
        self._timeout, self._patience = timeout, patience
        self._completing, self._controlling = (
            httpx2.AsyncClient(
                limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=0),
                trust_env=False,  # a proxy of the environment is for the internet
                verify=secure,
            )
            for connections in (concurrency, None)
        )

    async def get(self, path: str, name: str = "") -> Any:
        """The JSON of the response, or its entry of this name.

        Raises:
            SourceLost: if there is no server, it dies meanwhile, or it takes too long (from `httpx2.TimeoutException`).
            Rejected: if it refuses.
            SourceError: if there is no such entry; shows what there is.
        """
        return await self._call(self._controlling, path, None, min(self._timeout, _LOOK), name)

    async def config(self) -> Any:
        """Its configuration; the server runs pip and other programs to go with it, which a busy machine is slow at."""
        return await self._call(
            self._controlling, "/server_info?config_format=json", None, self._patience, "vllm_config"
        )

    async def post(self, path: str, body: Any, name: str = "") -> Any:
        return await self._call(self._controlling, path, body, self._patience, name)

    async def generate(self, body: Any) -> Any:
        return await self._call(self._completing, "/inference/v1/generate", body, self._timeout)

    async def try_token(self, token: int) -> None:
        """Request one token after this one, without waiting for completions under way."""
        body = {"token_ids": [token], "sampling_params": {"max_tokens": 1}}
        await self._call(self._controlling, "/inference/v1/generate", body, self._timeout)

    async def weight_version(self) -> str:
        return str(await self.get("/weight_info", "weight_version"))

    async def pause(self) -> None:
        await self.post("/pause?mode=keep&clear_cache=true", {})

    async def resume(self) -> None:
        await self.post("/resume", {})

    async def control(self, operation: str, **arguments: Any) -> None:
        """An operation of weight updates by vLLM's name, such as ``update_weights``."""
        await self.post(f"/{operation}", arguments)

    async def alive(self) -> bool:
        try:
            await self._call(self._controlling, "/health", None, 5)
        except SourceError:
            return False
        return True

    async def wait(self, seconds: float) -> None:
        """Wait until the server is healthy.

        Raises:
            SourceError: if it is not healthy by then.
        """
        until = time.monotonic() + seconds
        if not (alive := await self.alive()):
            log.warning("vllm: no healthy server at %s; waiting for one, up to %g s", self.url, seconds)
        while not (alive or await self.alive()):
            if time.monotonic() > until:
                raise SourceError(f"vllm: no healthy server at {self.url} for {seconds:g} s; start it, or read its log")
            await asyncio.sleep(0.2)

    async def _call(self, client: httpx2.AsyncClient, path: str, body: Any, timeout: float, name: str = "") -> Any:
        who = f"vllm: {self.url}{path.partition('?')[0]}"
        method, limits = "GET" if body is None else "POST", httpx2.Timeout(timeout, pool=None)
        try:
            async with client.stream(method, self.url + path, json=body, timeout=limits) as response:
                self.own_address: str = response.extensions["network_stream"].get_extra_info("client_addr")[0]
                await response.aread()
        except httpx2.TimeoutException as error:
            raise SourceLost(f"{who}: no answer in {timeout:g} s") from error
        except httpx2.HTTPError as error:
            raise SourceLost(f"{who}: the server can't be reached, or died ({error!r})") from error
        try:
            reply = response.json()
        except ValueError:
            reply = response.text
        if not response.is_error:
            if name and not (isinstance(reply, dict) and name in reply):
                raise SourceError(f"{who}: its answer has no {name!r}; is it vLLM? It says {str(reply)[:200]}")
            return reply[name] if name else reply
        status = response.status_code
        try:
            message = str(reply["error"]["message"])
        except (KeyError, TypeError):
            message = response.text[:500]
        # A server whose engine has died reports so before it exits, while its health check still passes.
        dying = "EngineCore" in message or "EngineDead" in message
        if dying or (status >= 500 and path != "/health" and not await self.alive()):
            raise SourceLost(f"{who}: the server is dying ({status}): {message}")
        raise Rejected(f"{who} answered {status}: {message}", status)
