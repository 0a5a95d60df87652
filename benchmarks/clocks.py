"""Clock, power and temperature of the GPU during a measurement: a figure without them can't be compared."""

import subprocess
import threading
from statistics import median
from typing import Any

import torch

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]


class Clocks:
    """Asks nvidia-smi again and again while the context is open, in a thread.

    ``result`` is ``{"mhz", "watts", "celsius", "samples"}``, medians and the highest temperature; ``{"absent": why}``
    if nvidia-smi failed; None where there is no GPU.
    """

    result: dict[str, Any] | None = None

    def __init__(self, device: torch.device, pause: float = 0.2) -> None:
        self._device, self._pause = device, pause
        self._over = threading.Event()
        self._samples: list[tuple[float, ...]] = []
        self._absent = "nvidia-smi has not answered in time"

    def __enter__(self) -> "Clocks":
        if self._device.type == "cuda":
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()  # an answer that is still under way is not waited for: it may be of an idle GPU
        if self._device.type == "cuda":
            self.result = summarize(list(self._samples)) if self._samples else {"absent": self._absent}

    def _watch(self) -> None:
        command = [*QUERY, *_which(self._device)]
        while not self._over.is_set():
            try:
                answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
                sample = tuple(map(float, answer.splitlines()[0].split(",")))
            except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
                self._absent = f"{type(error).__name__}: {error}"
                return
            if not self._over.is_set():
                self._samples.append(sample)
            self._over.wait(self._pause)


def summarize(samples: list[tuple[float, ...]]) -> dict[str, Any]:
    mhz, watts, celsius = zip(*samples, strict=True)
    return {"mhz": median(mhz), "watts": median(watts), "celsius": max(celsius), "samples": len(samples)}


def shown(clocks: dict[str, Any] | None) -> str:
    """As in a table: MHz / W / °C."""
    if not clocks:
        return ""
    return "unknown" if "absent" in clocks else f"{clocks['mhz']:.0f} / {clocks['watts']:.0f} / {clocks['celsius']:.0f}"


def _which(device: torch.device) -> list[str]:
    """The option that names the device to nvidia-smi; torch may see only some of them, and number them otherwise."""
    try:
        return [f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    except (RuntimeError, AssertionError, AttributeError):
        return []
