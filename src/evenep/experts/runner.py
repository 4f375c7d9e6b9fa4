"""What the engine asks of a runner: turn leased rows into expert outputs, in place.

Rounding points (rnd = round to BF16; fp32 inside; a grouped BF16 GEMM rounds once more, before it
adds a bias):

    g | u = rnd(z W13^T + b13)      z = rnd(x w) when the route weight is on the input
    a     = rnd(act(g, u))          a = rnd(act(g, u) w) when it is on the activation
    o     = rnd(a W2^T + b2)        on the output, it multiplies in the reduction
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import EPConfig
from ..formats import format_of
from ..weights.layer import ExpertKey, LayerWeights


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one expert on this rank: ``rows[start : start + count]`` hold a route each."""

    key: ExpertKey
    weight_row: int
    start: int
    count: int


class Runner(ABC):
    """Computes experts for one engine.

    Adding one: subclass in a file of its own, an entry in ``evenep.experts.registry`` and a
    ``Choice`` in ``evenep.support``.
    """

    name: str
    batch_invariant: bool
    """A row's output doesn't depend on the rows beside it, so neither on R nor on the plan."""

    def __init__(self, cfg: EPConfig) -> None:
        self.cfg = cfg
        self.format = format_of(cfg)

    def begin_step(self, layer: int) -> None:  # noqa: B027
        """A step of a layer starts; runners with caches keep time by it."""

    @abstractmethod
    def run(
        self,
        rows_NH: Tensor,
        weight_N: Tensor | None,
        segments: Sequence[Segment],
        weights: LayerWeights,
    ) -> None:
        """Overwrite each segment's rows with its expert's outputs.

        Args:
            rows_NH: BF16 rows of the receive buffer.
            weight_N: fp32 route weight per row, where the model applies it before the output.
            segments: of one layer.
            weights: that layer's tensors.
        """

    def weigh_input(self, x_NH: Tensor, weight_N: Tensor | None) -> Tensor:
        """Apply a route weight that belongs on the input."""
        if self.cfg.route_weight != "input" or weight_N is None:
            return x_NH
        return (x_NH.float() * weight_N[:, None]).to(x_NH.dtype)

    def weigh_activation(self, a_NI: Tensor, weight_N: Tensor | None) -> Tensor:
        """Apply a route weight that belongs on the activation (fp32, before rounding)."""
        if self.cfg.route_weight != "activation" or weight_N is None:
            return a_NI
        return a_NI * weight_N[:, None]


def rounded(x: Tensor) -> Tensor:
    """The value BF16 keeps, in fp32."""
    return x.to(torch.bfloat16).float()
