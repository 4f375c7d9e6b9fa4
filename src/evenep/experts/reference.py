"""The obvious runner: one row at a time in fp32. Slow, and the same bits for any batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..weights.layer import LayerWeights
from .activations import activate
from .runner import Runner, Segment, rounded


class ReferenceRunner(Runner):
    """Every row is its own matrix-vector product, so nothing beside it can matter."""

    name = "reference"
    batch_invariant = True

    def run(
        self,
        rows_NH: Tensor,
        weight_N: Tensor | None,
        segments: Sequence[Segment],
        weights: LayerWeights,
    ) -> None:
        for segment in segments:
            tensors = weights.row(segment.weight_row)
            w13_WH, w2_HI = self.format.decode(tensors, torch.float32)
            b13_W, b2_H = tensors.get("w13_bias"), tensors.get("w2_bias")
            for n in range(segment.start, segment.start + segment.count):
                w_1 = None if weight_N is None else weight_N[n : n + 1]
                z_H = self.weigh_input(rows_NH[n : n + 1], w_1)[0].float()
                h_W = w13_WH @ z_H
                if b13_W is not None:
                    h_W = h_W + b13_W.float()
                a_1I = self.weigh_activation(activate(self.cfg, rounded(h_W)[None]), w_1)
                o_H = w2_HI @ rounded(a_1I)[0]
                if b2_H is not None:
                    o_H = o_H + b2_H.float()
                rows_NH[n] = o_H.to(rows_NH.dtype)
