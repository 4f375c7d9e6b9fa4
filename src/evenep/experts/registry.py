"""Which runners there are."""

from __future__ import annotations

from ..config import EPConfig
from .reference import ReferenceRunner
from .runner import Runner
from .torch_runner import TorchRunner

RUNNERS: dict[str, type[Runner]] = {"torch": TorchRunner, "reference": ReferenceRunner}


def make_runner(cfg: EPConfig) -> Runner:
    """The runner a config asks for; ``auto`` is ``torch`` on a CPU."""
    return RUNNERS["torch" if cfg.runner == "auto" else cfg.runner](cfg)
