"""The HTTP interface of one vLLM server.

Connections are kept while calls are under way, and closed with the last of them: so nothing remains
in an event loop that ends.
"""

import asyncio
import base64
import gc
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import aiohttp

from ..event_loops import Gate
from ..source import SourceError, SourceLost
from .answers import WORDS, shown

log = logging.getLogger(__name__)

_LOOK = 60.0  # seconds that a request without a body, which changes nothing, may take

# Bytes of an answer that are read. JSON takes up to 30 times as much memory once it is parsed.
_LARGEST = 8 << 20  # of one that is no completion: vLLM's largest, its OpenAPI document, has 0.3 MB
_LARGEST_COMPLETION = 256 << 20
_PER_TOKEN = 1024  # vLLM writes about 80 for a token and its log-prob
CONCURRENCY = 64
"""Completions at once, where the server does not say what it has room for."""
_KEPT = 2.0  # seconds that a connection may be idle; vLLM closes one after 5


class Rejected(SourceError):
    """A healthy server refuses a request.

    A server error, an overload, or an adapter lost in a restart may pass.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        # it has its weights, and may complete the request later
        self.busy = status >= 500 or status in (408, 429)
        self.may_pass = self.busy or status == 404


@dataclass
class _Connections:
    """The connections of one event loop."""

    session: aiohttp.ClientSession
    under_way: int = 0  # calls that use them


class VLLMClient:
    """Calls to a server; every method may raise what `get` raises.

    Weights go to it by the methods of a `VLLMEngine`.

    A call takes no longer than its time in all, however slowly the answer drips, and no more of the
    answer is read than it may have.

    Args:
        url: ``http://host:port``, which may hold a login: ``http://user:password@host:port``.
        concurrency: completions under way at once; further ones wait, while control calls never do.
            None: as many as the server has room for, once `hold` was called, else `CONCURRENCY`.
        timeout: seconds that a completion may take.
        patience: seconds that any other request with a body may take.
        key: sent with every request, as ``Authorization: Bearer KEY``.
        key_setting: the setting that the key is from, for messages.

    Attributes:
        url: without the login, so that messages can show it.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int | None,
        timeout: float,
        patience: float,
        key: str | None = None,
        key_setting: str = "vllm.api_key",
    ) -> None:
        address = urlsplit(url.rstrip("/"))
        login, _, place = address.netloc.rpartition("@")
        self.url = address._replace(netloc=place).geturl()
        if address.scheme not in ("http", "https") or not address.hostname:
            without_login = url.rpartition("@")[2]
            raise ValueError(
                f"vllm: the server's address must look like http://127.0.0.1:8000, got {without_login!r}"
            )
        # A line break in a key would begin a further header.
        if key is not None and not _fits_header(key):
            raise ValueError(
                f"{key_setting}: wanted visible ASCII characters, as a header can hold them"
            )
        # a compressed answer may be a thousand times as large
        self._headers = {"Accept-Encoding": "identity"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        if login:
            encoded = base64.b64encode(unquote(login).encode()).decode()
            self._headers["Authorization"] = f"Basic {encoded}"
        self._key_setting = key_setting
        self._timeout = timeout
        self._patience = patience
        self._concurrency = concurrency
        # A completion takes one place. Once `hold` was called, a place is a token, and a completion
        # takes the least, or as many as it is expected to have.
        self._places = concurrency or CONCURRENCY
        self._least = 0
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, Gate] = WeakKeyDictionary()
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = (
            WeakKeyDictionary()
        )

    @property
    def own_address(self) -> str:
        """The address of this machine from which the server is reached."""
        address = urlsplit(self.url)
        place = (address.hostname or "", address.port or 80)
        family, _, _, _, resolved = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(resolved)  # which sends nothing
            return str(route.getsockname()[0])

    async def get(self, path: str, name: str = "", kind: type = object) -> Any:
        """The JSON of the response, or its entry of this name and type.

        Raises:
            SourceLost: if there is no server, it dies meanwhile, or it takes too long (from
                `TimeoutError`).
            Rejected: if it refuses.
            SourceError: if there is no such entry; shows what there is.
        """
        return await self._call(path, None, min(self._timeout, _LOOK), name, kind)

    async def config(self) -> Any:
        """Its configuration; the server runs pip and other programs to go with it, which a busy
        machine is slow at.
        """
        return await self._call(
            "/server_info?config_format=json", None, self._patience, "vllm_config", dict
        )

    async def models(self) -> list[tuple[str, str]]:
        """The name of each model that it serves, and where the model is from.

        The first is the one it was started with.

        Raises:
            SourceError: if its answer is no list of models.
        """
        models = await self.get("/v1/models", "data", list)
        try:
            found = [(model["id"], model["root"]) for model in models]
        except (LookupError, TypeError):
            found = []
        names_and_roots = [text for model in found for text in model]
        if not found or not all(isinstance(text, str) for text in names_and_roots):
            raise SourceError(
                f"vllm: {self.url}/v1/models: wanted models with id and root, got {shown(models)}"
            )
        return found

    async def post(self, path: str, body: object, name: str = "", kind: type = object) -> Any:
        return await self._call(path, body, self._patience, name, kind)

    def hold(self, tokens: int, completions: int) -> None:
        """Have as much under way as the server has room for, if no number was given.

        Args:
            tokens: whose keys and values it holds.
            completions: that it works on at once.
        """
        if self._concurrency is None and tokens != self._places:
            self._places = tokens
            self._least = max(1, tokens // completions)  # which the shortest takes, too
            self._gates.clear()

    async def generate(self, body: Any, priority: int = 0, tokens: int = 0) -> Any:
        """The answer for a completion which, with its prompt, is expected to have so many tokens."""
        largest = min(
            _LARGEST + _PER_TOKEN * body["sampling_params"]["max_tokens"], _LARGEST_COMPLETION
        )
        gate = self._gates.setdefault(asyncio.get_running_loop(), Gate(self._places))
        size = max(self._least, tokens) if self._least > 0 else 1
        # those that wait keep the connections open; waiting takes none of their time
        async with self._session(), gate.passed(priority, size):
            return await self._call("/inference/v1/generate", body, self._timeout, largest=largest)

    async def prompt_logprobs(self, model: str, tokens: Sequence[int], count: int) -> Any:
        """The answer to a prompt: the log-prob of each of its tokens, and of as many others that
        are the likeliest in its place.
        """
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "prompt_logprobs": count,
        }
        largest = min(_LARGEST + _PER_TOKEN * len(tokens) * (count + 1), _LARGEST_COMPLETION)
        gate = self._gates.setdefault(asyncio.get_running_loop(), Gate(self._places))
        async with self._session(), gate.passed():
            return await self._call("/v1/completions", body, self._timeout, largest=largest)

    async def try_token(self, token: int) -> None:
        """Request one token after this one, without waiting for completions under way."""
        body = {"token_ids": [token], "sampling_params": {"max_tokens": 1}}
        await self._call("/inference/v1/generate", body, self._timeout)

    async def weight_version(self) -> str:
        return str(await self.get("/weight_info", "weight_version", str))

    async def pause(self) -> None:
        await self.post("/pause?mode=keep&clear_cache=true", {})

    async def resume(self) -> None:
        await self.post("/resume", {})

    async def control(self, operation: str, **arguments: object) -> None:
        """An operation of weight updates by vLLM's name, such as ``update_weights``."""
        await self.post(f"/{operation}", arguments)

    async def alive(self, seconds: float = 5.0) -> bool:
        try:
            await self._call("/health", None, seconds)
        except SourceError:
            return False
        return True

    async def wait(self, seconds: float) -> None:
        """Wait until the server is healthy.

        Raises:
            SourceError: if it is not healthy by then, or at once if it wants another key.
        """
        until = time.monotonic() + seconds
        left = seconds
        warned = False
        while left > 0:
            try:
                await self._call("/health", None, min(5.0, left))
                return
            except SourceError as error:
                if isinstance(error, Rejected) and error.status == 401:
                    raise
            if not warned:
                log.warning(
                    "vllm: no healthy server at %s; waiting for one, up to %g s", self.url, seconds
                )
                warned = True
            await asyncio.sleep(0.2)
            left = until - time.monotonic()
        raise SourceError(
            f"vllm: no healthy server at {self.url} for {seconds:g} s; start it, or read its log"
        )

    async def _call(
        self,
        path: str,
        body: object,
        timeout: float,
        name: str = "",
        kind: type = object,
        *,
        largest: int = _LARGEST,
    ) -> Any:
        who = f"vllm: {self.url}{path.partition('?')[0]}"
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(timeout),
                self._session() as session,
                session.request(
                    method,
                    self.url + path,
                    data=None if body is None else _encoded(body),
                    headers={} if body is None else {"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                content = await _read(response, largest, who)
        except TimeoutError as error:
            raise SourceLost(f"{who}: no answer in {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SourceLost(f"{who}: the server can't be reached, or died ({error!r})") from error
        try:
            with _without_collection():
                reply = json.loads(content)
        except (ValueError, RecursionError):  # no JSON, or brackets within brackets
            reply = content.decode(errors="replace")
        if 300 <= response.status < 400:
            place = response.headers.get("location", "another address")[:200]
            raise SourceError(f"{who}: it redirects to {place}; give the address of vLLM itself")
        if not response.ok:
            raise await self._refusal(who, path, response.status, reply)
        return _entry(who, reply, name, kind) if name else reply

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """The connections of this event loop, within a call."""
        loop = asyncio.get_running_loop()
        connections = self._connections.get(loop)
        if connections is None:
            session = aiohttp.ClientSession(
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(),  # none: each call has one, in all
            )
            connections = self._connections[loop] = _Connections(session)
        connections.under_way += 1
        try:
            yield connections.session
        finally:
            connections.under_way -= 1
            if connections.under_way == 0:
                del self._connections[loop]
                await connections.session.close()

    async def _refusal(self, who: str, path: str, status: int, reply: Any) -> SourceError:
        """The error that a refused request is: the server may be dying, and it may want a key."""
        try:
            message = shown(reply["error"]["message"])
        except (KeyError, TypeError):
            message = shown(reply)
        # A server whose engine has died reports so before it exits, while its health check still
        # passes.
        dying = "EngineCore" in message or "EngineDead" in message
        if dying or (status >= 500 and path != "/health" and not await self.alive()):
            return SourceLost(f"{who}: the server is dying ({status}): {message}")
        if status == 401:
            message += f"; set {self._key_setting} to the key that the server was started with"
        return Rejected(f"{who} answered {status}: {message}", status)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python does not look for garbage meanwhile.

    It would several times for each completion, whose tokens are a dict each, and pass over all
    objects of the process: more than half of the time that reading a token took.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _encoded(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _fits_header(text: str) -> bool:
    return text.isascii() and text.isprintable() and text.strip() == text != ""


async def _read(response: aiohttp.ClientResponse, largest: int, who: str) -> bytes:
    """The body as it was sent.

    Raises:
        SourceError: if it is compressed, or larger than so many bytes, of which no more are read.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise SourceError(
            f"{who}: its answer is compressed ({encoding[:40]}), which was not asked for; is it vLLM?"
        )
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > largest:
            raise SourceError(f"{who}: its answer has more than {largest >> 20} MiB; is it vLLM?")
    return bytes(content)


def _entry(who: str, reply: object, name: str, kind: type) -> Any:
    """The entry of an answer of this name.

    Raises:
        SourceError: if there is none, or it is of another type.
    """
    if not isinstance(reply, dict) or name not in reply:
        raise SourceError(f"{who}: its answer has no {name!r}; is it vLLM? It says {shown(reply)}")
    if kind is not object and type(reply[name]) is not kind:
        raise SourceError(
            f"{who}: its {name!r} is wanted as {WORDS[kind]}; is it vLLM? It says {shown(reply)}"
        )
    return reply[name]
