"""setuptools, whose editable install is one that type checkers see, too.

The root of the repository is the package, so an editable install finds it by an import hook, which
mypy and pyright don't run. Beside that hook, this backend gives them a directory that holds nothing
but a link ``burnish`` to the root. The hook comes first, so that Python itself imports the files
where they are.
"""

import base64
import hashlib
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_ROOT = Path(__file__).resolve().parents[1]
_LINKS = _ROOT / "build/editable"


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """The wheel of an editable install, as PEP 660 has it; setuptools' own where links can't be
    made.
    """
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    try:
        _link()
    except OSError:  # as on Windows, without the right to make links
        return name
    _add_path(Path(wheel_directory, name))
    return name


def _link() -> None:
    _LINKS.mkdir(parents=True, exist_ok=True)
    link = _LINKS / "burnish"
    if not link.is_symlink():
        link.symlink_to(os.path.relpath(_ROOT, _LINKS), target_is_directory=True)


def _add_path(wheel: Path) -> None:
    """Write the wheel again, with the directory of the link in its path file."""
    with zipfile.ZipFile(wheel) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    (path_file,) = (each for each in files if each.endswith(".pth"))
    (record,) = (each for each in files if each.endswith(".dist-info/RECORD"))
    hook = re.match(r"import (\w+);", files[path_file].decode())
    if hook is None:  # setuptools has another way, which needs no help
        return
    first = f"lambda finder: getattr(finder, '__module__', '') != {hook[1]!r}"
    lines = [
        files[path_file].decode().strip(),
        f"import sys; sys.meta_path.sort(key={first})",
        str(_LINKS),
    ]
    files[path_file] = "\n".join([*lines, ""]).encode()
    files[record] = _recorded(files[record].decode(), path_file, files[path_file])
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, content in files.items():
            archive.writestr(each, content)


def _recorded(record: str, name: str, content: bytes) -> bytes:
    """The list of a wheel's files, with the digest and the size of one of them as they are now."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    entry = f"{name},sha256={digest},{len(content)}"
    lines = [entry if line.startswith(f"{name},") else line for line in record.splitlines()]
    return "\n".join([*lines, ""]).encode()
