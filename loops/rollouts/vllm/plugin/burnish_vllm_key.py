"""Inside vLLM: every route of a server that a run started needs the run's key.

vLLM's own check of a key (0.32) covers paths that begin with /v1, /v2, /inference or /cohere. It
leaves open what training needs and others must not reach: /update_weights and all other routes of
weights, /collective_rpc, which calls methods in the workers, /pause, /sleep and /server_info.

`RequireKey` is named to vLLM by ``--middleware burnish_vllm_key.RequireKey``; the key is in the
server's environment.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

# The interface between a web server and an application (ASGI): a scope describes one connection, and
# messages, mappings with a "type", go both ways.
_Scope = dict[str, Any]
_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

VARIABLE = "VLLM_API_KEY"
MIDDLEWARE = f"{__name__.rpartition('.')[2]}.RequireKey"


class RequireKey:
    """ASGI middleware that answers 401 to each request without ``Authorization: Bearer KEY``.

    Raises:
        ValueError: if the environment has no key: the server would be open.
    """

    def __init__(self, app: _App) -> None:
        key = os.environ.get(VARIABLE)
        if not key:
            raise ValueError(
                f"{VARIABLE}: the server is to be guarded by a key, and there is none in its environment"
            )
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        # "lifespan" is the server's own start and end. The comparison takes as long for a key that
        # is wrong in its first character as for one that is wrong in its last.
        if scope["type"] == "lifespan" or hmac.compare_digest(_authorization(scope), self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)


def _authorization(scope: _Scope) -> bytes:
    for name, value in scope["headers"]:
        if name.lower() == b"authorization":
            return bytes(value)
    return b""


async def _refuse(send: _Send) -> None:
    message = "this server belongs to a training run, whose key was not sent with the request"
    body = json.dumps({"error": {"message": message, "type": "Unauthorized", "code": 401}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
