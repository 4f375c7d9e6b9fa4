"""From the JSON document to ``KimiK3Config``: every field typed, every refusal explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError, explain
from ...formats.mxfp4 import GROUP
from .config import FIXED, MXFP4_WEIGHTS, AttentionSizes, KimiK3Config, VisionSizes

_ABSENT = "nothing"
# Why a field may not be missing, where its type alone doesn't say it.
_REASONS = {
    "activation_situ_linear_beta": "SiTU bounds the up half with it; without it values drift",
    "routed_expert_hidden_size": "experts work in a latent space; without its width the block "
    "would have no latent projections, which is another architecture",
}


class Section:
    """One JSON object with typed look-ups whose errors name the object and the field."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def refuse(self, what: str, *, expected: object, got: object, fix: str = "") -> CheckpointError:
        return CheckpointError(explain(what, where=self.where, expected=expected, got=got, fix=fix))

    def _value(self, name: str, expected: str) -> Any:
        if self.fields.get(name) is None:
            reason = f" ({_REASONS[name]})" if name in _REASONS else ""
            raise self.refuse(
                f"{name} is absent{reason}",
                expected=expected,
                got=_ABSENT,
                fix=f"use the config.json published with the weights, it has {name}",
            )
        return self.fields[name]

    def size(self, name: str, at_least: int = 1) -> int:
        expected = f"an int >= {at_least}"
        value = self._value(name, expected)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.refuse(f"bad {name}", expected=expected, got=value)
        return value

    def number(self, name: str) -> float:
        expected = "a positive number"
        value = self._value(name, expected)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise self.refuse(f"bad {name}", expected=expected, got=value)
        return float(value)

    def section(self, name: str) -> Section:
        value = self._value(name, "a JSON object")
        if not isinstance(value, Mapping):
            raise self.refuse(f"bad {name}", expected="a JSON object", got=type(value).__name__)
        return Section(value, f"{self.where} {name}")

    def fixed(self, name: str, value: object, reason: str) -> None:
        got = self.fields.get(name, _ABSENT)
        if got != value or type(got) is not type(value):
            raise self.refuse(
                f"unsupported {name}: {reason}",
                expected=repr(value),
                got=repr(got) if got != _ABSENT else _ABSENT,
                fix="load this model with a loader made for it",
            )


def parse_config(document: Mapping[str, Any], where: str) -> KimiK3Config:
    """See ``KimiK3Config.from_dict``."""
    if not isinstance(document, Mapping):
        raise CheckpointError(explain("not a JSON object", where=where, got=type(document)))
    top = Section(document, where)
    text = top.section("text_config")
    for name, value, reason in FIXED:
        text.fixed(name, value, reason)
    vision = document.get("vision_config")
    config = KimiK3Config(
        vocab_size=text.size("vocab_size"),
        hidden_size=text.size("hidden_size"),
        intermediate_size=text.size("intermediate_size"),
        num_hidden_layers=text.size("num_hidden_layers"),
        rms_norm_eps=text.number("rms_norm_eps"),
        activation_situ_beta=text.number("activation_situ_beta"),
        activation_situ_linear_beta=text.number("activation_situ_linear_beta"),
        num_experts=text.size("num_experts"),
        num_experts_per_token=text.size("num_experts_per_token"),
        num_shared_experts=text.size("num_shared_experts"),
        moe_intermediate_size=text.size("moe_intermediate_size"),
        routed_expert_hidden_size=text.size("routed_expert_hidden_size"),
        first_k_dense_replace=text.size("first_k_dense_replace", at_least=0),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        attention=_attention(text),
        quantized=_quantized(text, top),
        vision=None if vision is None else _vision(top.section("vision_config")),
    )
    _check_sizes(config, text)
    return config


def _check_sizes(config: KimiK3Config, text: Section) -> None:
    K, E = config.num_experts_per_token, config.num_experts
    if K > E:
        raise text.refuse("more experts per token than experts", expected=f"<= {E}", got=K)
    if config.first_k_dense_replace >= config.num_hidden_layers:
        raise text.refuse(
            "no MoE layer", expected="first_k_dense_replace < num_hidden_layers",
            got=f"{config.first_k_dense_replace}, {config.num_hidden_layers}",
        )  # fmt: skip
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if config.quantized and getattr(config, name) % GROUP:
            raise text.refuse(
                f"bad {name}: one scale byte covers {GROUP} columns",
                expected=f"a multiple of {GROUP}",
                got=getattr(config, name),
            )


def _attention(text: Section) -> AttentionSizes:
    linear = text.section("linear_attn_config")
    linear.fixed("use_full_rank_gate", True, "the tensor table has one full-rank gate matrix")
    layers = range(1, text.size("num_hidden_layers") + 1)
    mla, kda = (linear.fields.get(n) for n in ("full_attn_layers", "kda_layers"))
    if not isinstance(mla, list) or not isinstance(kda, list) or sorted(mla + kda) != list(layers):
        raise linear.refuse(
            "full_attn_layers and kda_layers don't split the layers",
            expected=f"every layer 1..{len(layers)} (1-based) in exactly one list",
            got=f"{mla} and {kda}",
        )
    return AttentionSizes(
        num_attention_heads=text.size("num_attention_heads"),
        q_lora_rank=text.size("q_lora_rank"),
        kv_lora_rank=text.size("kv_lora_rank"),
        qk_nope_head_dim=text.size("qk_nope_head_dim"),
        qk_rope_head_dim=text.size("qk_rope_head_dim"),
        v_head_dim=text.size("v_head_dim"),
        kda_heads=linear.size("num_heads"),
        kda_head_dim=linear.size("head_dim"),
        short_conv_kernel_size=linear.size("short_conv_kernel_size"),
        mla_layers=frozenset(n - 1 for n in mla),
    )


def _quantized(text: Section, top: Section) -> bool:
    """True for MXFP4, False for no quantization at all; any other scheme is refused."""
    holder = text if text.fields.get("quantization_config") is not None else top
    if holder.fields.get("quantization_config") is None:
        return False
    quant = holder.section("quantization_config")
    quant.fixed("quant_method", "compressed-tensors", "the tensor names follow it")
    quant.fixed("format", "mxfp4-pack-quantized", "the only packed format read here")
    groups = quant.section("config_groups")
    for name in groups.fields:
        group = groups.section(name)
        weights = group.section("weights")
        for field, value in MXFP4_WEIGHTS.items():
            weights.fixed(field, value, "MXFP4 is E2M1 codes with one scale per 32 columns")
        weights.fixed("symmetric", True, "MXFP4 has no zero points")
    return True


def _vision(vision: Section) -> VisionSizes:
    merge = vision.fields.get("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2:
        raise vision.refuse("bad merge_kernel_size", expected="two ints", got=merge)
    return VisionSizes(
        patch_size=vision.size("patch_size"),
        vt_num_hidden_layers=vision.size("vt_num_hidden_layers"),
        vt_hidden_size=vision.size("vt_hidden_size"),
        vt_intermediate_size=vision.size("vt_intermediate_size"),
        qkv_hidden_size=vision.size("qkv_hidden_size"),
        pos_emb_height=vision.size("init_pos_emb_height"),
        pos_emb_width=vision.size("init_pos_emb_width"),
        merge=merge[0] * merge[1],
        text_hidden_size=vision.size("text_hidden_size"),
    )
