"""How the fused forward kernel (triton_forward.py) is cut on each architecture, and where it is
worth its launch.

An architecture is a compute capability (90), an AMD architecture ("gfx942") or "interpreter". No
Triton is needed here.
"""

from typing import NamedTuple

import torch

Architecture = int | str


class Launch(NamedTuple):
    """A tile of logits, and how a program computes it.

    Attributes:
        rows, columns, depth: of the tile, and of the blocks of hidden states and weight that are
            multiplied at once.
        warps: that compute one tile together.
        stages: buffers of blocks, so that some are fetched while others are multiplied.
        flat: whether the next tile's first blocks are fetched while this one is folded.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    flat: bool


# In 16 bits, with rows that start at multiples of 16 bytes. Compiled ahead of time for 80, 86, 89,
# 90, 100, 120 and gfx942: without a bias, factors or further outputs no register is spilled; with
# all of them 27 are on 86, 89 and 120. Each has at least two buffers in the shared memory of its
# architecture: 66 of 99 KB on 86, 87, 89, 120 and 121.
_AMPERE = Launch(128, 128, 64, 8, 3, True)
_HOPPER = Launch(128, 256, 64, 8, 4, True)
_AMD = Launch(128, 128, 32, 8, 2, False)  # 64 KB of shared memory are all that there is
SIXTEEN_BITS: dict[Architecture, Launch] = {
    **dict.fromkeys((80, 86, 87, 89, 120, 121), _AMPERE),
    **dict.fromkeys((90, 100, 103), _HOPPER),
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), _AMD),
}

# Where "auto" is the fused kernel if neither gradients nor ranks are wanted: on architectures on
# which it was measured, and at least 10 % ahead of tiles. Of the time of tiles it takes, on an
# H100, 0.50 at D = 576, 0.55 at 1024, 0.76 at 2048 and 0.96 at 4096 (8192 rows, bfloat16).
FUSED_WITHOUT_GRADIENTS: frozenset[Architecture] = frozenset({90})
# The widest hidden states that it is taken for.
WIDEST_FUSED = 2048


def launch(architecture: Architecture, dtype: torch.dtype, *, aligned: bool, plain: bool) -> Launch:
    """How the kernel is cut.

    Args:
        aligned: whether rows start at multiples of 16 bytes; if not, numbers are copied one by one.
        plain: one target a row and no factors, which need registers and shared memory of their own.
    """
    if architecture == "interpreter":
        return Launch(32, 64, 16, 1, 1, False)
    if dtype == torch.float32:
        return Launch(64, 128, 16, 8, 2, False)
    if not aligned:
        return Launch(64, 128, 32, 8, 2, False)
    # of one without a row of its own: what fits anywhere
    row = SIXTEEN_BITS.get(architecture, _AMD)
    if plain:
        return row
    return row._replace(columns=128, flat=False)


def prefers_fused(
    architecture: Architecture, compute: torch.dtype, weight: torch.dtype, width: int
) -> bool:
    """True if one pass without gradients was measured to be faster in the fused kernel than in
    tiles.

    Args:
        compute: dtype that factors are multiplied in. In float32 the kernel's products run on no
            tensor core, at half the rate of cuBLAS.
        weight: dtype of W, which the kernel reads as it is: of one in another dtype it would need a
            rounded copy.
        width: of the hidden states.
    """
    if compute.itemsize != 2 or weight != compute:
        return False
    return width <= WIDEST_FUSED and architecture in FUSED_WITHOUT_GRADIENTS


def architecture_of(device: torch.device) -> Architecture:
    """The architecture of a GPU."""
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
