"""A checkpoint as its config and index describe it, before any shard is opened.

Opening one checks the index against the model's tensor table (``cover``); planning says which
tensors a rank reads, from the index alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, InputError, explain
from .config import CONFIG_NAME, KimiK3Config
from .cover import Cover, Total, classify, cover_index
from .names import Entry, block_entries, expert_entries, moe_group, post_attention_norm

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What one rank reads: exactly these tensors, and no other byte.

    Attributes:
        entries: the tensors, routed experts first, by layer and expert.
        shards: shard file -> what is read of it.
        routed: the routed experts (moved into the engine's store).
        block: the rest of the MoE blocks (replicated on every rank).
    """

    experts: tuple[int, ...]
    layers: tuple[int, ...]
    entries: tuple[Entry, ...]
    shards: Mapping[str, Total]
    routed: Total
    block: Total

    @property
    def nbytes(self) -> int:
        """Bytes read in all."""
        return self.routed.nbytes + self.block.nbytes


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """config.json and index of one directory, checked against each other.

    Attributes:
        shard_of: tensor name -> shard file.
        total_size: data bytes of all tensors in the index, from the table.
        weight_format: ``mxfp4`` or ``bf16``: how routed experts are stored.
    """

    path: Path
    config: KimiK3Config
    shard_of: Mapping[str, str]
    weight_format: str
    cover: Cover
    total_size: int

    @classmethod
    def open(cls, path: str | Path) -> CheckpointIndex:
        """Read and check ``config.json`` and the index; shards may be absent.

        Raises:
            CheckpointError: a file is missing or broken; a tensor is missing, extra, listed
                twice or neither plain nor MXFP4; the total size disagrees.
        """
        path = Path(path)
        config = KimiK3Config.from_file(path)
        where = str(path / INDEX_NAME)
        document = _read_index(path / INDEX_NAME)
        shard_of = document["weight_map"]
        kinds = classify(shard_of, where)
        packed = any(kind == "mxfp4" and ".experts." in name for name, kind in kinds.items())
        weight_format = "mxfp4" if packed else "bf16"
        cover, total = cover_index(config, shard_of, weight_format, where)
        stated = document.get("metadata", {}).get("total_size")
        if stated is not None and stated != total:
            raise CheckpointError(
                explain(
                    "metadata.total_size disagrees with the tensors' sizes",
                    where=where, expected=f"{total:,} bytes", got=f"{stated:,} bytes",
                    fix=f"check that {CONFIG_NAME} belongs to this index",
                )
            )  # fmt: skip
        return cls(path, config, shard_of, weight_format, cover, total)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layers whose MoE block the index holds."""
        return tuple(n for n in self.config.moe_layers if moe_group(n) in self.cover.groups)

    def require_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """``layers``, or every MoE layer for None.

        Raises:
            CheckpointError: a layer has no MoE block here.
        """
        if layers is None:
            return self.moe_layers
        for layer in layers:
            if layer not in self.moe_layers:
                raise CheckpointError(
                    explain(
                        f"no MoE block in decoder layer {layer}",
                        where=str(self.path / INDEX_NAME),
                        expected=f"layers among {_span(self.moe_layers)}", got=layer,
                        fix="count decoder layers from 0; the first layers are dense",
                    )
                )  # fmt: skip
        return tuple(layers)

    def plan(
        self, experts: Sequence[int], layers: Sequence[int] | None = None, *, block: bool = True
    ) -> ReadPlan:
        """What a rank that owns ``experts`` reads of ``layers``, from the index alone.

        ``block`` adds the tensors of the MoE blocks that every rank holds (router, latent
        projections, norms, shared experts).

        Raises:
            InputError: an expert id is out of range.
            CheckpointError: a layer has no MoE block here.
        """
        E = self.config.num_experts
        if any(not 0 <= e < E for e in experts):
            raise InputError(
                explain("bad expert id", where="CheckpointIndex.plan", expected=f"0..{E - 1}",
                        got=list(experts))
            )  # fmt: skip
        chosen = self.require_layers(layers)
        routed = [
            entry
            for layer in chosen
            for expert in experts
            for entry in expert_entries(self.config, layer, expert, self.weight_format)
        ]
        rest = [entry for n in chosen for entry in self.block_entries(n)] if block else []
        shards: dict[str, list[Entry]] = {}
        for entry in (*routed, *rest):
            shards.setdefault(self.shard_of[entry.name], []).append(entry)
        totals = {shard: Total.of(shards[shard]) for shard in sorted(shards)}
        return ReadPlan(
            tuple(experts), chosen, (*routed, *rest), totals, Total.of(routed), Total.of(rest)
        )

    def block_entries(self, layer: int) -> list[Entry]:
        """The non-expert tensors of a layer's MoE block, and its input norm when stored."""
        entries = block_entries(self.config, layer)
        norm = post_attention_norm(self.config, layer)
        return [*entries, norm] if norm.name in self.shard_of else entries


def _read_index(file: Path) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            name, count = Counter(name for name, _ in pairs).most_common(1)[0]
            shards = [value for key, value in pairs if key == name]
            raise CheckpointError(
                explain(
                    f"{name} is listed {count} times",
                    where=str(file), expected="one shard per tensor", got=shards,
                    fix="regenerate the index from the shards' headers",
                )
            )  # fmt: skip
        return found

    try:
        document = json.loads(file.read_bytes(), object_pairs_hook=no_duplicates)
        if not isinstance(document["weight_map"], dict):
            raise TypeError("weight_map is not an object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            explain(
                f"can't read the index: {error!r}",
                where=str(file), expected="JSON with a weight_map",
                fix="give the directory that holds config.json and the index",
            )
        ) from error  # fmt: skip
    result: dict[str, Any] = document
    return result


def _span(layers: Sequence[int]) -> str:
    whole = len(layers) > 2 and tuple(layers) == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}..{layers[-1]}" if whole else str(list(layers))
