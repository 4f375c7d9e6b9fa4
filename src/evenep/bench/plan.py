"""``python -m evenep.bench.plan``: what a plan costs on this GPU.

Per size, policy and skew: GPU time of one plan, as a replayed CUDA graph and launched eagerly, and
the host's time to queue it. *Cold* starts from empty slots at every plan; *warm* plans one of a few
draws of the same popularity after the other, so most replicas are resident. The reset between cold
plans is part of neither figure.

Each figure is the median over plans, with the 10th and 90th percentile. Letters: R ranks,
E experts, K top-k, B slots.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..config import EPConfig
from ..device.planner import DevicePlan, DevicePlanner, DeviceResidency
from ..errors import UnsupportedError, explain
from ..plan import Hardware, Placement
from ..plan.bounds import Case, skewed_counts
from ..plan.placement import Ints

TOP_K = 16
SIZES = ((8, 896, 14), (64, 896, 14))  # R, E, B
SKEWS = (0.2, 1.0, 6.0)  # MaxVio
POLICIES = ("static", "exact", "bounded", "auto")
DRAWS = 8
# Kimi-K3's MXFP4 expert on an H200 (docs/planning.md); rows in 16s at decode, in 128s at prefill.
MACHINE = Hardware(row_ps=110_000, read_ps=4_300_000, launch_ps=1_500_000, fetch_ps=46_000_000)


@dataclass(slots=True)
class Scene:
    """One lane of one layer, and the counts it will see."""

    planner: DevicePlanner
    policy: str
    window: Tensor
    draws: list[Tensor]
    held: DeviceResidency
    out: DevicePlan

    @classmethod
    def of(cls, size: tuple[int, int, int], policy: str, skew: float, tokens: int) -> Scene:
        R, E, B = size
        cfg = EPConfig(
            num_experts=E,
            top_k=TOP_K,
            hidden_size=3584,
            intermediate_size=3072,
            max_tokens_per_rank=tokens,
            ranks=R,
            slots_per_rank=-(-E // R) if policy == "exact" else B,
            policy=policy,
            row_alignment=16 if tokens <= 128 else 128,
        )
        device = torch.device("cuda", torch.cuda.current_device())
        planner = DevicePlanner(cfg, Placement.contiguous(E, R), 0, MACHINE, device)
        draws = [
            torch.from_numpy(c.astype(np.int32)).to(device)
            for c in similar_counts(Case("", E, R, tokens, TOP_K, skew))
        ]
        window = torch.zeros_like(draws[0])
        return cls(planner, policy, window, draws, planner.residency(), planner.buffers())

    def plan(self) -> None:
        self.planner.plan(self.window, self.held, self.policy, self.out)

    def steps(self, warm: bool, times: int) -> Iterator[None]:
        """The state before each of ``times`` plans."""
        for step in range(times):
            self.window.copy_(self.draws[step % len(self.draws)])
            if not warm:
                self.held.forget()
            else:
                self.held.pace.zero_()
            yield


def similar_counts(case: Case) -> list[Ints]:
    """Draws from one popularity: what consecutive steps of one layer look like."""
    first = skewed_counts(case, np.random.default_rng(0))
    share_E = first.sum(axis=0) / first.sum()
    rng = np.random.default_rng(1)
    routes = case.tokens * case.top_k
    drawn = [rng.multinomial(routes, share_E, size=case.ranks) for _ in range(DRAWS - 1)]
    return [first, *drawn]


def gpu_us(run: Callable[[], None], states: Iterator[None]) -> list[float]:
    """Microseconds between events around each run; the GPU is kept busy so it never waits."""
    pairs = []
    for _ in states:
        torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]  # the host queues meanwhile
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        pairs.append((start, end))
        torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def host_us(run: Callable[[], None], states: Iterator[None]) -> list[float]:
    """Microseconds the host takes to queue each run."""
    found = []
    for _ in states:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered):.1f} ({low:.1f} … {high:.1f})"


def row(scene: Scene, warm: bool, times: int) -> list[str]:
    """Eager, graph and host figures of one scene."""
    for _ in scene.steps(warm, 2 * DRAWS):  # compiles, and fills the slots
        scene.plan()
    eager = gpu_us(scene.plan, scene.steps(warm, times))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scene.plan()
    replay = gpu_us(graph.replay, scene.steps(warm, times))
    host = host_us(scene.plan, scene.steps(warm, times))
    return [spread(replay), spread(eager), spread(host)]


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a rank brings.")] = 2048,
    times: Annotated[int, typer.Option(min=10, help="Plans per figure.")] = 100,
) -> None:
    """Print GPU and host microseconds per plan, with their spread."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            explain("nothing to measure", where="bench.plan", expected="an NVIDIA GPU", got="none")
        )
    table = Table(
        title=f"one plan, µs: median (10 % … 90 %), {tokens} tokens a rank, K = {TOP_K}, "
        f"{torch.cuda.get_device_name()}"
    )
    for column in ("R, E, B", "policy", "MaxVio", "slots"):
        table.add_column(column)
    for column in ("graph", "eager", "host", "replicas", "fetches", "chosen"):
        table.add_column(column, justify="right")
    for size in SIZES:
        for policy in POLICIES:
            for skew in SKEWS:
                for warm in (False, True):
                    scene = Scene.of(size, policy, skew, tokens)
                    figures = row(scene, warm, times)
                    n = scene.planner.numbers(scene.out)
                    table.add_row(
                        str(size),
                        policy,
                        f"{skew:g}",
                        "warm" if warm else "cold",
                        *figures,
                        str(n["replicas"]),
                        str(n["fetches"]),
                        scene.planner.chosen_name(policy, n["chosen"]),
                    )
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
