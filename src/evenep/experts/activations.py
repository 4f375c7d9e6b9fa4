"""The activations of ``evenep.activation`` computed, and how w13's output splits into halves.

N rows, I FFN width. Everything is fp32 inside; callers round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..activation import Activation
from ..config import EPConfig

Gated = Callable[[Activation, Tensor, Tensor], Tensor]


def _limit(act: Activation) -> float:
    assert act.limit is not None
    return act.limit


def _swiglu(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _swiglu_clamp_before(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    limit = _limit(act)
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _swiglu_clamp_after(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    limit = _limit(act)
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _swigluoai(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    assert act.alpha is not None
    limit = _limit(act)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(act.alpha * gate) * (up.clamp(-limit, limit) + 1)


def _situ(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    assert act.beta is not None
    assert act.linear_beta is not None
    # In place after the first division: the temporaries cost as much as the arithmetic.
    soft_gate = (gate / act.beta).tanh_().mul_(act.beta).mul_(torch.sigmoid(gate))
    return soft_gate.mul_((up / act.linear_beta).tanh_().mul_(act.linear_beta))


GATED: dict[str, Gated] = {
    "swiglu": _swiglu,
    "swiglu_clamp_before": _swiglu_clamp_before,
    "swiglu_clamp_after": _swiglu_clamp_after,
    "swigluoai": _swigluoai,
    "situ": _situ,
}


def split_gate_up(h_NW: Tensor, order: str, interleave: int) -> tuple[Tensor, Tensor]:
    """Gate and up halves ``[N, I]`` of the first GEMM's output ``[N, 2 I]``.

    ``interleave`` g means rows of w13 alternate in granules of g: g of the first half, g of the
    second, and so on. 0 means two plain halves.

    Example: 2 I = 4, g = 1, gate first: columns ``g0 u0 g1 u1`` give gate ``g0 g1``.
    """
    if interleave:
        N, W = h_NW.shape
        parts = h_NW.view(N, W // (2 * interleave), 2, interleave)
        first, second = parts[:, :, 0].flatten(1), parts[:, :, 1].flatten(1)
    else:
        first, second = h_NW.chunk(2, dim=1)
    return (first, second) if order == "gate_first" else (second, first)


def activate(cfg: EPConfig, h_NW: Tensor) -> Tensor:
    """``[N, I]`` fp32 from the first GEMM's output ``[N, 2 I]`` (``[N, I]`` when not gated)."""
    act = cfg.act
    if act.kind == "relu2":
        return torch.relu(h_NW.float()).square()
    gate_NI, up_NI = split_gate_up(h_NW.float(), cfg.gate_up_order, cfg.gate_up_interleave)
    return GATED[act.kind](act, gate_NI, up_NI)
