"""Expert weight formats: named byte tensors, and what they decode to.

An expert is stored as its format's tensors, byte for byte; nothing is upcast in the store or on
the wire. Adding a format: a file with a ``WeightFormat``, an entry below and a ``Choice`` in
``evenep.support``.
"""

from __future__ import annotations

from ..config import EPConfig
from .base import TensorSpec, WeightFormat
from .bf16 import BF16
from .fp8 import FP8
from .mxfp4 import MXFP4

FORMATS: dict[str, WeightFormat] = {fmt.name: fmt for fmt in (BF16(), MXFP4(), FP8())}

__all__ = ["FORMATS", "TensorSpec", "WeightFormat", "format_of"]


def format_of(cfg: EPConfig) -> WeightFormat:
    """The format a config asks for; the support matrix has already vouched for the name."""
    return FORMATS[cfg.weight_format]
