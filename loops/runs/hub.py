"""Upload the model of a run to the Hub, while the run goes on.

    hub/step-00000100/    the model of a step that is to be uploaded; it is removed when it is there

A failed upload ends no run. What is not on the Hub when a run ends is told in one line with the
command that uploads it; a run that is resumed uploads it first.
"""

import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, get_session
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from ..config import Hub
from ..redaction import hide
from . import liveness
from .storage import remove

log = logging.getLogger(__name__)

SILENCE = 60.0
"""Seconds without a byte from or to the Hub after which a call has failed; the library, which has
no limit, repeats most calls five times.
"""
_POLL = 0.2  # seconds between two looks for a signal
_DAYS = 7 * 86400.0
_LONGEST = 300  # characters of an error in a message
# Weights of another model, which transformers would read in place of those that are uploaded.
_REPLACED = ["model*.safetensors", "model.safetensors.index.json"]


def check_repository(hub: Hub) -> None:
    """Check the token, and make the repository and its branch where they are not there yet.

    Raises:
        ValueError: says what is wrong with the token, the repository or the way to the Hub.
    """
    api = HfApi()
    try:
        _limit_silence()
        role = _role(api.whoami())
        if role == "read":
            raise ValueError(
                "hub.id: the token of the Hub may only read; log in by one that may write"
            )
        _open_repository(api, hub)
    except LocalTokenNotFoundError as error:
        raise ValueError(
            "hub.id: there is no token of the Hub; set HF_TOKEN, or log in (hf auth login)"
        ) from error
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise ValueError(
            f"hub.id: {hub.id} can't be written to ({_reason(error)}); mend that, or leave hub.id out "
            "and upload the model later"
        ) from error


def _role(who: Mapping[str, Any]) -> str:
    """What the token may do: read, write or fineGrained; "" if the Hub doesn't say."""
    token = who.get("auth", {}).get("accessToken") or {}
    return str(token.get("role", ""))


def _open_repository(api: HfApi, hub: Hub) -> str:
    """The full name of the repository, which has the branch and the visibility of the settings.

    Raises:
        ValueError: if it is public and should be private.
    """
    assert hub.id is not None
    name = api.create_repo(hub.id, private=hub.private, exist_ok=True).repo_id
    # a repository that was there before keeps its visibility
    if hub.private and not api.model_info(name).private:
        raise ValueError(
            f"hub.private: {name} is there already, and is public; make it private, name another "
            "repository, or set hub.private to false"
        )
    if hub.revision is not None:
        api.create_branch(name, branch=hub.revision, exist_ok=True)
    return name


def _limit_silence() -> None:
    """Have calls of the Hub's library fail after a silence, unless the program has limits of its
    own.
    """
    session = get_session()
    if session.timeout == httpx2.Timeout(None):
        session.timeout = httpx2.Timeout(SILENCE)


