"""Clock, power and temperature of the GPU while something is measured: a figure without them can't be compared."""

import subprocess
import threading
from statistics import median
from typing import Any

import torch

QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader,nounits"]


class Clocks:
    """In this context nvidia-smi is asked again and again, in a thread; what it said is in ``found``.

    ``{"mhz", "watts", "celsius", "samples"}``, medians and the highest temperature; ``{"absent": why}`` if it said
    nothing; None where there is no GPU.
    """

    found: dict[str, Any] | None = None

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
            self.found = summary(list(self._samples), self._absent)

    def _watch(self) -> None:
        command = [*QUERY, *which(self._device)]
        while not self._over.is_set():
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
                sample = tuple(float(value) for value in said.splitlines()[0].split(","))
            except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
                self._absent = f"{type(error).__name__}: {error}"
                return
            if not self._over.is_set():
                self._samples.append(sample)
            self._over.wait(self._pause)


def summary(samples: list[tuple[float, ...]], absent: str) -> dict[str, Any]:
    if not samples:
        return {"absent": absent}
    mhz, watts, celsius = zip(*samples, strict=True)
    return {"mhz": median(mhz), "watts": median(watts), "celsius": max(celsius), "samples": len(samples)}


def shown(found: dict[str, Any] | None) -> str:
    """As in a table: MHz / W / °C."""
    if not found:
        return ""
    return "unknown" if "absent" in found else f"{found['mhz']:.0f} / {found['watts']:.0f} / {found['celsius']:.0f}"


def which(device: torch.device) -> list[str]:
    """The option by which nvidia-smi knows the device; torch may count only some of them, and otherwise."""
    try:
        return [f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]
    except (RuntimeError, AssertionError, AttributeError):
        return []
