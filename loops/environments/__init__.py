"""MultiTurnSource with something that answers back.

conversation, turns    one loop: tokens in, tokens out; how turns follow each other under a chat template
tools, calculator      functions that the policy calls
single, guess          one turn with a verifier (reasoning-gym); a game of several turns whose optimal play is known
resolve                the name in a configuration
"""

from typing import TYPE_CHECKING

from ...lazy import lazy_exports

if TYPE_CHECKING:
    from .chat_turns import ChatTurns
    from .multi_turn import Environment, Limits, MultiTurnSource, Step
    from .resolve import resolve_environment, turns_for
    from .tools import Tools, check_tool_tags, tool_metrics

__all__ = [
    "ChatTurns",
    "Environment",
    "Limits",
    "MultiTurnSource",
    "Step",
    "Tools",
    "check_tool_tags",
    "resolve_environment",
    "tool_metrics",
    "turns_for",
]

__getattr__ = lazy_exports(__name__)