def _reason(error: BaseException) -> str:
    """An error and its cause in one line, without secrets."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    # of a file that could not be sent, the library says why in the cause
    told = dict.fromkeys((causes[0], causes[-1]))
    texts = [" ".join(str(cause).split()) or type(cause).__name__ for cause in told]
    return hide(": ".join(text[:_LONGEST] for text in texts))


@dataclass(frozen=True)
class Upload:
    """A model on the disk that is to be on the Hub.

    Attributes:
        directory: that holds ``model`` and, where adapters were trained, ``adapter``.
        step: whose weights these are.
        staged: whether the directory is there for the upload alone, and is removed after it.
    """

    directory: Path
    step: int
    staged: bool

    @property
    def folders(self) -> dict[Path, str]:
        """Where each folder goes in the repository.

        The model comes last: when it is there, all is.
        """
        folders = {self.directory / "adapter": "adapter", self.directory / "model": "."}
        return {folder: place for folder, place in folders.items() if folder.is_dir()}

    def command(self, hub: Hub) -> str:
        """The command line that uploads it."""
        lines = []
        for folder, place in self.folders.items():
            words = ["hf", "upload", str(hub.id), str(folder), place]
            if hub.revision is not None:
                words += ["--revision", hub.revision]
            if hub.private:
                words.append("--private")
            lines.append(shlex.join(words))
        return " && ".join(lines)


def send(hub: Hub, upload: Upload) -> None:
    """Upload a model, and wait until it is there. Files that are there already are not sent again.

    Raises whatever the Hub's library does.
    """
    api = HfApi()
    _limit_silence()
    name = _open_repository(api, hub)
    for folder, place in upload.folders.items():
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            path_in_repo=None if place == "." else place,
            revision=hub.revision,
            commit_message=f"{folder.name} of step {upload.step}",
            delete_patterns=_REPLACED if place == "." else None,
        )


class Uploads:
    """The uploads of a run, one at a time, in a thread of the main process.

    Of the models that wait for their turn only the newest is uploaded.

    Attributes:
        folder: of models that wait.
        failed: the upload that failed, and why; None once a later one has succeeded.
    """

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.failed: tuple[Upload, str] | None = None
        self._newest: Upload | None = None
        self._next: Upload | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def place(self, step: int) -> Path:
        """Directory for the model of a step that is to be uploaded."""
        return self.folder / f"step-{step:08d}"

    def stage(self, step: int, partial: Path) -> None:
        """Begin to upload what was written to a partial directory; it is whole from now on."""
        place = self.place(step)
        remove(place)
        partial.rename(place)
        self.begin(Upload(place, step, staged=True))

    def begin(self, upload: Upload) -> None:
        """Upload a model when the one before is there; one that still waits is not uploaded."""
        with self._lock:
            replaced = self._next
            self._newest = upload
            self._next = upload
            if self._thread is None:
                # A daemon, so that a process that is to end does not wait for the Hub.
                self._thread = threading.Thread(target=self._work, name="hub", daemon=True)
                self._thread.start()
        if replaced is not None and replaced.directory != upload.directory:
            _drop(replaced)

    def begin_with_what_is_left(self) -> None:
        """Begin to upload what an earlier process was uploading when it ended."""
        whole = sorted(path for path in self.folder.glob("step-*") if path.name[5:].isdecimal())
        for older in whole[:-1]:
            remove(older)
        if whole:
            self.begin(Upload(whole[-1], int(whole[-1].name[5:]), staged=True))

    def finish(self, stopped: Callable[[], bool]) -> bool:
        """Wait for the uploads; one that failed in the middle of the run is tried once more.

        Args:
            stopped: true when a signal asks for the end of the process.

        Returns:
            Whether all is on the Hub. If not, a line on standard error says how to upload it.
        """
        self._wait(stopped)
        if self.failed is not None and self.failed[0].staged:
            self.begin(self.failed[0])
            self._wait(stopped)
        if self._thread is not None and self._newest is not None:
            self.failed = (self._newest, "a signal ended the wait for it")
        if self.failed is None:
            with suppress(OSError):
                self.folder.rmdir()  # if nothing is left in it
            return True
        upload, reason = self.failed
        print(
            f"the model of step {upload.step} is not on the Hub ({reason}); this uploads it: "
            f"{upload.command(self.hub)}",
            file=sys.stderr,
        )
        return False

    def _wait(self, stopped: Callable[[], bool]) -> None:
        thread = self._thread
        while thread is not None and not stopped():
            thread.join(_POLL)
            thread = self._thread

    def _work(self) -> None:
        """Upload what waits, until nothing does."""
        while True:
            with self._lock:
                upload = self._next
                self._next = None
                if upload is None:
                    self._thread = None
                    return
            self._send(upload)

    def _send(self, upload: Upload) -> None:
        try:
            send(self.hub, upload)
        except Exception as error:  # whatever it is, the run goes on
            self.failed = (upload, _reason(error))
            if upload.staged:  # of others, the end of the run tells
                message = "hub.id: the model of step %d was not uploaded (%s); the run goes on"
                log.warning(message, upload.step, self.failed[1])
            return
        self.failed = None
        _drop(upload)


def _drop(upload: Upload) -> None:
    """Remove a model that was there for its upload alone."""
    if upload.staged:
        remove(upload.directory)


@contextmanager
def uploading(training: Any, received: Mapping[str, float]) -> Iterator[Uploads | None]:
    """Upload in the background while steps are taken, and wait for it when they are.

    Every rank calls it.

    Args:
        training: the `Training`, whose directory is locked. It is told whether all is on the Hub.
        received: signals, by name, see `stop.signals`; one of them ends the wait.

    Yields:
        The uploads on the main process of a run that has a repository; None elsewhere.
    """
    hub = training.context.config.hub
    if hub.id is None or not training.context.accelerator.is_main_process:
        yield None
        return
    uploads = Uploads(hub, training.directory / "hub")
    with _no_progress_bars():  # they would be drawn over the lines of the steps
        uploads.begin_with_what_is_left()
        yield uploads
        training.uploaded = _finished(uploads, received)


def _finished(uploads: Uploads, received: Mapping[str, float]) -> bool:
    """Wait for the uploads; see `Uploads.finish`."""
    # The Hub may take hours for a large model, and calls of its library end by themselves.
    with liveness.at("waiting for the Hub"), liveness.may_stand(_DAYS):
        return uploads.finish(lambda: any(received.values()))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Context without the progress bars of the Hub's library."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
