"""Fixtures are the published format in small: names, dtypes, order, statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from evenep.errors import InputError
from evenep.models.kimi_k3 import CheckpointIndex, load_block_weights, route, write_fixture
from evenep.models.kimi_k3.reader import read_header
from evenep.models.kimi_k3.reference import Oracle
from evenep.plan.placement import Placement

from .conftest import PUBLISHED_CONFIG


def index_of(path: Path) -> dict[str, str]:
    document = json.loads((path / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = document["weight_map"]
    return weight_map


@pytest.mark.parametrize(
    ("kind", "count", "shards"), [("f0", 200, 1), ("f1", 1360, 2), ("f2", 896, 6)]
)
def test_shards_open_and_hold_exactly_the_index(
    request: pytest.FixtureRequest, kind: str, count: int, shards: int
) -> None:
    path: Path = request.getfixturevalue(kind)
    weight_map = index_of(path)
    assert len(weight_map) == count
    assert len(set(weight_map.values())) == shards
    held: set[tuple[str, str]] = set()
    for shard in sorted(set(weight_map.values())):
        assert shard.endswith(f"-of-{shards:06d}.safetensors")
        with safe_open(path / shard, framework="pt") as stored:
            held |= dict.fromkeys(stored.keys(), shard).items()
    assert held == set(weight_map.items())


def test_one_layer_per_shard_and_globals_last(f2: Path) -> None:
    for name, shard in index_of(f2).items():
        number = int(shard.split("-")[1])
        layer = int(name.split(".")[3]) if ".layers." in name else 5
        assert number == layer + 1


def test_neither_index_nor_shard_is_sorted(f0: Path) -> None:
    names = list(index_of(f0))
    assert names != sorted(names)
    header = read_header(f0 / next(iter(index_of(f0).values())))
    stored = sorted(header, key=lambda name: header[name].begin)
    order = [name.split(".")[6] for name in stored if ".experts." in name]
    experts = list(dict.fromkeys(order))
    assert experts != sorted(experts, key=int)
    assert order == [e for e in experts for _ in range(6)], "an expert's tensors are neighbours"


def test_dtypes(f2: Path) -> None:
    for shard in set(index_of(f2).values()):
        for name, stored in read_header(f2 / shard).items():
            fp32 = any(
                w in name for w in ("correction_bias", "conv1d", "A_log", "dt_bias", "o_norm")
            )
            packed = name.endswith(("weight_packed", "weight_scale"))
            assert stored.dtype == ("F32" if fp32 else "U8" if packed else "BF16"), name


@pytest.mark.parametrize("kind", ["f0", "f2"])
def test_config_has_the_published_structure(request: pytest.FixtureRequest, kind: str) -> None:
    path: Path = request.getfixturevalue(kind)
    ours = json.loads((path / "config.json").read_text())
    published = json.loads(PUBLISHED_CONFIG.read_text())
    assert ours.keys() <= published.keys()
    assert ours["text_config"].keys() <= published["text_config"].keys()
    for name in ("quantization_config", "hidden_act", "topk_method"):
        assert ours["text_config"][name] == published["text_config"][name]


@pytest.mark.parametrize("kind", ["f0", "f1"])
def test_hot_statistics(request: pytest.FixtureRequest, kind: str) -> None:
    path: Path = request.getfixturevalue(kind)
    oracle = Oracle(path, 1)
    width = CheckpointIndex.open(path).config.hidden_size
    x = torch.randn(256, width, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    pairs = [oracle.gate_up(oracle.latent(x), e) for e in (0, 7, 31)]
    assert 4.0 <= torch.stack([g for g, _ in pairs]).std() <= 5.0
    assert 16.0 <= torch.stack([u for _, u in pairs]).std() <= 20.0
    assert oracle.tensor("gate.e_score_correction_bias").std() == pytest.approx(0.2, abs=0.02)
    norm = oracle.tensor("routed_expert_norm.weight").float()
    assert 0.5 <= norm.min() < norm.max() <= 1.5
    assert len(np.unique(oracle.tensor("experts.0.w1.weight_scale").numpy())) == 11
    packed = oracle.tensor("experts.0.w2.weight_packed").numpy()
    assert len(np.unique(packed & 15)) == len(np.unique(packed >> 4)) == 16


@pytest.mark.parametrize("kind", ["f0", "f1"])
def test_router_overloads_the_first_ranks(request: pytest.FixtureRequest, kind: str) -> None:
    path: Path = request.getfixturevalue(kind)
    index = CheckpointIndex.open(path)
    E, K = index.config.num_experts, index.config.num_experts_per_token
    block = load_block_weights(index, 1)
    x = torch.randn(2048, index.config.hidden_size, generator=torch.Generator().manual_seed(5))
    ids, _ = route(x.bfloat16(), block.gate_EH, block.bias_E, K)
    routes_E = np.bincount(ids.flatten().numpy(), minlength=E)

    def imbalance(ranks: int) -> float:
        loads = np.bincount(Placement.contiguous(E, ranks).home_E, routes_E)
        return float(loads.max() / loads.mean())

    assert 1.5 <= imbalance(2) <= 1.7
    assert imbalance(4) >= 1.5


def test_equal_seeds_give_equal_bytes(f0: Path, tmp_path: Path) -> None:
    again = write_fixture(tmp_path / "again", "F0")
    other = write_fixture(tmp_path / "other", "F0", seed=1)
    for file in f0.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    shard = next(iter(index_of(f0).values()))
    assert (f0 / shard).read_bytes() != (other / shard).read_bytes()


def test_layers_choose_the_blocks(tmp_path: Path) -> None:
    path = write_fixture(tmp_path, "F1", layers=[2])
    assert CheckpointIndex.open(path).moe_layers == (2,)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown kind"):
        write_fixture(tmp_path, "F9")
    for kind, layers in (("F0", [0]), ("F0", []), ("F2", [1])):
        with pytest.raises(InputError, match="bad layers"):
            write_fixture(tmp_path, kind, layers=layers)
