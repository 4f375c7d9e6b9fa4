"""One Kimi-K3 MoE block around an expert-parallel engine.

The routed experts work on latent rows: H is projected to D before dispatch and back to H after
combine, with an RMSNorm in between. That norm is not linear, so it must see the finished sum:
``experts`` returns rows already reduced over all ranks.

T tokens, H hidden, D latent, E experts, K experts per token, X shared width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...activation import Activation
from ...errors import InputError, explain
from ...experts.torch_runner import has_fast_bf16
from .router import route
from .weights import BlockWeights, load_block_weights

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x_TD bf16, ids_TK int32, weights_TK fp32) -> r_TD bf16``, reduced over K and over ranks."""


@dataclass(frozen=True, slots=True)
class MoEOutput:
    """What a block computed.

    Attributes:
        y_TH: block output, bf16.
        routed_TD: latent sum of the routed experts before the norm, bf16. The norm hides a
            common scale error, so parity is checked here as well.
        ids_TK: chosen experts, int32.
        weights_TK: route weights, fp32.
    """

    y_TH: Tensor
    routed_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


class KimiK3MoE(nn.Module):
    """Router, latent projections and shared experts; the routed experts are a callable.

    Args:
        weights: the block's own weights.
        experts: see ``Experts``; an engine's step, or any stand-in with the same meaning.
    """

    gate_EH: Tensor
    bias_E: Tensor
    latent_down_DH: Tensor
    latent_norm_D: Tensor
    latent_up_HD: Tensor
    shared_gate_XH: Tensor
    shared_up_XH: Tensor
    shared_down_HX: Tensor

    def __init__(self, weights: BlockWeights, experts: Experts) -> None:
        super().__init__()
        self.config, self.layer, self.experts = weights.config, weights.layer, experts
        self.register_buffer("gate_EH", weights.gate_EH.float())
        for name in (
            "bias_E",
            "latent_down_DH",
            "latent_norm_D",
            "latent_up_HD",
            "shared_gate_XH",
            "shared_up_XH",
            "shared_down_HX",
        ):
            self.register_buffer(name, getattr(weights, name))

    @classmethod
    def from_checkpoint(cls, path: str | Path, layer: int, experts: Experts) -> KimiK3MoE:
        """Read the block's own weights from a checkpoint directory.

        Raises:
            CheckpointError: see ``load_block_weights``.
        """
        return cls(load_block_weights(path, layer), experts)

    def forward(self, x_TH: Tensor, ids_TK: Tensor | None = None) -> MoEOutput:
        """Compute the block.

        Args:
            x_TH: output of ``post_attention_layernorm``, bf16; T may be 0.
            ids_TK: forced expert ids (a workload); None lets the router choose.

        Raises:
            InputError: ``x_TH`` is not bf16 ``[T, H]``.
        """
        H, cfg = self.config.hidden_size, self.config
        if x_TH.dtype != torch.bfloat16 or x_TH.dim() != 2 or x_TH.shape[1] != H:
            raise InputError(
                explain("bad x", where="KimiK3MoE", expected=f"torch.bfloat16 [T, {H}]",
                        got=f"{x_TH.dtype} {list(x_TH.shape)}")
            )  # fmt: skip
        ids_TK, weights_TK = route(
            x_TH,
            self.gate_EH,
            self.bias_E,
            cfg.num_experts_per_token,
            scaling=cfg.routed_scaling_factor,
            ids_TK=ids_TK,
        )
        routed_TD = self.experts(linear(x_TH, self.latent_down_DH), ids_TK, weights_TK)
        normed_TD = rms_norm(routed_TD, self.latent_norm_D, cfg.rms_norm_eps)
        y_TH = linear(normed_TD, self.latent_up_HD) + self.shared(x_TH)
        return MoEOutput(y_TH, routed_TD, ids_TK, weights_TK)

    def shared(self, x_TH: Tensor) -> Tensor:
        """The shared experts on the full-width input, bf16 ``[T, H]``."""
        gate_TX = linear(x_TH, self.shared_gate_XH)
        up_TX = linear(x_TH, self.shared_up_XH)
        return linear(situ(gate_TX, up_TX, self.config.activation), self.shared_down_HX)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for bf16 operands: fp32 accumulation, one rounding to bf16.

    CPUs without fast bf16 GEMMs do it on fp32 copies: the same arithmetic class, about 8 times
    faster there, at the price of a temporary copy of the weight.
    """
    if x.device.type == "cpu" and not has_fast_bf16():
        return (x.float() @ weight.float().T).to(x.dtype)
    return nn.functional.linear(x, weight)


def situ(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """SiTU-GLU in fp32, rounded once to the input's dtype."""
    beta, linear_beta = activation.beta, activation.linear_beta
    assert beta is not None
    assert linear_beta is not None
    g, u = gate.float(), up.float()
    bounded = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (bounded * (linear_beta * torch.tanh(u / linear_beta))).to(gate.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Mean square in fp32, rounded to the input's dtype before the weight multiplies."""
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)
