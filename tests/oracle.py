"""The engine's oracle: every token through its experts, one expert at a time, no ranks.

Written from the definitions (C5, the rounding points of ``experts/runner.py``), sharing only the
byte decode, which has an oracle of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenep import EPConfig, ExpertWeights
from evenep.formats import format_of


def expert_tensors(cfg: EPConfig, source: ExpertWeights, layer: int, e: int) -> dict[str, Tensor]:
    """One expert's stored tensors."""
    row = {s.name: torch.empty(s.shape, dtype=s.dtype) for s in format_of(cfg).specs(cfg)}
    source.load(layer, [e], [row])
    return row


def rnd(x: Tensor) -> Tensor:
    """Round to BF16, keep fp32."""
    return x.bfloat16().float()


def activation(cfg: EPConfig, h: Tensor) -> Tensor:
    """fp32 formulas of ``evenep.activation.KINDS``, written out again."""
    act = cfg.act
    if act.kind == "relu2":
        return torch.where(h > 0, h * h, 0.0)
    width = h.shape[1] // 2
    if cfg.gate_up_interleave:
        granule = cfg.gate_up_interleave
        column = torch.arange(2 * width)
        first = h[:, (column // granule) % 2 == 0]
        second = h[:, (column // granule) % 2 == 1]
    else:
        first, second = h[:, :width], h[:, width:]
    g, u = (first, second) if cfg.gate_up_order == "gate_first" else (second, first)
    sig = 1 / (1 + torch.exp(-g))
    L = act.limit or 0.0
    if act.kind == "swiglu":
        return g * sig * u
    if act.kind == "swiglu_clamp_before":
        low = torch.minimum(g, torch.tensor(L))
        return low / (1 + torch.exp(-low)) * u.clamp(-L, L)
    if act.kind == "swiglu_clamp_after":
        return torch.minimum(g * sig, torch.tensor(L)) * u.clamp(-L, L)
    if act.kind == "swigluoai":
        low = torch.minimum(g, torch.tensor(L))
        return low / (1 + torch.exp(-(act.alpha or 0) * low)) * (u.clamp(-L, L) + 1)
    b, lb = act.beta or 0.0, act.linear_beta or 0.0
    return b * torch.tanh(g / b) * sig * lb * torch.tanh(u / lb)


def moe(
    cfg: EPConfig, source: ExpertWeights, layer: int, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Routed sum of every token, fp32 with one rounding at the end; ``[T, H]`` BF16."""
    y = torch.zeros(x.shape[0], cfg.hidden_size)
    outputs = torch.zeros(*ids.shape, cfg.hidden_size)
    for e in sorted(set(ids.reshape(-1).tolist()) - {-1}):
        if e < 0:
            continue
        row = expert_tensors(cfg, source, layer, e)
        w13, w2 = format_of(cfg).decode(row, torch.float32)
        t, slot = torch.nonzero(ids == e, as_tuple=True)
        w = weights[t, slot][:, None]
        z = x[t].float()
        if cfg.route_weight == "input":
            z = rnd(z * w)
        h = z @ w13.T + (row["w13_bias"].float() if "w13_bias" in row else 0.0)
        a = activation(cfg, rnd(h))
        if cfg.route_weight == "activation":
            a = a * w
        o = rnd(rnd(a) @ w2.T + (row["w2_bias"].float() if "w2_bias" in row else 0.0))
        outputs[t, slot] = o * w if cfg.route_weight == "output" else o
    for k in range(ids.shape[1]):
        y = y + outputs[:, k]
    return y.bfloat16()


def rel_l2(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance; 0 when both are zero."""
    scale = float(want.float().norm())
    distance = float((got.float() - want.float()).norm())
    return distance / scale if scale else distance
