"""``python -m burnish`` is the command ``burnish``."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; if packages are missing, print how to install them."""
    try:
        from .loops.cli import main as command
    except ModuleNotFoundError as error:
        if str(error.name).startswith("burnish"):
            raise
        print(f'burnish: {error}; training needs more than objectives and kernels do: pip install "burnish[train]"',
              file=sys.stderr)  # fmt: skip
        return 1
    return command(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
