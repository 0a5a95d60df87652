"""The address at which agents ask the policy: OpenAI's Chat Completions, one session for each
conversation.

    POST {url}/chat/completions     a completion of the policy
    GET  {url}/models               one model, of any name

A session is named by its secret key, in the path of its URL and as ``Authorization: Bearer KEY``:
either will do, as some clients drop the one and some the other.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from ..rollouts.sample import SamplingParams
from .chat import Refused, as_events, completion_of, read_call
from .conversation import Conversation, Drawing
from .tree import AgentTurn

log = logging.getLogger(__name__)

_LARGEST = 64 << 20  # bytes of a request
_WAITING = 1024  # connections that the system holds until they are accepted
_RETRIES = "x-stainless-retry-count"  # OpenAI's clients say with it how often they have asked


class AgentServer:
    """Answers agents on this machine, while a conversation is open.

    Args:
        host: address of this machine to listen at; agents are told it, too. Another one than the
            machine's own opens it to the network, where the keys of sessions alone guard it.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self._sessions: dict[str, tuple[Conversation, Sequence[SamplingParams]]] = {}
        self._within = 0
        self._opening: asyncio.Task[web.AppRunner] | None = None

    @asynccontextmanager
    async def session(
        self, conversation: Conversation, *repeated: SamplingParams
    ) -> AsyncIterator[tuple[str, str]]:
        """Yields the URL and the key of a conversation, which are answered within the context.

        Args:
            repeated: parameters besides the conversation's own that a client may name.
        """
        key = secrets.token_hex(16)
        accepted = [conversation.request.sampling, *repeated]
        async with self.listening() as address:
            self._sessions[key] = conversation, accepted
            try:
                yield f"{address}/{key}/v1", key
            finally:
                del self._sessions[key]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields ``http://host:port``, where requests are answered as long as anybody is within."""
        self._within += 1
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        opening = self._opening
        try:
            runner = await asyncio.shield(opening)
            host, port = runner.addresses[0][:2]
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            self._within -= 1
            if not self._within:
                self._opening = None  # who comes meanwhile opens another
                runner = await opening
                await runner.cleanup()

    async def _open(self) -> web.AppRunner:
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # a handler is cancelled where its client hangs up
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        await web.TCPSite(runner, self.host, 0, backlog=_WAITING).start()
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._routed(request)
        except Refused as refused:
            return web.json_response(refused.as_json, status=refused.status)
        except (web.HTTPException, OSError):  # too large; or the client is gone
            raise
        except Exception:
            log.exception("agents: %s %s could not be answered", request.method, request.path)
            problem = Refused(500, "it could not be answered; see the log of the trainer")
            return web.json_response(problem.as_json, status=500)

    async def _routed(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"].strip("/")
        key, _, rest = path.partition("/")
        if key not in self._sessions:
            rest = path
            key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key not in self._sessions:
            raise Refused(401, "no conversation has this key, or it is over")
        route = f"{request.method} {rest.removeprefix('v1/')}"
        if route == "POST chat/completions":
            return await self._complete(request, *self._sessions[key])
        if route == "GET models":
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "burnish"}
            return web.json_response({"object": "list", "data": [model]})
        raise Refused(404, f"no {route}; the policy answers POST chat/completions alone")

    async def _complete(
        self,
        request: web.Request,
        conversation: Conversation,
        accepted: Sequence[SamplingParams],
    ) -> web.StreamResponse:
        body = await request.read()
        call = read_call(body, *accepted)
        again = request.headers.get(_RETRIES, "0") != "0"
        drawing = conversation.drawing(call, body, again=again)
        turns = await _drawn(drawing)
        replies: list[tuple[dict[str, Any], str]] = [
            (turn.reply, str(turn.drawn.finish)) for turn in turns
        ]
        if not turns:  # at a limit
            replies = [({"role": "assistant", "content": ""}, "length")] * call.count
        answer = completion_of(call, secrets.token_hex(12), replies, _usage(turns))
        response = web.json_response(answer)
        if call.streams:
            events = as_events(answer, call.usage)
            response = web.Response(body=events, content_type="text/event-stream")
        await response.prepare(request)
        await response.write_eof()
        # the client was told: had it hung up, this handler would have been cancelled
        drawing.received = True
        for turn in turns:
            turn.received = True
        return response


async def _drawn(drawing: Drawing) -> list[AgentTurn]:
    """The turns of a call, which are drawn to the end even if the client hangs up.

    Raises:
        Refused: if the call is refused, the conversation has ended, or the source is lost.
    """
    drawing.waiting += 1
    try:
        return await asyncio.shield(drawing.task)
    except asyncio.CancelledError:
        if drawing.task.cancelled():
            raise Refused(401, "the conversation is over") from None
        raise
    except Refused:
        raise
    except Exception as error:
        raise Refused(503, f"the sampler is lost: {error}") from error
    finally:
        drawing.waiting -= 1


def _usage(turns: Sequence[AgentTurn]) -> dict[str, int]:
    prompt = len(turns[0].drawn.prompt) if turns else 0
    drawn = sum(len(turn.drawn.tokens) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
