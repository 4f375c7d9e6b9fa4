"""Every tensor of a Kimi-K3 checkpoint as data: name, dtype, shape, use, shard.

Generated from the config alone, so a reading plan exists before a single shard does. Linear
weights are ``[out, in]``. H hidden, D latent, I expert FFN width, E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ...formats.mxfp4 import GROUP
from .config import KimiK3Config

TEXT = "language_model."
ITEMSIZE = {"U8": 1, "BF16": 2, "F32": 4}
A_LOG_LENGTH = 128  # stored length, whatever the number of heads; the tail is padding

# Uses. The engine reads the first two; the others are listed so that nothing is skipped silently.
ROUTED, BLOCK = "routed experts", "MoE block"
ATTENTION, DENSE, NORMS = "attention", "dense MLP", "norms and residual mixing"
GLOBALS, PROJECTOR, VISION = "embeddings and head", "vision projector", "vision tower"
NEEDED = frozenset({ROUTED, BLOCK})
NOT_NEEDED = frozenset({ATTENTION, DENSE, NORMS, GLOBALS, PROJECTOR, VISION})


@functools.cache
def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * ITEMSIZE[dtype]


class Entry(NamedTuple):
    """One tensor.

    ``dtype`` is safetensors' spelling. ``group`` names the set of tensors that come together: an
    index holds all of a group or none of it. ``shard`` counts from 1; ``layer`` is -1 outside
    the decoder.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    use: str
    group: str
    layer: int
    shard: int

    @property
    def nbytes(self) -> int:
        """Bytes in the shard."""
        return _nbytes(self.shape, self.dtype)


class ExpertPiece(NamedTuple):
    """Where one checkpoint tensor of an expert goes: rows ``half * I`` on of ``engine_name``."""

    matrix: str  # w1 gate, w3 up, w2 down
    suffix: str
    engine_name: str
    half: int


EXPERT_PIECES: dict[str, tuple[ExpertPiece, ...]] = {
    "mxfp4": (
        ExpertPiece("w1", "weight_packed", "w13_packed", 0),
        ExpertPiece("w1", "weight_scale", "w13_scale", 0),
        ExpertPiece("w3", "weight_packed", "w13_packed", 1),
        ExpertPiece("w3", "weight_scale", "w13_scale", 1),
        ExpertPiece("w2", "weight_packed", "w2_packed", 0),
        ExpertPiece("w2", "weight_scale", "w2_scale", 0),
    ),
    "bf16": (
        ExpertPiece("w1", "weight", "w13", 0),
        ExpertPiece("w3", "weight", "w13", 1),
        ExpertPiece("w2", "weight", "w2", 0),
    ),
}
_COLUMNS_PER_ELEMENT = {"weight_packed": 2, "weight_scale": GROUP, "weight": 1}


def layer_prefix(layer: int) -> str:
    """Prefix of a decoder layer's tensors."""
    return f"{TEXT}model.layers.{layer}."


def moe_prefix(layer: int) -> str:
    """Prefix of a layer's MoE block."""
    return f"{layer_prefix(layer)}block_sparse_moe."


def moe_group(layer: int) -> str:
    """Group of a layer's MoE block."""
    return f"layer {layer} MoE"


