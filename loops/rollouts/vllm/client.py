"""JSON over HTTP to one server: a connection for each call, in threads.

A connection costs nothing beside an answer that takes seconds, and so none is shared: nothing is tied to an event loop,
and nothing is left over from a server that died.
"""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from ..source import SourceError, SourceLost

log = logging.getLogger(__name__)

_LOOK = 60.0  # seconds that an order without a body may take, which changes nothing
_ORDERS = 4  # calls beside those for answers, such as to pause; they never wait for one


class Rejected(SourceError):
    """The server is well and does not do what it is told."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Retryable(Rejected, SourceLost):
    """It may do so later: it failed, is busy, or does not know an adapter that it has lost in a restart."""


class SourceLate(SourceLost):
    """It did not answer in time."""


class Http:
    """What can be asked of a server by path.

    Args:
        url: ``http://host:port``.
        concurrency: calls of `ask` under way at once; further ones wait.
        timeout: seconds that one call may take.
        patience: seconds that an order with a body may take; ``timeout`` unless it is given.
    """

    def __init__(self, url: str, *, concurrency: int, timeout: float, patience: float | None = None) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"vllm: the server's address must look like http://127.0.0.1:8000, got {url!r}")
        self._address = parts
        self._timeout, self._patience = timeout, patience or timeout
        self._asking = ThreadPoolExecutor(concurrency, "vllm-answer")
        self._ordering = ThreadPoolExecutor(_ORDERS, "vllm-order")
        self._calls: set[_Call] = set()
        self._closed = False

    async def ask(self, path: str, body: Any = None) -> Any:
        """What `call` returns; one of at most ``concurrency``. Cancelling it tells the server, too."""
        return await self._within(self._asking, path, body, self._timeout)

    async def order(self, path: str, body: Any = None) -> Any:
        """What `call` returns, without waiting for any answer to be ready."""
        timeout = min(self._timeout, _LOOK) if body is None else self._patience
        return await self._within(self._ordering, path, body, timeout)

    def call(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """The JSON that the server answers to a GET, or with a ``body`` to a POST; text if it is no JSON.

        Raises:
            SourceLost: if there is no server, or it dies meanwhile.
            Rejected: if it answers that it won't.
        """
        return self._do(_Call(self._connection(timeout or self._timeout)), path, body)

    def alive(self) -> bool:
        try:
            self.call("/health", timeout=5)
        except SourceError:
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Until the server is up.

        Raises:
            SourceError: if it is not by then.
        """
        until, told = time.monotonic() + seconds, False
        while not self.alive():
            self._check_open()
            if not told:
                log.warning("vllm: no healthy server at %s; waiting for one, up to %g s", self.url, seconds)
                told = True
            if time.monotonic() > until:
                raise SourceError(f"vllm: no healthy server at {self.url} for {seconds:g} s; start it, or read its log")
            time.sleep(0.2)

    def close(self) -> None:
        """Hang up wherever something is under way."""
        self._closed = True
        for call in list(self._calls):
            call.hang_up()
        for pool in (self._asking, self._ordering):
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self._closed:
            raise SourceError("vllm: the source is closed; make a new one")

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        return kind(self._address.hostname or "", self._address.port, timeout=timeout)

    async def _within(self, pool: ThreadPoolExecutor, path: str, body: Any, timeout: float) -> Any:
        self._check_open()
        call = _Call(self._connection(timeout))
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, self._do, call, path, body)
        except asyncio.CancelledError:
            self._check_open()
            call.hang_up()
            raise

    def _do(self, call: "_Call", path: str, body: Any) -> Any:
        self._check_open()
        where = f"vllm: {self.url}{path.partition('?')[0]}"
        self._calls.add(call)
        try:
            status, text = call.run(self._address.path + path, body)
        except (OSError, http.client.HTTPException) as error:
            self._check_open()
            if isinstance(error, TimeoutError):
                raise SourceLate(f"{where}: no answer in {call.connection.timeout:g} s") from error
            raise SourceLost(f"{where}: the server can't be reached, or died ({error!r})") from error
        finally:
            self._calls.discard(call)
        if status >= 400:
            self._refused(where, path, status, text)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _refused(self, where: str, path: str, status: int, text: str) -> None:
        try:
            said = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = text[:500]
        # A server whose engine has died says so before it goes, while its health still looks fine.
        dying = status == 503 or "EngineCore" in said or "EngineDead" in said
        if dying or (status >= 500 and path != "/health" and not self.alive()):
            raise SourceLost(f"{where}: the server is dying ({status}): {said}")
        kind = Retryable if status >= 500 or status in (404, 408, 429) else Rejected
        raise kind(f"{where} answered {status}: {said}", status)


class _Call:
    """One request, which another thread may hang up on."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self._over = False

    def run(self, path: str, body: Any) -> tuple[int, str]:
        try:
            self.connection.connect()
            if self._over:
                raise ConnectionAbortedError("hung up")
            sent = None if body is None else json.dumps(body)
            self.connection.request("GET" if sent is None else "POST", path, sent, {"Content-Type": "application/json"})
            response = self.connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            self.connection.close()

    def hang_up(self) -> None:
        self._over = True
        sock = self.connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
