"""Checks of what a user hands to the engine; nothing is built or queued before they pass.

T tokens, K top-k, E experts, H row width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import EPConfig
from .errors import ConfigError, InputError, explain
from .support import require


def check_rows(
    cfg: EPConfig, device: torch.device, x_TH: Tensor, tokens: int, name: str = "x_TH"
) -> None:
    """Refuse rows of the wrong device, dtype or shape."""
    _require_device(x_TH, device, name)
    require("dtype", str(x_TH.dtype).removeprefix("torch."), where=f"Engine: {name}")
    expected = (tokens, cfg.hidden_size)
    if tuple(x_TH.shape) != expected:
        raise InputError(
            explain("wrong shape", where=name, expected=expected, got=tuple(x_TH.shape))
        )
    _refuse_gradient(x_TH, name)


def check_out(cfg: EPConfig, out_TH: Tensor, device: torch.device, ids_TK: Tensor) -> None:
    """Refuse a tensor that the step's output can't be written into."""
    check_rows(cfg, device, out_TH, ids_TK.shape[0], "out")
    if not out_TH.is_contiguous():
        raise InputError(explain("not contiguous", where="out", got=f"strides {out_TH.stride()}"))


def _require_device(tensor: Tensor, device: torch.device, name: str) -> None:
    require("device", tensor.device.type, where=f"Engine: {name}")
    if tensor.device != device:
        raise InputError(explain("wrong device", where=name, expected=device, got=tensor.device))


def check_routing(
    cfg: EPConfig, device: torch.device, ids_TK: Tensor, weights_TK: Tensor, *, values: bool
) -> None:
    """Refuse router output of the wrong device, dtype or shape; ``values``: or range.

    Looking at values waits for them, which a step on a GPU must not do.
    """
    T, K, E = ids_TK.shape[0] if ids_TK.ndim else 0, cfg.top_k, cfg.num_experts
    for name, tensor, dtypes in (
        ("topk_ids_TK", ids_TK, (torch.int32, torch.int64)),
        ("topk_weights_TK", weights_TK, (torch.float32,)),
    ):
        _require_device(tensor, device, name)
        if tensor.dtype not in dtypes:
            raise InputError(
                explain("wrong dtype", where=name, expected=f"one of {dtypes}", got=tensor.dtype)
            )
        if tuple(tensor.shape) != (T, K):
            raise InputError(
                explain("wrong shape", where=name, expected=f"(T, {K})", got=tuple(tensor.shape))
            )
    if cfg.max_tokens_per_rank < T:
        raise InputError(
            explain(
                "more tokens than the buffers were built for",
                where="topk_ids_TK",
                expected=f"T <= max_tokens_per_rank = {cfg.max_tokens_per_rank}",
                got=T,
                fix="raise max_tokens_per_rank or split the batch",
            )
        )
    _refuse_gradient(weights_TK, "topk_weights_TK")
    if not values:
        return
    if T and int(ids_TK.max()) >= E:
        raise InputError(
            explain(
                "expert id out of range",
                where="topk_ids_TK",
                expected=f"ids < {E} (below zero: not routed)",
                got=int(ids_TK.max()),
            )
        )
    if not torch.isfinite(weights_TK[ids_TK >= 0]).all():
        raise InputError(explain("a routed weight isn't finite", where="topk_weights_TK"))


def _refuse_gradient(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            explain(
                "the engine has no backward pass",
                where=name,
                expected="no gradient",
                got="requires_grad=True",
                fix="call it under torch.no_grad(), or detach it",
            )
        )


def check_fit(cfg: EPConfig, group_size: int, theirs: EPConfig) -> None:
    """Refuse a config that fits neither the group nor the experts (``theirs``)."""
    if group_size != cfg.ranks:
        raise ConfigError(
            explain("wrong group size", where="Engine", expected=cfg.ranks, got=group_size)
        )
    for name in (
        "num_experts",
        "hidden_size",
        "intermediate_size",
        "weight_format",
        "expert_bias",
        "w13_rows",
    ):
        if getattr(theirs, name) != getattr(cfg, name):
            raise ConfigError(
                explain(
                    f"the experts' {name} isn't the config's",
                    where="Engine",
                    expected=getattr(cfg, name),
                    got=getattr(theirs, name),
                )
            )
