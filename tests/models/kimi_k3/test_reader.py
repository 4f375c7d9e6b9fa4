"""The reader touches the asked bytes and no other, straight into the destination."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from evenep.errors import CheckpointError, InputError
from evenep.models.kimi_k3 import CheckpointIndex, CheckpointReader
from evenep.models.kimi_k3 import reader as reader_module
from evenep.models.kimi_k3.names import Entry, expert_entries
from evenep.models.kimi_k3.reader import TORCH_DTYPES, Stored, coalesce, read_header

OWNED = [0, 5, 6, 31]


def wanted(index: CheckpointIndex, experts: Sequence[int]) -> list[tuple[Entry, torch.Tensor]]:
    entries = [e for n in experts for e in expert_entries(index.config, 1, n, "mxfp4")]
    return [(e, torch.zeros(e.shape, dtype=TORCH_DTYPES[e.dtype])) for e in entries]


def test_equals_the_safetensors_library(f0: Path) -> None:
    index = CheckpointIndex.open(f0)
    pieces = [*wanted(index, OWNED)]
    pieces += [
        (e, torch.zeros(e.shape, dtype=TORCH_DTYPES[e.dtype])) for e in index.block_entries(1)
    ]
    CheckpointReader(index).read(pieces)
    for entry, tensor in pieces:
        with safe_open(f0 / index.shard_of[entry.name], framework="pt") as shard:
            assert torch.equal(tensor, shard.get_tensor(entry.name)), entry.name


def test_reads_only_owned_ranges(f0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, read = CheckpointIndex.open(f0), []
    pread = os.preadv

    def spy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = pread(descriptor, buffers, offset)
        read.append((offset, offset + done))
        return done

    monkeypatch.setattr(os, "preadv", spy)
    progress: list[int] = []
    pieces = wanted(index, OWNED)
    CheckpointReader(index).read(pieces, progress.append)
    header = read_header(f0 / index.shard_of[pieces[0][0].name])
    owned = np.zeros(max(s.end for s in header.values()), bool)
    for entry, _ in pieces:
        owned[header[entry.name].begin : header[entry.name].end] = True
    assert all(owned[begin:end].all() for begin, end in read)
    total = sum(e.nbytes for e, _ in pieces)
    assert sum(end - begin for begin, end in read) == sum(progress) == total == owned.sum()
    assert len(read) <= len(OWNED), "an expert's six tensors are neighbours: one call each"


def test_poison_elsewhere_changes_nothing(f0: Path, tmp_path: Path) -> None:
    index = CheckpointIndex.open(f0)
    clean = wanted(index, OWNED)
    CheckpointReader(index).read(clean)
    copy = Path(shutil.copytree(f0, tmp_path / "poisoned"))
    shard = copy / index.shard_of[clean[0][0].name]
    header, data = read_header(shard), bytearray(shard.read_bytes())
    names = {e.name for e, _ in clean}
    for name, stored in header.items():
        if name not in names:
            data[stored.begin : stored.end] = b"\xff" * (stored.end - stored.begin)
    shard.write_bytes(data)
    dirty = wanted(index, OWNED)
    CheckpointReader(CheckpointIndex.open(copy)).read(dirty)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(clean, dirty, strict=True))


def test_short_reads_are_finished(f0: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = CheckpointIndex.open(f0)
    whole = wanted(index, [7])
    CheckpointReader(index).read(whole)
    pread = os.preadv

    def stingy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return pread(descriptor, [buffers[0][:4099]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    bitty = wanted(index, [7])
    CheckpointReader(index).read(bitty)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, bitty, strict=True))


def test_runs_join_neighbours_and_respect_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(begin: int, size: int) -> tuple[Stored, NDArray[np.uint8]]:
        return Stored("U8", (size,), begin, begin + size), np.zeros(size, np.uint8)

    places = [place(30, 10), place(0, 10), place(10, 10), place(40, 5)]
    assert [(r.begin, r.nbytes) for r in coalesce(places)] == [(0, 20), (30, 15)]
    monkeypatch.setattr(reader_module, "MAX_RUN", 12)
    assert [(r.begin, r.nbytes) for r in coalesce(places)] == [(0, 10), (10, 10), (30, 10), (40, 5)]
    monkeypatch.setattr(reader_module, "MAX_RUN", 100)
    monkeypatch.setattr(reader_module, "MAX_BUFFERS", 1)
    assert len(coalesce(places)) == 4


def test_bad_destination(f0: Path) -> None:
    index = CheckpointIndex.open(f0)
    ((entry, good), *_) = wanted(index, [0])
    for bad in (good.short(), good[:1], good.T.contiguous().T):
        with pytest.raises(InputError, match="bad destination"):
            CheckpointReader(index).read([(entry, bad)])


@pytest.mark.parametrize("damage", ["cut", "length", "json", "empty", "offsets"])
def test_broken_shard(f0: Path, tmp_path: Path, damage: str) -> None:
    copy = Path(shutil.copytree(f0, tmp_path / "broken"))
    index = CheckpointIndex.open(copy)
    shard = copy / next(iter(index.shard_of.values()))
    data = shard.read_bytes()
    shard.write_bytes(
        {
            "cut": data[: len(data) // 2],
            "length": (1 << 60).to_bytes(8, "little") + data[8:],
            "json": data[:8] + b"x" + data[9:],
            "empty": b"",
            "offsets": data.replace(b'"data_offsets":[', b'"data_offsetz":[', 1),
        }[damage]
    )
    with pytest.raises(CheckpointError, match=shard.name):
        CheckpointReader(index).read(wanted(index, [0]))
