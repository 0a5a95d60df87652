"""Completions from the trainer's own module.

source    `LocalSource`, and `DetachedSource` on a copy
decode    drawing tokens, and all sequences one token further
runner    a sequence under way, and the module's forward pass
kv_cache  what has been read of all sequences
"""

from typing import TYPE_CHECKING

from ....lazy import lazy_exports

if TYPE_CHECKING:
    from .source import DetachedSource, LocalSource

__all__ = ["DetachedSource", "LocalSource"]

__getattr__ = lazy_exports(__name__)
