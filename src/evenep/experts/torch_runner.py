"""torch GEMMs: ``grouped_mm`` on BF16 where the CPU multiplies BF16, else fp32 per expert.

Many CPUs have no BF16 multiply: torch then emulates it about eight times slower than fp32. There,
and for quantised formats, an expert is decoded to fp32 on first touch and kept in a bounded cache;
the product of BF16 values accumulated in fp32 and rounded once is the same arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ..config import EPConfig
from ..weights.layer import LayerWeights
from .activations import activate
from .decoded import Decoded, DecodedCache
from .runner import Runner, Segment, rounded


@functools.cache
def has_fast_bf16() -> bool:
    """True when this CPU multiplies BF16 natively."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TorchRunner(Runner):
    """The default on CPUs.

    Args:
        grouped: force or forbid ``grouped_mm``; None: as the format and the CPU allow.
    """

    name = "torch"
    batch_invariant = False

    def __init__(self, cfg: EPConfig, *, grouped: bool | None = None) -> None:
        super().__init__(cfg)
        self.grouped = (
            cfg.weight_format == "bf16" and has_fast_bf16() if grouped is None else grouped
        )
        self.cache = DecodedCache(cfg.decode_cache_bytes)

    def begin_step(self, layer: int) -> None:
        self.cache.begin_pass(layer)

    def run(
        self,
        rows_NH: Tensor,
        weight_N: Tensor | None,
        segments: Sequence[Segment],
        weights: LayerWeights,
    ) -> None:
        if not segments:
            return
        if self.grouped:
            self._run_grouped(rows_NH, weight_N, segments, weights)
            return
        for segment in segments:
            self._run_decoded(rows_NH, weight_N, segment, weights)

    def _run_decoded(
        self, rows_NH: Tensor, weight_N: Tensor | None, segment: Segment, weights: LayerWeights
    ) -> None:
        tensors = weights.row(segment.weight_row)

        def decode() -> Decoded:
            return self.format.decode(tensors, torch.float32)

        w13_WH, w2_HI = self.cache.get(segment.key, decode)
        span = slice(segment.start, segment.start + segment.count)
        w_n = None if weight_N is None else weight_N[span]
        x_nH = self.weigh_input(rows_NH[span], w_n).float()
        h_nW = torch.mm(x_nH, w13_WH.T)
        if "w13_bias" in tensors:
            h_nW += tensors["w13_bias"].float()
        a_nI = self.weigh_activation(activate(self.cfg, rounded(h_nW)), w_n)
        o_nH = torch.mm(rounded(a_nI), w2_HI.T)
        if "w2_bias" in tensors:
            o_nH += tensors["w2_bias"].float()
        rows_NH[span].copy_(o_nH)

    def _run_grouped(
        self,
        rows_NH: Tensor,
        weight_N: Tensor | None,
        segments: Sequence[Segment],
        weights: LayerWeights,
    ) -> None:
        """One ``grouped_mm`` over consecutive weight rows; absent experts have no rows."""
        first, last = segments[0].weight_row, segments[-1].weight_row
        w13_GWH = weights.stacked["w13"][first : last + 1]
        w2_GHI = weights.stacked["w2"][first : last + 1]
        counts_G = torch.zeros(last - first + 1, dtype=torch.int64)
        for segment in segments:
            counts_G[segment.weight_row - first] = segment.count
        offs_G = counts_G.cumsum(0).to(torch.int32)
        index_n = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
        w_n = None if weight_N is None else weight_N[index_n]
        x_nH = self.weigh_input(rows_NH[index_n], w_n)
        h_nW = grouped_mm(x_nH, w13_GWH.transpose(1, 2), offs=offs_G)  # rounds before the bias
        h_nW = self._add_bias(h_nW, "w13_bias", weights, first, counts_G)
        a_nI = self.weigh_activation(activate(self.cfg, h_nW), w_n).to(rows_NH.dtype)
        o_nH = grouped_mm(a_nI, w2_GHI.transpose(1, 2), offs=offs_G)
        rows_NH[index_n] = self._add_bias(o_nH, "w2_bias", weights, first, counts_G)

    @staticmethod
    def _add_bias(
        h_n: Tensor, name: str, weights: LayerWeights, first: int, counts_G: Tensor
    ) -> Tensor:
        if name not in weights.stacked:
            return h_n
        bias_G = weights.stacked[name][first : first + counts_G.numel()]
        return h_n + bias_G.repeat_interleave(counts_G, 0)
