"""Kimi-K3's ``config.json``, parsed once and refused early.

Only what the routed-expert block and the tensor table need is kept, under the file's own names.
Everything the block computes in one fixed way (SiTU, sigmoid router, one expert group, norm after
the reduction …) is a row of ``FIXED``: another value is a ``CheckpointError`` with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...activation import Activation
from ...config import EPConfig
from ...errors import CheckpointError, ConfigError, explain
from ...formats.mxfp4 import GROUP

CONFIG_NAME = "config.json"

# (field of text_config, the only value supported, why)
FIXED: tuple[tuple[str, object, str], ...] = (
    ("hidden_act", "situ", "the block computes SiTU-GLU; another activation changes every value"),
    ("moe_router_activation_func", "sigmoid", "the router scores experts with a sigmoid"),
    ("topk_method", "noaux_tc", "the correction bias is for choosing only"),
    ("num_expert_group", 1, "the router has no expert groups"),
    ("topk_group", 1, "the router has no expert groups"),
    ("moe_renormalize", True, "route weights are divided by their sum"),
    ("latent_moe_use_norm", True, "the latent result is normalised before the up projection"),
    ("moe_layer_freq", 1, "every layer after the dense ones is a MoE layer"),
    ("num_nextn_predict_layers", 0, "multi-token-prediction weights have no place in the table"),
    ("mla_use_output_gate", True, "the tensor table has the attention's output gate"),
    ("tie_word_embeddings", False, "the tensor table has a separate lm_head"),
)
# (field of quantization_config's weights, value)
MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """What the tensor table needs of the attention layers, which the engine never reads."""

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    mla_layers: frozenset[int]
    """0-based decoder layers with full attention (the file's list is 1-based)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """What the tensor table needs of the vision tower and its projector."""

    patch_size: int
    vt_num_hidden_layers: int
    vt_hidden_size: int
    vt_intermediate_size: int
    qkv_hidden_size: int
    pos_emb_height: int
    pos_emb_width: int
    merge: int
    text_hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Config:
    """The sizes and constants of a Kimi-K3-format model; see ``from_dict`` for what is refused.

    Attributes:
        routed_expert_hidden_size: D, the latent width: what dispatch moves.
        moe_intermediate_size: I; the shared experts are one MLP of ``num_shared_experts * I``.
        quantized: config.json has an MXFP4 ``quantization_config``. Which tensors are MXFP4 is
            the index's to say, never the config's ignore list.
        vision: None for a text-only checkpoint.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    activation_situ_beta: float
    activation_situ_linear_beta: float
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    attention: AttentionSizes
    quantized: bool
    vision: VisionSizes | None

    @classmethod
    def from_file(cls, path: str | Path) -> KimiK3Config:
        """Parse a ``config.json``, or the one inside a checkpoint directory.

        Raises:
            CheckpointError: no such file, not JSON, or anything ``from_dict`` refuses.
        """
        path = Path(path)
        path = path / CONFIG_NAME if path.is_dir() else path
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                explain(
                    f"can't read {CONFIG_NAME}: {error}",
                    where=str(path),
                    fix="give the directory that holds config.json and the index",
                )
            ) from error
        return cls.from_dict(document, where=str(path))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], where: str = CONFIG_NAME) -> KimiK3Config:
        """Parse the nested document (``text_config``, ``vision_config``).

        ``quantization_config`` is taken from ``text_config``, or else from the top level.

        Raises:
            CheckpointError: a field is absent or has a value the block doesn't compute.
        """
        from .parse import parse_config

        return parse_config(document, where)

    @property
    def shared_width(self) -> int:
        """FFN width of the fused shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layer numbers (0-based) that hold a MoE block."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @property
    def activation(self) -> Activation:
        """SiTU-GLU with this checkpoint's constants."""
        return Activation.situ(self.activation_situ_beta, self.activation_situ_linear_beta)

    def ep_config(self, *, weight_format: str | None = None, **choices: Any) -> EPConfig:
        """The engine's config: sizes from the checkpoint, the rest from ``choices``.

        Args:
            weight_format: ``mxfp4`` or ``bf16``, as the index says; None follows ``quantized``.
            choices: ``EPConfig`` fields the checkpoint doesn't decide.

        Raises:
            ConfigError: a choice contradicts the checkpoint, or ``EPConfig`` refuses it.
        """
        decided: dict[str, Any] = {
            "num_experts": self.num_experts,
            "top_k": self.num_experts_per_token,
            "hidden_size": self.routed_expert_hidden_size,
            "intermediate_size": self.moe_intermediate_size,
            "activation": self.activation,
            "weight_format": weight_format or ("mxfp4" if self.quantized else "bf16"),
            "route_weight": "output",
            "expert_bias": False,
            "gate_up_order": "gate_first",
            "gate_up_interleave": 0,
        }
        for name in decided.keys() & choices.keys():
            if choices[name] != decided[name]:
                raise ConfigError(
                    explain(
                        f"{name} is the checkpoint's to decide",
                        where="KimiK3Config.ep_config",
                        expected=decided[name],
                        got=choices[name],
                        fix=f"leave {name} out",
                    )
                )
        return EPConfig(**{**choices, **decided})
