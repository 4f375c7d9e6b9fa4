"""Writes checkpoints in exactly Kimi-K3's on-disk format: small ones, with random contents.

Kinds: ``F0`` one MoE block of 200 tensors (unit tests); ``F1`` MoE blocks that satisfy every
divisibility rule of the kernels and of EP 1, 2, 4, 7, 8, 14, 16; ``F2`` a whole five-layer model
of 896 tensors. One decoder layer per shard, experts in shuffled order inside it, an index that is
not sorted, no tensor the model doesn't have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InputError, explain
from ...weights.mxfp4 import GROUP
from .config import CONFIG_NAME, KimiK3Config
from .content import random_tensor
from .index import INDEX_NAME
from .names import (
    EXPERT_PIECES,
    ROUTED,
    Entry,
    block_entries,
    expert_entries,
    model_entries,
    shard_count,
    shard_file,
)

# kind -> (H, D, I, E, K, decoder layers, whole model)
KINDS: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "F0": (512, 256, 256, 32, 4, 2, False),
    "F1": (1024, 512, 1024, 112, 16, 3, False),
    "F2": (512, 256, 256, 32, 4, 5, True),
}
_IGNORE = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head",
           "vision_tower", "mm_projector")  # fmt: skip


def write_fixture(
    path: str | Path,
    kind: str = "F0",
    seed: int = 0,
    layers: Sequence[int] | None = None,
    hot: bool = True,
) -> Path:
    """Write a fixture checkpoint; equal arguments give equal bytes.

    Args:
        path: directory, made if need be.
        layers: decoder layers whose MoE blocks are written, for ``F0`` and ``F1`` (default:
            layer 1). ``F2`` is always whole.
        hot: statistics that make every detail of the block matter; else tame ones.

    Returns:
        The directory.

    Raises:
        InputError: unknown kind, or layers that the kind doesn't have.
    """
    if kind not in KINDS:
        raise InputError(
            explain("unknown kind", where="write_fixture", expected=sorted(KINDS), got=kind)
        )
    path, document = Path(path), config_document(kind)
    config, whole = KimiK3Config.from_dict(document), KINDS[kind][-1]
    chosen = tuple(layers) if layers is not None else (1,)
    if (whole and layers is not None) or not chosen or not set(chosen) <= set(config.moe_layers):
        raise InputError(
            explain("bad layers", where="write_fixture", got=layers,
                    expected="None" if whole else f"layers among {config.moe_layers}")
        )  # fmt: skip
    entries = list(model_entries(config)) if whole else _moe_only(config, chosen)
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, len(entries)])
    (path / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n")
    shards: dict[int, list[Entry]] = {}
    for entry in entries:
        shards.setdefault(entry.shard, []).append(entry)
    files = {n: shard_file(i, len(shards)) for i, n in enumerate(sorted(shards), start=1)}
    for number, held in shards.items():
        _write_shard(path / files[number], _stored_order(held, rng), config, seed, hot)
    _write_index(path, entries, files)
    return path


def write_index(path: str | Path, document: dict[str, Any]) -> Path:
    """Write config.json and the whole model's index, without shards.

    Args:
        document: a config.json document, the published one for instance.
    """
    path, config = Path(path), KimiK3Config.from_dict(document)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n")
    entries = list(model_entries(config, "mxfp4" if config.quantized else "bf16"))
    total = shard_count(config)
    _write_index(path, entries, {n: shard_file(n, total) for n in range(1, total + 1)})
    return path


def write_safetensors(file: Path, tensors: Iterable[tuple[Entry, torch.Tensor]]) -> None:
    """Write tensors in the given order, one after the other."""
    held = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry, _ in held:
        end = offset + entry.nbytes
        fields = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
        header[entry.name], offset = fields, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in held:
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_shard(
    file: Path, entries: list[Entry], config: KimiK3Config, seed: int, hot: bool
) -> None:
    write_safetensors(file, ((e, random_tensor(e, config, seed, hot)) for e in entries))


def _moe_only(config: KimiK3Config, layers: Sequence[int]) -> list[Entry]:
    entries = []
    for layer in layers:
        for expert in range(config.num_experts):
            entries += expert_entries(config, layer, expert, "mxfp4")
        entries += block_entries(config, layer)
    return entries


def _stored_order(entries: list[Entry], rng: np.random.Generator) -> list[Entry]:
    """Wide dtypes first (so that all are aligned), then experts whole, in shuffled order."""
    rest = [e for e in entries if e.use != ROUTED]
    routed = [e for e in entries if e.use == ROUTED]
    size = len(EXPERT_PIECES["mxfp4"])
    experts = [routed[i : i + size] for i in range(0, len(routed), size)]
    shuffled = [experts[i] for i in rng.permutation(len(experts))]
    rest.sort(key=lambda e: e.dtype != "F32")
    return [*rest, *(entry for expert in shuffled for entry in expert)]


def _write_index(path: Path, entries: list[Entry], files: dict[int, str]) -> None:
    """Like the published index, the map runs backwards: high expert ids and w3 scales first."""
    document = {
        "metadata": {"total_size": sum(e.nbytes for e in entries)},
        "weight_map": {e.name: files[e.shard] for e in reversed(entries)},
    }
    (path / INDEX_NAME).write_text(json.dumps(document, indent=2) + "\n")


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
        "kv_lora_rank": 64,
        "latent_moe_use_norm": True,
        "linear_attn_config": _linear_attention(layers),
        "max_position_embeddings": 4096,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": I,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 4,
        "num_expert_group": 1,
        "num_experts": E,
        "num_experts_per_token": K,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": _quantization(),
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": D,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 1024,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def _linear_attention(layers: int) -> dict[str, Any]:
    """1-based lists; the last two layers are full attention, as in the published model."""
    mla = [n for n in range(1, layers + 1) if n > max(1, layers - 2)]
    return {
        "full_attn_layers": mla,
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [n for n in range(1, layers + 1) if n not in mla],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }


def _quantization() -> dict[str, Any]:
    weights = {
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
