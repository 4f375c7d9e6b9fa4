"""Weights arrive in the engine's layout; every defect of the stored bytes is a typed error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenep.errors import CheckpointError, ConfigError, InputError
from evenep.formats import format_of
from evenep.formats.mxfp4 import decode_mxfp4
from evenep.models.kimi_k3 import CheckpointWeights, checkpoint_weights, load_block_weights
from evenep.models.kimi_k3.reference import Oracle
from evenep.weights.source import ExpertWeights

from .tampering import MOE, Checkpoint, Edit

EXPERT = f"{MOE}experts.3."


def rows_of(weights: CheckpointWeights, count: int) -> list[dict[str, Tensor]]:
    specs = format_of(weights.cfg).specs(weights.cfg)
    return [{s.name: torch.empty(s.shape, dtype=s.dtype) for s in specs} for _ in range(count)]


def load(path: Path, experts: list[int]) -> list[dict[str, Tensor]]:
    weights = checkpoint_weights(path, max_tokens_per_rank=8)
    rows = rows_of(weights, len(experts))
    weights.load(1, experts, rows)
    return rows


def test_gate_is_the_first_half_of_w13(f0: Path) -> None:
    source = ExpertWeights.from_checkpoint(f0, max_tokens_per_rank=8, ranks=4)
    assert isinstance(source, CheckpointWeights)
    assert source.layers == (1,)
    assert source.cfg.ranks == 4
    rows, oracle = rows_of(source, 2), Oracle(f0, 1)
    read: list[int] = []
    source.load(1, [9, 30], rows, read.append)
    assert sum(read) == 2 * format_of(source.cfg).expert_bytes(source.cfg)
    for expert, tensors in zip([9, 30], rows, strict=True):
        w13, w2 = format_of(source.cfg).decode(tensors, torch.float32)
        gate, up, down = oracle.expert(expert)
        assert torch.equal(w13, torch.cat([gate, up]))
        assert torch.equal(w2, down)


def test_decode_equals_compressed_tensors(f0: Path) -> None:
    """All 16 codes under every scale byte 0..252, by the engine and by the oracle."""
    base = pytest.importorskip("compressed_tensors.compressors.mxfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    group = json.loads((f0 / "config.json").read_text())["text_config"]["quantization_config"]
    scheme = quantization.QuantizationScheme(**group["config_groups"]["group_0"])
    code = torch.arange(16, dtype=torch.uint8)
    packed = (code | (code.flip(0) << 4)).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8)[:, None]
    state = {"weight_packed": packed, "weight_scale": scale}
    want = base.MXFP4PackedCompressor.decompress(state, scheme)["weight"].float()
    assert want[127].unique().numel() == 15, "every code, the two zeros being equal"
    assert torch.equal(decode_mxfp4(packed, scale, torch.bfloat16).float(), want)
    assert torch.equal(Oracle(f0, 1).decode(packed.numpy(), scale.numpy()), want)


def test_block_weights_are_the_stored_ones(f2: Path) -> None:
    block, oracle = load_block_weights(f2, 2), Oracle(f2, 2)
    assert block.bias_E.dtype == torch.float32
    assert torch.equal(block.bias_E, oracle.tensor("gate.e_score_correction_bias"))
    assert torch.equal(block.latent_down_DH, oracle.tensor("routed_expert_down_proj.weight"))
    assert torch.equal(block.shared_up_XH, oracle.tensor("shared_experts.up_proj.weight"))
    assert block.post_attention_norm_H is not None
    assert block.post_attention_norm_H.shape == (512,)


def test_moe_only_checkpoint_has_no_input_norm(f0: Path) -> None:
    assert load_block_weights(f0, 1).post_attention_norm_H is None


def test_plain_experts_load_as_bf16(f0: Path, tmp_path: Path) -> None:
    checkpoint, oracle = Checkpoint(f0), Oracle(f0, 1)
    for e in range(32):
        for w, value in zip(("w1", "w3", "w2"), oracle.expert(e), strict=True):
            base = f"{MOE}experts.{e}.{w}."
            del (
                checkpoint.tensors[f"{base}weight_packed"],
                checkpoint.tensors[f"{base}weight_scale"],
            )
            checkpoint.tensors[f"{base}weight"] = value.bfloat16()
    checkpoint.reindex()
    (tensors,) = load(checkpoint.save(tmp_path), [4])
    assert torch.equal(tensors["w13"].float(), torch.cat(oracle.expert(4)[:2]))
    assert torch.equal(tensors["w2"].float(), oracle.expert(4)[2])


def _scale_byte(byte: int) -> Edit:
    def edit(c: Checkpoint) -> None:
        c.tensors[f"{EXPERT}w3.weight_scale"][7, 1] = byte

    return edit


def _narrow_scale(c: Checkpoint) -> None:
    name = f"{EXPERT}w2.weight_scale"
    c.tensors[name] = c.tensors[name].repeat_interleave(2, dim=1)
    c.index["metadata"].pop("total_size")


def _e8m0_scale(c: Checkpoint) -> None:
    name = f"{EXPERT}w1.weight_scale"
    c.tensors[name] = c.tensors[name].view(torch.float8_e8m0fnu)


def _bf16_bias(c: Checkpoint) -> None:
    name = f"{MOE}gate.e_score_correction_bias"
    c.tensors[name] = c.tensors[name].bfloat16()


def _missing_in_shard(c: Checkpoint) -> None:
    del c.tensors[f"{EXPERT}w1.weight_scale"]


def _extra_in_shard(c: Checkpoint) -> None:
    c.tensors["stowaway.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_scale_byte(255), ["0xFF", "experts.3.w3.weight_scale", "NaN"]),
        (_scale_byte(253), ["0xFD", "0..252"]),
        (_narrow_scale, ["experts.3.w2.weight_scale", "[256, 8]", "[256, 16]"]),
        (_e8m0_scale, ["experts.3.w1.weight_scale", "U8", "F8_E8M0"]),
        (_bf16_bias, ["e_score_correction_bias", "F32", "BF16"]),
        (_missing_in_shard, ["experts.3.w1.weight_scale", "not in the shard"]),
        (_extra_in_shard, ["stowaway"]),
    ],
)
def test_bad_bytes_are_refused(f0: Path, tmp_path: Path, edit: Edit, named: list[str]) -> None:
    checkpoint = Checkpoint(f0)
    edit(checkpoint)
    path = checkpoint.save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(path, [3])
        load_block_weights(path, 1)
    for word in [*named, "expected", "got", "Fix:", ".safetensors"]:
        assert word in str(caught.value)


def test_unowned_defects_do_not_matter(f0: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(f0)
    _scale_byte(255)(checkpoint)
    load(checkpoint.save(tmp_path), [2, 4])


def test_absent_shard(f2: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(f2, tmp_path / "partial"))
    (copy / "model-00003-of-000006.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00003-of-000006"):
        checkpoint_weights(copy, max_tokens_per_rank=8)
    assert checkpoint_weights(copy, layers=[1, 3], max_tokens_per_rank=8).layers == (1, 3)
    with pytest.raises(CheckpointError, match="not there"):
        load_block_weights(copy, 2)


def test_duplicate_tensor_in_two_shards(f2: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(f2, tmp_path / "duplicate"))
    name = f"{MOE}gate.weight"
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    owner = copy / index["weight_map"][name]
    last = copy / "model-00006-of-000006.safetensors"
    save_file({**load_file(last), name: load_file(owner)[name]}, last)
    index["weight_map"][name] = last.name
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="in two shards"):
        load_block_weights(copy, 1)


def test_experts_need_not_divide_by_ranks(f0: Path) -> None:
    assert checkpoint_weights(f0, max_tokens_per_rank=8, ranks=5).cfg.experts_per_rank == 7


def test_bad_requests(f0: Path) -> None:
    weights = checkpoint_weights(f0, max_tokens_per_rank=8)
    with pytest.raises(InputError, match="unknown layer"):
        weights.load(2, [0], rows_of(weights, 1))
    with pytest.raises(InputError, match="bad experts"):
        weights.load(1, [32], rows_of(weights, 1))
    with pytest.raises(InputError, match="bad experts"):
        weights.load(1, [1, 2], rows_of(weights, 1))
    with pytest.raises(InputError, match="wrong tensor names"):
        weights.load(1, [1], [{"w13": torch.zeros(1)}])
    with pytest.raises(CheckpointError, match="no MoE block"):
        checkpoint_weights(f0, layers=[0], max_tokens_per_rank=8)
    with pytest.raises(ConfigError, match="gate_up_order"):
        checkpoint_weights(f0, max_tokens_per_rank=8, gate_up_order="up_first")
