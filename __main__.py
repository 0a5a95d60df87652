"""``python -m burnish`` is the command ``burnish``."""

from .loops.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