@functools.cache
def _expert_rows(D: int, I: int, fmt: str) -> list[tuple[str, str, tuple[int, int]]]:  # noqa: E741
    rows = []
    for matrix, suffix, _, _ in EXPERT_PIECES[fmt]:
        out, columns = (D, I) if matrix == "w2" else (I, D)
        shape = (out, columns // _COLUMNS_PER_ELEMENT[suffix])
        rows.append((f"{matrix}.{suffix}", "BF16" if fmt == "bf16" else "U8", shape))
    return rows


def expert_entries(cfg: KimiK3Config, layer: int, expert: int, fmt: str) -> list[Entry]:
    """The tensors of one routed expert, in the order of ``EXPERT_PIECES[fmt]``."""
    rows = _expert_rows(cfg.routed_expert_hidden_size, cfg.moe_intermediate_size, fmt)
    prefix, group = f"{moe_prefix(layer)}experts.{expert}.", moe_group(layer)
    return [Entry(prefix + n, d, s, ROUTED, group, layer, layer + 1) for n, d, s in rows]


def block_entries(cfg: KimiK3Config, layer: int) -> list[Entry]:
    """The eight tensors of a MoE block that aren't routed experts."""
    H, D, X = cfg.hidden_size, cfg.routed_expert_hidden_size, cfg.shared_width
    table: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("gate.weight", "BF16", (cfg.num_experts, H)),
        ("gate.e_score_correction_bias", "F32", (cfg.num_experts,)),
        ("routed_expert_down_proj.weight", "BF16", (D, H)),
        ("routed_expert_norm.weight", "BF16", (D,)),
        ("routed_expert_up_proj.weight", "BF16", (H, D)),
        ("shared_experts.gate_proj.weight", "BF16", (X, H)),
        ("shared_experts.up_proj.weight", "BF16", (X, H)),
        ("shared_experts.down_proj.weight", "BF16", (H, X)),
    )
    prefix, group = moe_prefix(layer), moe_group(layer)
    return [Entry(prefix + n, d, s, BLOCK, group, layer, layer + 1) for n, d, s in table]


def post_attention_norm(cfg: KimiK3Config, layer: int) -> Entry:
    """The norm whose output the MoE block reads; it is stored with the layer's other norms."""
    use = BLOCK if layer in cfg.moe_layers else NORMS
    name = f"{layer_prefix(layer)}post_attention_layernorm.weight"
    return Entry(name, "BF16", (cfg.hidden_size,), use, f"layer {layer} rest", layer, layer + 1)


def layer_entries(cfg: KimiK3Config, layer: int, fmt: str) -> Iterator[Entry]:
    """Everything one decoder layer stores."""
    H, group, shard = cfg.hidden_size, f"layer {layer} rest", layer + 1
    prefix = layer_prefix(layer)
    if layer in cfg.moe_layers:
        for expert in range(cfg.num_experts):
            yield from expert_entries(cfg, layer, expert, fmt)
        yield from block_entries(cfg, layer)
    else:
        W = cfg.intermediate_size
        for name, dense in (("gate", (W, H)), ("up", (W, H)), ("down", (H, W))):
            tensor = f"{prefix}mlp.{name}_proj.weight"
            yield Entry(tensor, "BF16", dense, DENSE, group, layer, shard)
    attention = _mla(cfg) if layer in cfg.attention.mla_layers else _kda(cfg)
    for name, dtype, shape in attention:
        yield Entry(f"{prefix}self_attn.{name}", dtype, shape, ATTENTION, group, layer, shard)
    for name in ("input_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield Entry(f"{prefix}{name}.weight", "BF16", (H,), NORMS, group, layer, shard)
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield Entry(f"{prefix}{name}.weight", "BF16", (1, H), NORMS, group, layer, shard)
    yield post_attention_norm(cfg, layer)


_Rows = list[tuple[str, str, tuple[int, ...]]]


def _kda(cfg: KimiK3Config) -> _Rows:
    H, a = cfg.hidden_size, cfg.attention
    P = a.kda_heads * a.kda_head_dim
    rows: _Rows = [(f"{n}_proj.weight", "BF16", (P, H)) for n in "qkvg"]
    rows += [(f"{n}_conv1d.weight", "F32", (P, 1, a.short_conv_kernel_size)) for n in "qkv"]
    return [
        *rows,
        ("o_proj.weight", "BF16", (H, P)),
        ("f_a_proj.weight", "BF16", (a.kda_head_dim, H)),
        ("f_b_proj.weight", "BF16", (P, a.kda_head_dim)),
        ("b_proj.weight", "BF16", (a.kda_heads, H)),
        ("A_log", "F32", (A_LOG_LENGTH,)),
        ("dt_bias", "F32", (P,)),
        ("o_norm.weight", "F32", (a.kda_head_dim,)),
    ]


def _mla(cfg: KimiK3Config) -> _Rows:
    H, a = cfg.hidden_size, cfg.attention
    N, V = a.num_attention_heads, a.num_attention_heads * a.v_head_dim
    return [
        ("q_a_proj.weight", "BF16", (a.q_lora_rank, H)),
        ("q_a_layernorm.weight", "BF16", (a.q_lora_rank,)),
        ("q_b_proj.weight", "BF16", (N * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.q_lora_rank)),
        ("kv_a_proj_with_mqa.weight", "BF16", (a.kv_lora_rank + a.qk_rope_head_dim, H)),
        ("kv_a_layernorm.weight", "BF16", (a.kv_lora_rank,)),
        ("kv_b_proj.weight", "BF16", (N * (a.qk_nope_head_dim + a.v_head_dim), a.kv_lora_rank)),
        ("g_proj.weight", "BF16", (V, H)),
        ("o_proj.weight", "BF16", (H, V)),
    ]


def global_entries(cfg: KimiK3Config) -> Iterator[Entry]:
    """Embedding, head and final norms: one shard after the last layer."""
    H, V, shard = cfg.hidden_size, cfg.vocab_size, cfg.num_hidden_layers + 1
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head": (V, H),
        "model.embed_tokens": (V, H),
        "model.norm": (H,),
        "model.output_attn_res_norm": (H,),
        "model.output_attn_res_proj": (1, H),
    }
    for name, shape in shapes.items():
        yield Entry(f"{TEXT}{name}.weight", "BF16", shape, GLOBALS, GLOBALS, -1, shard)


