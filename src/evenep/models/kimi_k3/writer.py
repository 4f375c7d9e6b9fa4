"""Writes checkpoints in exactly Kimi-K3's on-disk format: small ones, with random contents.

Kinds: ``F0`` one MoE block of 200 tensors (unit tests); ``F1`` MoE blocks that satisfy every
divisibility rule of the kernels and of EP 1, 2, 4, 7, 8, 14, 16; ``F2`` a whole five-layer model
of 896 tensors. One decoder layer per shard, experts in shuffled order inside it, an index that is
not sorted, no tensor the model doesn't have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InputError, explain
from .config import CONFIG_NAME, KimiK3Config
from .content import random_tensor
from .fixture_config import KINDS, config_document
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


def write_safetensors(
    file: Path, entries: Sequence[Entry], content: Callable[[Entry], torch.Tensor]
) -> None:
    """Write tensors in the given order, asking for one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        fields = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
        header[entry.name], offset = fields, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            stream.write(content(entry).contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_shard(
    file: Path, entries: list[Entry], config: KimiK3Config, seed: int, hot: bool
) -> None:
    write_safetensors(file, entries, lambda entry: random_tensor(entry, config, seed, hot))


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
