"""Expert compute: activations and the runners that turn rows into outputs."""

from ..weights.layer import ExpertKey, LayerWeights
from .registry import RUNNERS, make_runner
from .runner import Runner, Segment

__all__ = ["RUNNERS", "ExpertKey", "LayerWeights", "Runner", "Segment", "make_runner"]
