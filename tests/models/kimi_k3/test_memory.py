"""A rank's memory is its own share: nothing is staged, mapped or read for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evenep import Engine, EPGroup, Placement, launch
from evenep.models.kimi_k3 import checkpoint_weights

# VmHWM, not ru_maxrss: a child's ru_maxrss starts at its parent's size, so it would measure pytest.
SCRIPT = """
import sys
import torch
from evenep.models.kimi_k3 import checkpoint_weights
from evenep.plan.placement import Placement
from evenep.formats import format_of

share = 0
if sys.argv[1] != "baseline":
    source = checkpoint_weights(sys.argv[1], ranks=4, max_tokens_per_rank=8)
    experts = Placement.contiguous(source.cfg.num_experts, 4).experts_of(1)
    specs = format_of(source.cfg).specs(source.cfg)
    held = []
    for layer in source.layers:
        rows = {s.name: torch.empty(len(experts), *s.shape, dtype=s.dtype) for s in specs}
        each = [{n: t[i] for n, t in rows.items()} for i in range(len(experts))]
        source.load(layer, experts, each)
        held.append(rows)
    share = sum(t.nbytes for rows in held for t in rows.values())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) * 1024, share)
"""


def measure(argument: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    peak, share = map(int, done.stdout.split())
    return peak, share


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_is_the_ranks_share(f1: Path) -> None:
    baseline, _ = measure("baseline")
    peak, share = measure(str(f1))
    assert share == 2 * 28 * 835_584
    assert peak - baseline <= 1.3 * share


def _status_bytes(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def _build(group: EPGroup, path: str) -> None:
    weights = checkpoint_weights(path, ranks=group.size, max_tokens_per_rank=8)
    with Engine(weights.cfg, group, weights):
        pass


def _load(group: EPGroup, small: str, path: str) -> tuple[int, int]:
    """Growth of this rank's peak while it builds an engine, and its share.

    A tiny engine goes first: the code and libraries it brings in are the interpreter's own.
    """
    _build(group, small)
    before = _status_bytes("VmHWM")
    _build(group, path)
    experts = len(Placement.contiguous(112, group.size).experts_of(group.rank))
    return _status_bytes("VmHWM") - before, 2 * experts * 835_584


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_of_a_rank_that_builds_an_engine_is_its_share(f0: Path, f1: Path) -> None:
    for grown, share in launch(_load, 4, "shm", (str(f0), str(f1))):
        assert 0.5 * share < grown <= 1.3 * share, f"{grown / share:.2f} x {share} bytes"
