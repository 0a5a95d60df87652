"""Multi-turn environments: games, tools and verifiers that the policy converses with. One of your
own, in a file of the working directory, my_games.py:

    from burnish.loops.environments import Step

    class Doubling:
        def __init__(self, turns=3):
            self.left = turns

        def reset(self, row):
            self.wanted = row["number"]
            return [{"role": "user", "content": f"Double {self.wanted}."}]

        def step(self, completion):
            self.left, self.wanted = self.left - 1, 2 * self.wanted
            right = completion.text.strip() == str(self.wanted)
            return Step(f"And {self.wanted}?", done=not right or not self.left, reward=float(right))

and in the configuration: ``environment: {my_games:Doubling: {turns: 2}}``. Each conversation has an
environment of its own. ``reset(row)`` gives the prompt, the same for all conversations of a row or
one for each; ``step(completion)`` the reply to the policy's latest turn, whether the conversation is
over, and a reward, summed over the turns. Prompt and reply are text (a user's), messages or token
ids. ``reward()``, if there is one, says what the whole conversation is worth, and is asked once at
its end, also where turns or tokens run out. ``close()``, if there is one, is called exactly once,
however the conversation ends. All may be async.

An environment whose constructor or ``reset`` raises, or takes longer than ``limits.seconds``, is
made again, up to ``limits.attempts`` times in all; one whose ``step`` does so ends its
conversation, which is masked. A plain function that is too slow goes on in its thread, and the
environment is closed when it returns. If all fail in the first rollout, the run ends. See `Step`,
`Limits`, docs/rewards-and-environments.md.

multi_turn, chat_turns    one loop, tokens in, tokens out; the tokens between turns under a chat template
tools                     functions that the policy calls; a calculator
games                     one turn with a verifier (reasoning-gym); a game of several turns with known optimal play
resolve                   the name in a configuration
"""

# ruff: noqa: I001 - "name as name" is how a typed package exports a name
from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from ..config import Limits as Limits
    from .chat_turns import ChatTurns as ChatTurns
    from .multi_turn import MultiTurnSource as MultiTurnSource, Step as Step
    from .resolve import resolve_environment as resolve_environment, turns_for as turns_for
    from .tools import Tools as Tools, tool_metrics as tool_metrics

__getattr__ = lazy_exports(__name__)
