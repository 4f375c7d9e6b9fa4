"""What a weight format is: the named tensors of one expert, and what they decode to.

Shapes: H row width, I FFN width, W = rows of the first GEMM (2 I gated, else I).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import EPConfig


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of one expert."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor for one expert."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFormat(ABC):
    """How one expert's two matrices are stored."""

    name: str

    @abstractmethod
    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        """The tensors of w13 ``[W, H]`` and w2 ``[H, I]``, without biases."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One expert's ``(w13 [W, H], w2 [H, I])`` in ``dtype``, exact where the format is."""

    @abstractmethod
    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Overwrite one expert's tensors with plausible random weights."""

    def validate(self, tensors: Mapping[str, Tensor], where: str) -> None:  # noqa: B027
        """Refuse values the format can't mean (an E8M0 NaN, say). Default: nothing to refuse."""

    def specs(self, cfg: EPConfig) -> list[TensorSpec]:
        """Every tensor of one expert, biases included."""
        specs = self.matrices(cfg)
        if cfg.expert_bias:
            specs.append(TensorSpec("w13_bias", (cfg.w13_rows,), torch.bfloat16))
            specs.append(TensorSpec("w2_bias", (cfg.hidden_size,), torch.bfloat16))
        return specs

    def expert_bytes(self, cfg: EPConfig) -> int:
        """Bytes that move when one expert is replicated."""
        return sum(spec.nbytes for spec in self.specs(cfg))
