"""Every tensor of an index has one known kind and one known use, or the index is refused.

A weight is MXFP4 exactly if the index lists both ``X.weight_packed`` and ``X.weight_scale``, and
plain exactly if it lists ``X.weight``. Anything else is a hard error, never skipped. (The
config's ignore list is not used: taken literally it would also quantise five plain modules.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import CheckpointError, explain
from .config import CONFIG_NAME, KimiK3Config
from .names import Entry, model_entries

PLAIN_SUFFIXES = frozenset({"weight", "A_log", "dt_bias", "e_score_correction_bias"})


class Total(NamedTuple):
    """How much of something."""

    tensors: int
    nbytes: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Total:
        """Count and sum."""
        sizes = [e.nbytes for e in entries]
        return cls(len(sizes), sum(sizes))


@dataclass(frozen=True, slots=True)
class Cover:
    """What every tensor of the index is for; nothing is left over.

    Attributes:
        uses: use -> total. ``names.NEEDED`` are read by the MoE engine, ``names.NOT_NEEDED``
            are other modules' and stay on disk.
        groups: the groups of tensors the index holds, each complete.
        absent: groups of the model that it holds nothing of (a MoE-only checkpoint, say).
    """

    uses: Mapping[str, Total]
    groups: frozenset[str]
    absent: tuple[str, ...]


def classify(names: Iterable[str], where: str = "index") -> dict[str, str]:
    """Logical weight -> ``mxfp4`` or ``plain``, by suffix alone.

    Raises:
        CheckpointError: an unknown suffix, a packed weight without its scale (or the other way
            round), or a weight that is both plain and packed.
    """
    suffixes: dict[str, set[str]] = {}
    for name in names:
        base, _, suffix = name.rpartition(".")
        suffixes.setdefault(base, set()).add(suffix)
    kinds = {}
    for base, found in suffixes.items():
        if found == {"weight_packed", "weight_scale"}:
            kinds[base] = "mxfp4"
        elif found <= PLAIN_SUFFIXES:
            kinds[base] = "plain"
        else:
            raise CheckpointError(
                explain(
                    f"tensor {base} is neither plain nor MXFP4",
                    where=where,
                    expected="weight_packed with weight_scale, or weight, and nothing else",
                    got=" with ".join(sorted(found)),
                    fix="export the checkpoint as compressed-tensors mxfp4-pack-quantized",
                )
            )
    return kinds


def cover_index(
    config: KimiK3Config, shard_of: Mapping[str, str], fmt: str, where: str
) -> tuple[Cover, int]:
    """Match the index with the table, tensor by tensor: ``(cover, data bytes)``.

    A group of tensors may be absent as a whole (a MoE-only checkpoint), never in part.

    Raises:
        CheckpointError: a tensor is missing or unexpected.
    """
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    held: set[str] = set()
    missing: dict[str, list[str]] = {}
    known = 0
    for entry in model_entries(config, fmt):
        if entry.name in shard_of:
            known += 1
            held.add(entry.group)
            counts[entry.use] += 1
            sizes[entry.use] += entry.nbytes
        else:
            missing.setdefault(entry.group, []).append(entry.name)
    lost = [name for group in missing if group in held for name in missing[group]]
    extra: list[str] = []
    if known != len(shard_of):
        names = {entry.name for entry in model_entries(config, fmt)}
        extra = [name for name in shard_of if name not in names]
    if lost or extra or not held:
        raise CheckpointError(
            explain(
                "the index doesn't cover the model",
                where=where,
                expected=f"every tensor that {CONFIG_NAME} implies, and no other",
                got=f"missing {_some(lost)}; unexpected {_some(extra)}",
                fix=f"use the {CONFIG_NAME} and index of one and the same checkpoint",
            )
        )
    uses = {use: Total(counts[use], sizes[use]) for use in sorted(counts)}
    absent = tuple(group for group in missing if group not in held)
    return Cover(uses, frozenset(held), absent), sum(sizes.values())


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    return f"{len(names)}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
