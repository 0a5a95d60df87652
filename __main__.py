"""``python -m burnish`` is the command ``burnish``."""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; if packages are missing, print how to install them."""
    if sys.flags.optimize > 1:
        print("burnish: wanted docstrings, of which transformers makes its models, and -OO removes them; "
              "leave it out, or set PYTHONOPTIMIZE=1", file=sys.stderr)  # fmt: skip
        return 2
    unclear = [word for word in sys.argv[1:] if os.fsencode(word) != word.encode(errors="replace")]
    # tokenizers and safetensors would look for files of other names
    if arguments is None and unclear:
        print(
            f"burnish: {unclear[0]!r} is not UTF-8 here; set PYTHONUTF8=1, or use names in UTF-8",
            file=sys.stderr,
        )
        return 2
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
