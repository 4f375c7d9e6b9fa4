"""Real ranks for tests: small engines, inputs with a known answer, and what a run leaves behind.

Functions that ranks run are module-level: processes get them by name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights
from evenep.errors import LaunchError
from evenep.launch import launch

ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("threads@cuda", "symm@cuda")]
"""Transports on a GPU, as ``run`` takes them."""

LAYERS = 2
EXPERTS, TOP_K, WIDTH, TOKENS = 6, 2, 32, 8


# ---- a small engine with a known answer


def config(**changes: Any) -> EPConfig:
    """Replicas move at nearly every step of ``batch``, and the answer doesn't depend on R."""
    values: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": WIDTH,
        "intermediate_size": 16,
        "max_tokens_per_rank": TOKENS,
        "ranks": 3,
        "slots_per_rank": 2,
        "policy": "bounded",
        "epsilon": 0.0,
        "reduction": "exact",
        "runner": "reference",
        "timeout_s": 10.0,
    }
    return EPConfig(**(values | changes))


def engine(group: EPGroup, **changes: Any) -> Engine:
    """An engine of ``config`` over a group, with the weights every test uses."""
    if group.device == "cuda":  # the GPU's batch-invariant runner; costs that leave no rank idle
        changes = {"runner": "triton"} | changes
    cfg = config(ranks=group.size, **changes)
    return Engine(cfg, group, ExpertWeights.random(cfg, LAYERS, seed=7))


def batch(rank: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(x, ids, weights)`` of a rank at a step; a different expert is hot at each step."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x_TH = torch.randn(TOKENS, WIDTH, generator=generator).to(torch.bfloat16)
    hot = torch.full((TOKENS,), number % EXPERTS)
    other = (hot + torch.randint(1, EXPERTS, (TOKENS,), generator=generator)) % EXPERTS
    weights_TK = torch.rand(TOKENS, TOP_K, generator=generator)
    return x_TH, torch.stack([hot, other], dim=1), weights_TK


@functools.cache
def answer(rank: int, number: int, layer: int, device: str = "cpu") -> Tensor:
    """What a rank must get at a step, from an engine of one rank that never failed."""
    alone = EPGroup(dist.HashStore(), 0, 1, transport="threads", device=device)
    with engine(alone, slots_per_rank=0, policy="static") as solo:
        x_TH, ids_TK, weights_TK = (t.to(device) for t in batch(rank, number))
        return solo(x_TH, ids_TK, weights_TK, layer).cpu()


def walk(
    engine: Engine, number: int, layer: int, before: Callable[[str], None] = lambda phase: None
) -> Tensor:
    """One step, verb by verb; ``before`` is called ahead of each with the phase it begins."""
    inputs = batch(engine.group.rank, number)
    x_TH, ids_TK, weights_TK = (t.to(engine.group.device) for t in inputs)
    before("counts")
    step = engine.begin(ids_TK, weights_TK, layer)
    before("dispatch")
    step.dispatch(x_TH)
    before("fetch")
    step.fetch()
    before("compute")
    step.compute()
    before("combine")
    y_TH = step.combine()
    engine.synchronize()
    return y_TH.cpu()


def require_right(engine: Engine, number: int, layer: int = 1) -> None:
    """A whole step gives the never-failed engine's bits."""
    got = walk(engine, number, layer)
    want = answer(engine.group.rank, number, layer, engine.group.device)
    assert torch.equal(got, want), f"wrong step {number}"


# ---- launching


@dataclass
class Run:
    """What became of a launch."""

    results: list[Any] = field(default_factory=list)
    failures: dict[int, BaseException] = field(default_factory=dict)
    said: list[tuple[int, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def by(self, rank: int) -> list[Any]:
        """What a rank reported."""
        return [message for r, message in self.said if r == rank]


def run(
    fn: Callable[..., Any],
    ranks: int,
    transport: str,
    *args: object,
    hear: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> Run:
    """``launch`` that returns failures and reports instead of raising.

    ``threads@cuda`` means transport ``threads`` on a GPU.
    """
    transport, _, device = transport.partition("@")
    warm_up()
    out = Run()

    def listen(rank: int, message: Any) -> None:
        out.said.append((rank, message))
        if hear is not None:
            hear(rank, message)

    start = time.monotonic()
    try:
        options["device"] = device or "cpu"
        out.results = launch(fn, ranks, transport, args, on_event=listen, **options)
    except LaunchError as error:
        out.failures = error.failures
    out.seconds = time.monotonic() - start
    return out


def nothing(group: EPGroup) -> int:
    """The smallest rank."""
    return group.rank


@functools.cache
def warm_up() -> None:
    """Start the fork server, so that no test's clock or leak check sees it."""
    launch(nothing, 2, "shm")


# ---- what is left behind


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No process, descriptor, shared memory or temporary file outlives the block."""
    warm_up()
    before = _traces()
    yield
    left: dict[str, set[str]] = {}
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        gc.collect()
        after = _traces()
        left = {kind: after[kind] - before[kind] for kind in after}
        if not any(left.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {left}")


def _traces() -> dict[str, set[str]]:
    me = psutil.Process()
    temp = tempfile.gettempdir()
    names = os.listdir(temp)
    return {
        "processes": {str(p.pid) for p in me.children(recursive=True)},
        "descriptors": {str(i) for i in range(me.num_fds())},
        "shared memory": set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set(),
        "files": {n for n in names if n.startswith("evenep")},
    }


@dataclass(frozen=True)
class Footprint:
    """What this process holds."""

    fds: int
    threads: int
    maps: int
    children: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        me = psutil.Process()
        maps = sum("evenep" in m.path for m in me.memory_maps(grouped=False))
        return cls(me.num_fds(), threading.active_count(), maps, len(me.children()))

    def grown(self, before: Footprint) -> dict[str, int]:
        """Kinds of which there are more than before."""
        pairs = ((k, getattr(self, k) - getattr(before, k)) for k in self.__dataclass_fields__)
        return {kind: more for kind, more in pairs if more > 0}


def settled_growth(before: Footprint, wait_s: float = 2.0) -> dict[str, int]:
    """Growth since ``before``, once threads and sockets on their way out have gone."""
    deadline = time.monotonic() + wait_s
    while (grown := Footprint.now().grown(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return grown


def every(results: Sequence[Any], expected: Any) -> None:
    """All ranks say the same."""
    for rank, got in enumerate(results):
        assert got == expected, f"rank {rank}: {got!r}"
