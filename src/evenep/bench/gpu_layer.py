"""``python -m evenep.bench.gpu_layer``: a Kimi-K3 layer over 8 virtual ranks on one GPU.

The ranks are real (engines, windows, slots, plans of their own) but run one after the other, stage
by stage, so that each has the GPU to itself; a stage takes as long as its slowest rank, and a layer
as long as its stages: what 8 GPUs would do, with this GPU's memory in the place of their links.
Rows travel at memory speed here, so dispatch and combine look better than over NVLink; replicas are
copied by 8 multiprocessors at about NVLink's speed (``bench.exchange`` prints it).

*cold* empties the slots before every step: each replica is fetched. *warm* keeps them.

R ranks, E experts, T tokens a rank, K top-k.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import Engine, EPConfig, EPGroup, ExpertWeights, launch
from ..activation import Activation
from ..device import buffers
from ..device.machine import DeviceMachine
from ..device.work import DeviceWork
from ..formats import format_of
from ..machine import Opening
from ..plan.bounds import Case, skewed_counts
from .workloads import Workload

RANKS, EXPERTS, TOP_K, WIDTH, INNER = 8, 896, 16, 3584, 3072
POLICIES = ("static", "exact", "auto")
ROOM = 2.5
"""Receive rows of a rank, in means of a full step: 8 ranks of one GPU can't all have the worst."""
STAGES = ("count", "plan", "dispatch", "experts", "fold", "combine")
QUEUE_CYCLES = 40_000_000  # the GPU idles about 20 ms while a step is queued: no launch shows


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step of every rank."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    max_vio: float
    imbalance: float


def draw(tokens: int, skew: str, seed: int) -> Inputs:
    """Router outputs, K distinct experts per token.

    Args:
        skew: a number: a lognormal popularity with about this max over mean - 1, homes contiguous;
            or the name of a workload (``bench.workloads``), ``W2`` for a hot rank.
    """
    if skew.startswith("W"):
        log_E = torch.from_numpy(Workload(skew, EXPERTS, TOP_K, RANKS).log_popularity(0))
    else:
        case = Case("", EXPERTS, RANKS, TOP_K, 4096, float(skew))
        counts_RE = skewed_counts(case, np.random.default_rng(seed))
        log_E = torch.from_numpy(counts_RE.sum(0)).double().clamp(min=0.1).log()
    share_E = log_E.cuda()
    g = torch.Generator("cuda").manual_seed(seed)
    x, ids, weights = [], [], []
    for _ in range(RANKS):
        noise = torch.rand(tokens, EXPERTS, generator=g, device="cuda").log().neg().log()
        ids.append((share_E - noise).topk(TOP_K, dim=1).indices)
        weights.append(torch.rand(tokens, TOP_K, generator=g, device="cuda"))
        x.append(torch.randn(tokens, WIDTH, generator=g, device="cuda").bfloat16())
    count_E = torch.bincount(torch.cat(ids).flatten(), minlength=EXPERTS).double()
    load_R = count_E.view(RANKS, -1).sum(1)
    max_vio, imbalance = (float(v.max() / v.mean()) for v in (count_E, load_R))
    return Inputs(x, ids, weights, max_vio - 1, imbalance)


class Virtual:
    """All ranks of a group, driven by one thread."""

    def __init__(self, engines: list[Engine]) -> None:
        machines = [e._machine for e in engines]
        assert all(isinstance(m, DeviceMachine) for m in machines)
        self.machines: list[DeviceMachine] = machines  # type: ignore[assignment]
        for machine in self.machines:
            assert machine.hardware is not None
            machine.planner.use(replace(machine.hardware, parallel=0))  # a GPU each

    def works(self, inputs: Inputs, policy: str) -> list[DeviceWork]:
        """A step of every rank, not begun."""
        return [
            DeviceWork(m, Opening(layer=0, lane=0, epoch=0, policy=policy, ids_TK=i, weights_TK=w))
            for m, i, w in zip(self.machines, inputs.ids, inputs.weights, strict=True)
        ]

    def step(
        self, inputs: Inputs, policy: str, *, cold: bool
    ) -> tuple[dict[str, float], list[Tensor], list[DeviceWork]]:
        """Seconds of each stage (slowest rank), outputs, and the works for their records."""
        if cold:
            for machine in self.machines:
                for held in machine.residency.values():
                    held.forget()
        works = self.works(inputs, policy)
        outputs: list[Tensor] = [torch.empty_like(x) for x in inputs.x]
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUE_CYCLES)
        spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {s: [] for s in STAGES}

        def timed(stage: str, run: Callable[[int], object]) -> None:
            for rank in range(len(works)):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                run(rank)
                last.record()
                spans[stage].append((first, last))

        def experts(rank: int) -> None:
            works[rank].fetch()
            works[rank].timeline.mark("arrived")
            works[rank].settle()
            works[rank].run_groups()

        timed("count", lambda r: works[r].count())
        timed("plan", lambda r: works[r].make_plan())
        timed("dispatch", lambda r: works[r].dispatch(inputs.x[r]))
        timed("experts", experts)
        timed("fold", lambda r: works[r].fold())
        timed("combine", lambda r: works[r].collect(outputs[r]))
        torch.cuda.synchronize()
        slowest = {s: max(a.elapsed_time(b) for a, b in pairs) / 1e3 for s, pairs in spans.items()}
        return slowest, outputs, works


