"""The index is covered exactly, by suffix rule and table; what a rank reads is known beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenep.errors import CheckpointError, InputError
from evenep.models.kimi_k3 import CheckpointIndex
from evenep.models.kimi_k3.cover import Total, classify
from evenep.models.kimi_k3.names import BLOCK, NEEDED, ROUTED, TEXT
from evenep.plan.placement import Placement

from .tampering import MOE, Checkpoint, Edit

EXPERT = f"{MOE}experts.3."


def test_published_index_is_covered_with_shards_absent(published_index: CheckpointIndex) -> None:
    assert published_index.total_size == 1_560_860_324_864
    assert published_index.cover.absent == ()
    assert sum(t.tensors for t in published_index.cover.uses.values()) == 497_220
    assert published_index.cover.uses[ROUTED] == Total(92 * 896 * 6, 92 * 15_722_348_544)


def test_ep16_reads_ninety_gigabytes(published_index: CheckpointIndex) -> None:
    placement = Placement.contiguous(896, 16)
    plan = published_index.plan(placement.experts_of(5))
    assert plan.routed.nbytes == 56 * 92 * 17_547_264
    assert round(plan.routed.nbytes / 1e9, 1) == 90.4
    assert len(plan.shards) == 92


@pytest.mark.parametrize("ranks", [1, 4, 5, 33])
def test_plans_of_all_ranks_cover_the_index_exactly(f2: Path, ranks: int) -> None:
    """Every text tensor is read by exactly one rank, by all (MoE block), or has another use."""
    index = CheckpointIndex.open(f2)
    placement = Placement.contiguous(index.config.num_experts, ranks)
    plans = [index.plan(placement.experts_of(rank)) for rank in range(ranks)]
    routed = [e.name for plan in plans for e in plan.entries if e.use == ROUTED]
    block = {e.name for e in plans[0].entries if e.use == BLOCK}
    assert len(routed) == len(set(routed))
    other = sum(t.tensors for use, t in index.cover.uses.items() if use not in NEEDED)
    planned = {*routed, *block}
    assert len(planned) + other == len(index.shard_of) == 896
    assert all(name.startswith(TEXT) for name in planned)
    assert sum(p.routed.nbytes for p in plans) == index.cover.uses[ROUTED].nbytes
    assert all(p.nbytes == sum(t.nbytes for t in p.shards.values()) for p in plans)


def test_moe_only_checkpoint_says_what_is_absent(f0: Path) -> None:
    index = CheckpointIndex.open(f0)
    assert index.moe_layers == (1,)
    assert "layer 1 rest" in index.cover.absent
    assert len(index.shard_of) == 200


def test_suffix_rule() -> None:
    names = ["a.weight_packed", "a.weight_scale", "b.weight", "c.A_log", "c.dt_bias"]
    assert classify(names) == {"a": "mxfp4", "b": "plain", "c": "plain"}


@pytest.mark.parametrize(
    "suffixes",
    [
        ["weight_packed"],
        ["weight_scale"],
        ["weight_packed", "weight_scale", "weight"],
        ["weight", "bias"],
        *(
            ["weight_packed", "weight_scale", extra]
            for extra in (
                "weight_shape",
                "weight_global_scale",
                "weight_zero_point",
                "input_global_scale",
                "bias",
            )
        ),
    ],
)
def test_anything_else_is_a_hard_error(suffixes: list[str]) -> None:
    with pytest.raises(CheckpointError, match="neither plain nor MXFP4"):
        classify([f"x.{s}" for s in suffixes])


def _missing_scale(c: Checkpoint) -> None:
    del c.tensors[f"{EXPERT}w1.weight_scale"]


def _missing_expert(c: Checkpoint) -> None:
    for name in [n for n in c.tensors if n.startswith(EXPERT)]:
        del c.tensors[name]


def _extra_bias(c: Checkpoint) -> None:
    c.tensors[f"{EXPERT}w1.bias"] = c.tensors[f"{MOE}gate.e_score_correction_bias"].clone()


def _extra_global_scale(c: Checkpoint) -> None:
    c.tensors[f"{EXPERT}w1.weight_global_scale"] = c.tensors[
        f"{MOE}gate.e_score_correction_bias"
    ].clone()


def _plain_expert(c: Checkpoint) -> None:
    del c.tensors[f"{EXPERT}w1.weight_scale"]
    c.tensors[f"{EXPERT}w1.weight"] = c.tensors.pop(f"{EXPERT}w1.weight_packed")


def _unknown_module(c: Checkpoint) -> None:
    c.tensors[f"{MOE}mystery.weight"] = c.tensors[f"{MOE}routed_expert_norm.weight"].clone()


def _quantised_projection(c: Checkpoint) -> None:
    base = f"{MOE}routed_expert_down_proj.weight"
    c.tensors[f"{base}_packed"] = c.tensors.pop(base)
    c.tensors[f"{base}_scale"] = c.tensors[f"{EXPERT}w1.weight_scale"].clone()


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_missing_scale, "experts.3.w1"),
        (_missing_expert, "missing 6: "),
        (_extra_bias, "bias"),
        (_extra_global_scale, "weight_global_scale"),
        (_plain_expert, "experts.3.w1.weight_packed"),
        (_unknown_module, "mystery"),
        (_quantised_projection, "routed_expert_down_proj"),
    ],
)
def test_wrong_set_of_tensors_is_refused(f0: Path, tmp_path: Path, edit: Edit, named: str) -> None:
    checkpoint = Checkpoint(f0)
    edit(checkpoint)
    checkpoint.reindex()
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(checkpoint.save(tmp_path))
    assert named in str(caught.value)
    assert "model.safetensors.index.json" in str(caught.value)


def test_tensor_listed_twice(f0: Path, tmp_path: Path) -> None:
    path = Checkpoint(f0).save(tmp_path)
    file = path / "model.safetensors.index.json"
    twice = f'"weight_map": {{"{EXPERT}w1.weight_scale": "model-00002-of-000002.safetensors", '
    file.write_text(file.read_text().replace('"weight_map": {', twice))
    with pytest.raises(CheckpointError, match="listed 2 times"):
        CheckpointIndex.open(path)


def test_total_size_must_agree(f0: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(f0)
    checkpoint.index["metadata"]["total_size"] += 1
    with pytest.raises(CheckpointError, match="total_size"):
        CheckpointIndex.open(checkpoint.save(tmp_path))


@pytest.mark.parametrize("content", [None, "{", "{}", json.dumps({"weight_map": []})])
def test_unreadable_index(f0: Path, tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_bytes((f0 / "config.json").read_bytes())
    if content is not None:
        (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="can't read the index"):
        CheckpointIndex.open(tmp_path)


def test_bad_requests(f0: Path) -> None:
    index = CheckpointIndex.open(f0)
    with pytest.raises(CheckpointError, match="decoder layer 0"):
        index.plan([0], layers=[0])
    with pytest.raises(InputError, match="expert id"):
        index.plan([32])
