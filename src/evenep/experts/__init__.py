"""Expert compute: activations and the runners that turn rows into outputs."""

from __future__ import annotations

from ..config import EPConfig
from ..weights.layer import ExpertKey, LayerWeights
from .reference import ReferenceRunner
from .runner import Runner, Segment
from .torch_runner import TorchRunner

RUNNERS: dict[str, type[Runner]] = {"torch": TorchRunner, "reference": ReferenceRunner}

__all__ = ["RUNNERS", "ExpertKey", "LayerWeights", "Runner", "Segment", "make_runner"]


def make_runner(cfg: EPConfig) -> Runner:
    """The runner a config asks for; ``auto`` is ``torch`` on a CPU."""
    return RUNNERS["torch" if cfg.runner == "auto" else cfg.runner](cfg)
