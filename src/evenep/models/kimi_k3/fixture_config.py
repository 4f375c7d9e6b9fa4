"""The config.json of fixture checkpoints: the published structure with small sizes."""

from __future__ import annotations

from typing import Any

from ...formats.mxfp4 import GROUP

# kind -> (H, D, I, E, K, decoder layers, whole model)
KINDS: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "F0": (512, 256, 256, 32, 4, 2, False),
    "F1": (1024, 512, 1024, 112, 16, 3, False),
    "F2": (512, 256, 256, 32, 4, 5, True),
}
_IGNORE = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head",
           "vision_tower", "mm_projector")  # fmt: skip


def config_document(kind: str) -> dict[str, Any]:
    """The config.json of a fixture: the published structure with the fixture's sizes."""
    H, D, I, E, K, layers, _ = KINDS[kind]  # noqa: E741
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": H,
        "intermediate_size": 2 * H,
        "latent_moe_use_norm": True,
        **_attention(layers),
        "max_position_embeddings": 4096,
        "moe_intermediate_size": I,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": E,
        "num_experts_per_token": K,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "quantization_config": _quantization(),
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": D,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "vocab_size": 1024,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def _attention(layers: int) -> dict[str, Any]:
    """1-based lists; the last two layers are full attention, as in the published model."""
    mla = [n for n in range(1, layers + 1) if n > max(1, layers - 2)]
    linear = {
        "full_attn_layers": mla,
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [n for n in range(1, layers + 1) if n not in mla],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }
    return {
        "kv_lora_rank": 64,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": linear,
    }


def _quantization() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [f"re:.*{pattern}.*" for pattern in _IGNORE],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
