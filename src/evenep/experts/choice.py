"""Which of several runners an engine uses, from times that all its ranks have agreed on.

A table has, per runner, nanoseconds an expert at each of ``ROWS`` rows. The engine gets one runner,
that of the least total time over the buckets its steps reach: from one row up to the first bucket
that holds a full step's mean rows an expert. One runner an engine, not one a step: what a rank
knows of a step before its counts are exchanged is its own tokens, and peers can't see those.

Worked example: 512 tokens per rank, top-8, 4 ranks, 256 experts: 64 rows an expert in a full step,
so buckets 1, 16 and 64 count. With a = (10, 12, 40) and b = (8, 13, 50) it is a: 62 against 71.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..config import EPConfig

ROWS = (1, 16, 64, 256, 1024)
"""Rows an expert that runners are timed at."""

Table = Mapping[str, tuple[int, ...]]


class RunnerChoice(NamedTuple):
    """A runner's name, and why it was picked."""

    name: str
    why: str


def full_rows(cfg: EPConfig) -> int:
    """Mean rows an expert of a step in which every rank brings all it may, rounded up."""
    return -(-cfg.max_tokens_per_rank * cfg.top_k * cfg.ranks // cfg.num_experts)


def reached(rows: int) -> int:
    """How many of ``ROWS`` steps of up to so many rows an expert reach."""
    return 1 + sum(bucket < rows for bucket in ROWS[:-1])


def choose(table: Table, rows: int) -> RunnerChoice:
    """The runner of the least total time up to ``rows``; the earlier one of equals."""
    buckets = reached(rows)
    totals = {name: sum(times[:buckets]) for name, times in table.items()}
    best = min(totals, key=totals.__getitem__)
    said = ", ".join(f"{name} {ns / 1e3:.1f} us" for name, ns in totals.items())
    at = ", ".join(map(str, ROWS[:buckets]))
    return RunnerChoice(best, f"least time an expert, summed over {at} rows: {said}")
