"""The table generated from the published config is the published checkpoint's, byte for byte."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

from evenep.models.kimi_k3 import KimiK3Config
from evenep.models.kimi_k3.names import (
    NEEDED,
    NOT_NEEDED,
    ROUTED,
    TEXT,
    Entry,
    layer_prefix,
    model_entries,
    shard_count,
    shard_file,
)

from .conftest import PUBLISHED_CONFIG


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return list(model_entries(KimiK3Config.from_file(PUBLISHED_CONFIG)))


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@pytest.mark.parametrize(
    ("prefix", "count", "sha256"),
    [
        ("", 497_220, "cf9c59e9b9d9595e03f8dd6667c15e49cf8b1a76fa28f2f865f022a81c5e65f1"),
        (TEXT, 497_052, "71fe037402a8d2e6c52b7497eebdff79a1ead1369066ede726678b7c9c941850"),
        (
            layer_prefix(1),
            5_404,
            "c416e931b4af08e5b009457d9cd4fcd8e43f0c916e777f680a7208ea8e697628",
        ),
        (
            layer_prefix(3),
            5_398,
            "c88395a3a4c20676110cb354c455cd050d71f77f98f704249599e76ed35c6bcd",
        ),
    ],
)
def test_name_digests(entries: list[Entry], prefix: str, count: int, sha256: str) -> None:
    names = [e.name for e in entries if e.name.startswith(prefix)]
    assert (len(names), digest(names)) == (count, sha256)


def test_shard_assignment_digest(entries: list[Entry]) -> None:
    total = shard_count(KimiK3Config.from_file(PUBLISHED_CONFIG))
    lines = [f"{e.name}\t{shard_file(e.shard, total)}" for e in entries]
    assert digest(lines) == "d7e456e92028683ea23803c5ca97d0dff6b113a0dd3100d5628fb99c48c8f9a8"


def test_byte_totals(entries: list[Entry]) -> None:
    shards: dict[int, int] = defaultdict(int)
    for e in entries:
        shards[e.shard] += e.nbytes
    mla = KimiK3Config.from_file(PUBLISHED_CONFIG).attention.mla_layers
    assert shards[1] == 2_341_213_184
    for layer in range(1, 93):
        assert shards[layer + 1] == (16_566_684_160 if layer in mla else 16_990_092_800)
    assert shards[94] == 4_697_663_488
    assert sum(shards.values()) == 1_560_860_324_864
    text = sum(e.nbytes for e in entries if e.name.startswith(TEXT))
    assert text == 1_559_965_606_912


def test_moe_block_bytes(entries: list[Entry]) -> None:
    first = [e for e in entries if e.name.startswith(f"{layer_prefix(1)}block_sparse_moe.")]
    assert sum(e.nbytes for e in first) == 16_102_205_952
    assert sum(e.nbytes for e in first if e.use == ROUTED) == 15_722_348_544
    assert sum(e.nbytes for e in first if ".experts.0." in e.name) == 17_547_264


def test_every_tensor_has_exactly_one_known_use(entries: list[Entry]) -> None:
    assert len({e.name for e in entries}) == len(entries)
    assert not NEEDED & NOT_NEEDED
    assert {e.use for e in entries} == NEEDED | NOT_NEEDED
