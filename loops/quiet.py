"""A line that bitsandbytes logs at its import, held back until a model is quantized.

From 0.49 on it says on a CPU with bfloat16 in AVX512 that its fast 4-bit products could not be
loaded. peft imports it, so that everybody would read it, whatever they train.
"""

import logging

_LOGGER = logging.getLogger("bitsandbytes.backends.cpu.ops")
_held: list[logging.LogRecord] = []


def hold_back() -> None:
    """Keep the line, when it comes; other lines of bitsandbytes are logged as ever."""
    _LOGGER.addFilter(_is_another)


def release() -> None:
    """Log the line, if it has come, and when it comes."""
    _LOGGER.removeFilter(_is_another)
    while _held:
        _LOGGER.handle(_held.pop())


def _is_another(record: logging.LogRecord) -> bool:
    if "gemm_4bit_forward" not in str(record.msg):
        return True
    _held.append(record)
    return False
