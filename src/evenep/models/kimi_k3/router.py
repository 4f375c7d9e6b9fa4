"""Kimi-K3's router, in fp32 end to end.

BF16 logits would send up to a quarter of the tokens to other experts, so the gate is upcast and
nothing is rounded before the weights. T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError, explain

EPSILON = 1e-20  # added to the sum of the chosen scores


def route(
    x_TH: Tensor,
    gate_EH: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    scaling: float = 1.0,
    ids_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts and weigh them.

    The sigmoid scores plus the correction bias choose; ties go to the lowest expert id. The
    weights are the unbiased scores of the chosen, divided by their sum.

    Args:
        x_TH: block input, any float dtype.
        gate_EH: router weight, float (upcast to fp32 here).
        bias_E: fp32 correction bias.
        scaling: ``routed_scaling_factor``.
        ids_TK: forced choice (a workload); ids < 0 are not routed and get weight 0.

    Returns:
        ids int32 ``[T, K]``, best first, and weights fp32 ``[T, K]``.

    Raises:
        InputError: the bias is not fp32, or forced ids have the wrong shape or range.
    """
    if bias_E.dtype != torch.float32:
        raise InputError(
            explain("the correction bias must stay fp32", where="route", expected=torch.float32,
                    got=bias_E.dtype)
        )  # fmt: skip
    score_TE = torch.sigmoid(x_TH.float() @ gate_EH.float().T)
    if ids_TK is None:
        # a stable sort keeps equal scores in id order, which topk doesn't promise
        order_TE = torch.sort(score_TE + bias_E, dim=-1, descending=True, stable=True).indices
        ids_TK = order_TE[:, :top_k]
    else:
        _check_forced(ids_TK, x_TH.shape[0], score_TE.shape[1], top_k)
    ids_TK = ids_TK.long()
    weight_TK = score_TE.gather(1, ids_TK.clamp(min=0)).masked_fill(ids_TK < 0, 0.0)
    weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + EPSILON)
    return ids_TK.int(), weight_TK * scaling


def _check_forced(ids_TK: Tensor, T: int, E: int, K: int) -> None:
    right = ids_TK.dtype in (torch.int32, torch.int64) and ids_TK.shape == (T, K)
    if not right or (ids_TK.numel() and int(ids_TK.max()) >= E):
        raise InputError(
            explain(
                "bad forced ids",
                where="route",
                expected=f"int32 or int64 [{T}, {K}], ids < {E}",
                got=f"{ids_TK.dtype} {list(ids_TK.shape)}"
                + (f", largest {int(ids_TK.max())}" if ids_TK.numel() else ""),
            )
        )
