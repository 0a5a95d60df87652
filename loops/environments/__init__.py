"""Multi-turn environments: games, tools and verifiers that the policy converses with.

multi_turn, chat_turns    one loop, tokens in, tokens out; the tokens between turns under a chat template
tools                     functions that the policy calls; a calculator
games                     one turn with a verifier (reasoning-gym); a game of several turns with known optimal play
resolve                   the name in a configuration
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from ..config import Limits
    from .chat_turns import ChatTurns
    from .multi_turn import Environment, MultiTurnSource, Step
    from .resolve import resolve_environment, turns_for
    from .tools import Tools, check_tool_tags, tool_metrics

__all__ = [
    "ChatTurns", "Environment", "Limits", "MultiTurnSource", "Step", "Tools", "check_tool_tags",
    "resolve_environment", "tool_metrics", "turns_for",
]  # fmt: skip

__getattr__ = lazy_exports(__name__)
