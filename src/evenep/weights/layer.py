"""One layer's experts on one rank, and what identifies an expert's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertKey:
    """What a set of expert bytes is, wherever it lies."""

    layer: int
    expert: int
    version: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors on this rank.

    Attributes:
        stacked: the format's tensors, ``[home rows + slot rows, …]``.
    """

    stacked: Mapping[str, Tensor]

    def row(self, index: int) -> dict[str, Tensor]:
        """One expert's tensors."""
        return {name: tensor[index] for name, tensor in self.stacked.items()}