def vision_entries(cfg: KimiK3Config) -> Iterator[Entry]:
    """Projector (one shard) and vision tower (the last shard); nothing when text-only."""
    v = cfg.vision
    if v is None:
        return
    C, F, Q = v.vt_hidden_size, v.vt_intermediate_size, v.qkv_hidden_size
    P, shard = v.merge * C, cfg.num_hidden_layers + 2
    shapes: dict[str, tuple[int, ...]] = {
        "proj.0": (P, P),
        "proj.2": (v.text_hidden_size, P),
        "post_norm": (v.text_hidden_size,),
    }
    for name, shape in shapes.items():
        full = f"mm_projector.{name}.weight"
        yield Entry(full, "BF16", shape, PROJECTOR, PROJECTOR, -1, shard)
    shapes = {
        "patch_embed.proj": (C, 3, v.patch_size, v.patch_size),
        "patch_embed.pos_emb": (v.pos_emb_height, v.pos_emb_width, C),
        "encoder.final_layernorm": (C,),
    }
    for block in range(v.vt_num_hidden_layers):
        b = f"encoder.blocks.{block}."
        shapes |= {f"{b}norm0": (C,), f"{b}norm1": (C,), f"{b}wqkv": (3 * Q, C), f"{b}wo": (C, Q)}
        shapes |= {f"{b}mlp.fc0": (F, C), f"{b}mlp.fc1": (C, F)}
    for name, shape in shapes.items():
        yield Entry(f"vision_tower.{name}.weight", "BF16", shape, VISION, VISION, -1, shard + 1)


def model_entries(cfg: KimiK3Config, fmt: str = "mxfp4") -> Iterator[Entry]:
    """Every tensor of the model, by shard. ``fmt`` is how routed experts are stored."""
    for layer in range(cfg.num_hidden_layers):
        yield from layer_entries(cfg, layer, fmt)
    yield from global_entries(cfg)
    yield from vision_entries(cfg)


def shard_count(cfg: KimiK3Config) -> int:
    """Shards of a whole checkpoint: one per layer, one of globals, two of vision."""
    return cfg.num_hidden_layers + (1 if cfg.vision is None else 3)


def shard_file(shard: int, total: int) -> str:
    """File name the published checkpoint gives a shard (readers take names from the index)."""
    return f"model-{shard:05d}-of-{total:06d}.safetensors"
