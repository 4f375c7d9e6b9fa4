"""Times of runners, kept on disk: one JSON file a GPU, software and problem.

What is kept is only a hint: a file that can't be read, or is about something else, is as good as
none, and one that can't be written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from ..config import EPConfig
from ..experts.choice import ROWS, Table

_PACKAGES = ("torch", "triton", "sgl-deep-gemm", "deep-gemm")


def problem(cfg: EPConfig, device: torch.device) -> dict[str, object]:
    """Everything the times depend on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)() if device.type == "cuda" else 0
    return {
        "gpu": gpu,
        "driver": driver,
        "packages": {name: _version(name) for name in _PACKAGES},
        "format": cfg.weight_format,
        "sizes": [cfg.hidden_size, cfg.intermediate_size, cfg.expert_bias],
        "activation": repr(cfg.act),
        "route_weight": cfg.route_weight,
        "rows": list(ROWS),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class RunnerTimes:
    """One file of the cache.

    Args:
        folder: ``Settings.cache_dir``.
        about: what ``problem`` says.
    """

    def __init__(self, folder: Path, about: dict[str, object]) -> None:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self.path, self._about = folder / f"runner-times-{digest[:16]}.json", about

    def read(self, names: Iterable[str]) -> Table | None:
        """Nanoseconds of at least these runners; None: not known."""
        try:
            kept = json.loads(self.path.read_text())
            if kept["problem"] != self._about:
                return None
            times = {name: tuple(kept["ns"][name]) for name in names}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        good = all(
            len(ns) == len(ROWS) and all(type(n) is int and 0 <= n < 2**62 for n in ns)
            for ns in times.values()
        )
        return times if good else None

    def write(self, table: Table) -> None:
        """Replace the file in one go, so that no reader sees half of it."""
        text = json.dumps({"problem": self._about, "ns": table}, indent=1)
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, self.path)
