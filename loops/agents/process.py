"""An agent as a program: any language, and packages that the trainer's environment has not.

standard input        the row of the data, as JSON
OPENAI_BASE_URL       where it asks the policy
OPENAI_API_KEY        the key of its conversation
standard output       its last line is the reward: a number, or null for none
"""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..rollouts.sample import Row
from ..versions import variables_of_no_rank

_SHOWN = 2000  # characters of what it printed, in an error


class AgentProcess:
    """Runs a command for each conversation, as `AgentSource` runs an agent.

    The process and all that it has started are killed when the command ends, or when the
    conversation does.

    Args:
        command: program and arguments.
        environment: further variables; it has those of this process, too, but for those of ranks.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(
                f"agent process: command must be a list, such as [python, agent.py], got {command!r}"
            )
        self.command = list(command)
        self.environment = dict(environment or {})

    async def __call__(self, row: Row, url: str, key: str) -> float | None:
        """The reward.

        Raises:
            RuntimeError: if it fails, or its last line is no number; with the end of what it has
                printed.
        """
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._variables(url, key),
            start_new_session=True,
        )
        try:
            given = json.dumps(dict(row), default=str).encode()
            printed, errors = await process.communicate(given)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            await process.wait()
        if process.returncode:
            end = errors.decode(errors="replace")[-_SHOWN:].strip()
            raise RuntimeError(f"{self.command[0]} ended with {process.returncode}: {end}")
        return self._reward(printed.decode(errors="replace"))

    def _variables(self, url: str, key: str) -> dict[str, str]:
        # a proxy is for the internet
        direct = ",".join(filter(None, [os.environ.get("NO_PROXY"), urlsplit(url).hostname]))
        own = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }
        return {**variables_of_no_rank(), **own, **self.environment}

    def _reward(self, printed: str) -> float | None:
        last = printed.strip().rpartition("\n")[2]
        try:
            reward: Any = json.loads(last)
        except ValueError:
            reward = last
        if reward is None or isinstance(reward, int | float):
            return reward
        raise RuntimeError(
            f"{self.command[0]}: the last line that it prints must be its reward, a number or null, got {last!r:.200}"
        )