def parity(cfg: EPConfig, source: ExpertWeights, inputs: Inputs, got: list[Tensor]) -> float:
    """Relative L2 of a few tokens of every rank against fp32 products of decoded weights."""
    picks = [(r, t) for r in range(RANKS) for t in (0, inputs.ids[r].shape[0] - 1)]
    specs = format_of(cfg).specs(cfg)
    row = {s.name: torch.empty(s.shape, dtype=s.dtype, device="cuda") for s in specs}
    want = torch.zeros(len(picks), WIDTH, device="cuda")
    for i, (r, t) in enumerate(picks):
        for k in range(TOP_K):
            source.load(0, [int(inputs.ids[r][t, k])], [row])
            w13, w2 = format_of(cfg).decode(row, torch.float32)
            h = (w13 @ inputs.x[r][t].float()).bfloat16().float()
            gate, up = h[:INNER], h[INNER:]
            soft = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate)
            a = (soft * 25.0 * torch.tanh(up / 25.0)).bfloat16().float()
            want[i] += (w2 @ a).bfloat16().float() * inputs.weights[r][t, k]
    have = torch.stack([got[r][t].float() for r, t in picks])
    return float((have - want).norm() / want.norm())


def config(tokens: int) -> EPConfig:
    """Kimi-K3's routed experts on 8 ranks; slots for a whole home group, so that exact fits."""
    return EPConfig(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        max_tokens_per_rank=tokens,
        ranks=RANKS,
        slots_per_rank=14,
        activation=Activation.situ(),
        weight_format="mxfp4",
        timeout_s=120.0,
    )


def _drive(
    group: EPGroup, cfg: EPConfig, tokens: list[int], skews: list[str], repeats: int,
    engines: dict[int, Engine], ready: threading.Barrier, rows: list[list[str]],
) -> None:  # fmt: skip
    source = ExpertWeights.random(cfg, device="cuda")
    with Engine(cfg, group, source) as engine:
        engines[group.rank] = engine
        ready.wait()
        if group.rank == 0:
            try:
                virtual = Virtual([engines[r] for r in range(RANKS)])
                _grid(virtual, cfg, source, tokens, skews, repeats, rows)
            finally:
                engines.clear()
        ready.wait()


def _grid(
    virtual: Virtual, cfg: EPConfig, source: ExpertWeights, tokens: list[int],
    skews: list[str], repeats: int, rows: list[list[str]],
) -> None:  # fmt: skip
    for T in tokens:
        for skew in skews:
            draws = [draw(T, skew, 100 * T + s) for s in range(2)]
            base: list[float] = []
            for policy, cold in (
                ("static", False),
                ("exact", True),
                ("auto", True),
                ("auto", False),
            ):
                totals: list[float] = []
                works: list[DeviceWork] = []
                stages: dict[str, float] = {}
                best = None
                for turn in range(repeats + 1):
                    seconds, y, works = virtual.step(draws[turn % 2], policy, cold=cold)
                    if turn == 0:
                        if policy == "auto" and cold:
                            best = parity(cfg, source, draws[0], y)
                        continue  # compiles and warms
                    totals.append(sum(seconds.values()))
                    stages = seconds
                records = [w.record() for w in works]
                base = totals if policy == "static" else base
                ratios = [a / b for a, b in zip(base, totals, strict=True)]
                exposed = max(r.stage_s["fetch"] for r in records)
                rows.append([
                    f"{T}, {skew}", f"{draws[0].max_vio:.1f}", f"{draws[0].imbalance:.2f}",
                    policy + (" cold" if cold else " warm" if policy == "auto" else ""),
                    f"{statistics.median(totals) * 1e6:.0f}",
                    f"{min(totals) * 1e6:.0f}-{max(totals) * 1e6:.0f}",
                    f"{statistics.median(ratios):.3f}",
                    " ".join(f"{stages[s] * 1e6:.0f}" for s in STAGES),
                    f"{records[0].imbalance_after:.2f}", str(records[0].replicas),
                    f"{exposed * 1e6:.0f}", "" if best is None else f"{best:.1e}",
                ])  # fmt: skip


def _cap_routes(cfg: EPConfig, home_rows: int) -> int:
    """Stands in for the engine's own, which has room for the worst routing (see ``ROOM``)."""
    return int(ROOM * cfg.max_tokens_per_rank * cfg.top_k)


def main(
    tokens: Annotated[str, typer.Option(help="Tokens per rank.")] = "16,128,512,2048,8192",
    skews: Annotated[str, typer.Option(help="MaxVio, or W0 … W7.")] = "0.2,1,6,W2",
    repeats: Annotated[int, typer.Option(help="Timed steps of each kind.")] = 5,
) -> None:
    """Layer time of 8 virtual ranks: auto and exact against static, slowest rank counted."""
    sizes = [int(t) for t in tokens.split(",")]
    cfg = config(max(sizes))
    setattr(buffers, "cap_routes", _cap_routes)  # noqa: B010
    rows: list[list[str]] = []
    ready, engines = threading.Barrier(RANKS), dict[int, Engine]()
    args = (cfg, sizes, skews.split(","), repeats, engines, ready, rows)
    launch(_drive, RANKS, "threads", args, device="cuda")
    title = f"8 virtual ranks, {torch.cuda.get_device_name()}, µs; {repeats} steps of each kind"
    table = Table(title=title)
    for name in (
        "T, skew", "MaxVio", "imbalance", "policy", "layer", "range", "static /", " ".join(STAGES),
        "after", "replicas", "exposed", "parity",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=170).print(table)


if __name__ == "__main__":
    typer.run(main)
