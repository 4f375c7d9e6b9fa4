"""``python -m evenep.bench.host_time``: how long the host is busy with one step on a GPU.

Eager: from calling the engine to its return, nothing waited for. Captured: one replay. The sizes
are small, because the host's part doesn't depend on them; the GPU is kept busy beforehand, so that
no launch waits for it.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import Engine, EPConfig, EPGroup, ExpertWeights, launch

STEPS, ROUNDS = 20, 10
QUEUE_CYCLES = 40_000_000  # about 20 ms


def config(ranks: int, policy: str) -> EPConfig:
    """A small MXFP4 layer with slots."""
    return EPConfig(
        num_experts=64,
        top_k=8,
        hidden_size=512,
        intermediate_size=256,
        max_tokens_per_rank=16,
        ranks=ranks,
        slots_per_rank=0 if ranks == 1 else 4,
        policy=policy,
        weight_format="mxfp4",
    )


def _microseconds(run: Callable[[], object]) -> list[float]:
    """Per call, over rounds."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUE_CYCLES)
        start = time.perf_counter()
        for _ in range(STEPS):
            run()
        times.append((time.perf_counter() - start) / STEPS * 1e6)
    torch.cuda.synchronize()
    return times


def _profiled(run: Callable[[], object]) -> str:
    """Where the host's time goes, by function."""
    profile, text = cProfile.Profile(), io.StringIO()
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * QUEUE_CYCLES)
    profile.enable()
    for _ in range(2 * STEPS):
        run()
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(35)
    return text.getvalue()


def _rank(group: EPGroup, policy: str, profile: bool) -> dict[str, Any]:
    cfg = config(group.size, policy)
    g = torch.Generator("cuda").manual_seed(group.rank)
    x = torch.randn(16, cfg.hidden_size, generator=g, device="cuda").bfloat16()
    ids = torch.rand(16, 64, generator=g, device="cuda").topk(8, dim=1).indices
    weights = torch.rand(16, 8, generator=g, device="cuda")
    with Engine(cfg, group, ExpertWeights.random(cfg)) as engine:
        out = torch.empty_like(x)

        def step() -> None:
            engine(x, ids, weights, out=out)

        for _ in range(3):
            step()
        engine.synchronize()
        found: dict[str, Any] = {"eager": _microseconds(step)}
        if profile:
            found["profile"] = _profiled(step)
        graph = engine.capture(step)
        found["captured"] = _microseconds(graph.replay)
        engine.synchronize()
        return found


def main(
    profile: Annotated[bool, typer.Option(help="Show where an eager step's time goes.")] = False,
) -> None:
    """Host time of one step on a GPU."""
    table = Table(title=f"host time of one step, µs, {torch.cuda.get_device_name()}")
    for name in ("ranks", "transport", "policy", "kind", "median", "range"):
        table.add_column(name, justify="right")
    for ranks, transport in ((1, "threads"), (2, "symm")):
        for policy in ("static", "auto"):
            found = launch(_rank, ranks, transport, (policy, profile), device="cuda")[0]
            if text := found.pop("profile", ""):
                print(text)  # noqa: T201
            for kind, times in found.items():
                table.add_row(
                    str(ranks), transport, policy, kind, f"{statistics.median(times):.0f}",
                    f"{min(times):.0f}-{max(times):.0f}",
                )  # fmt: skip
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
