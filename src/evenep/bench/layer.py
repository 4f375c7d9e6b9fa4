"""``make bench``: one layer under ``auto`` against the same engine under ``static``.

R processes over shared memory on this machine, synthetic weights of the F1 fixture's shape. Each
pair runs both policies on the same input, one right after the other, in alternating order; the
ratio static / auto of each pair is what counts, since both halves see the same machine.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..activation import Activation
from ..config import EPConfig
from ..engine import Engine
from ..group import EPGroup
from ..launch import launch
from ..weights.source import ExpertWeights
from .session import environment
from .workloads import Workload


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; tokens are per rank."""

    workload: str
    tokens: int
    pairs: int


CASES = (Case("W2", 512, 12), Case("W0", 512, 12), Case("W2", 8, 40), Case("W0", 8, 40))
WARMUP = 2


@dataclass(slots=True)
class Pair:
    """Seconds of one pair on one rank, and what the planner did."""

    static_s: float
    auto_s: float
    imbalance_before: float
    imbalance_after: float
    replicas: int
    chosen: str


def layer_config(ranks: int) -> EPConfig:
    """The F1 fixture's routed experts: 112 of them, top-16, MXFP4, SiTU."""
    return EPConfig(
        num_experts=112,
        top_k=16,
        hidden_size=512,
        intermediate_size=1024,
        max_tokens_per_rank=max(case.tokens for case in CASES),
        ranks=ranks,
        slots_per_rank=-(-112 // ranks) if ranks > 1 else 0,
        activation=Activation.situ(),
        weight_format="mxfp4",
    )


def _measure(group: EPGroup, cfg: EPConfig) -> list[list[Pair]]:
    """Every case's pairs on this rank."""
    with Engine(cfg, group, ExpertWeights.random(cfg)) as engine:
        return [_case(engine, group, case) for case in CASES]


def _case(engine: Engine, group: EPGroup, case: Case) -> list[Pair]:
    cfg = engine.cfg
    workload = Workload(case.workload, cfg.num_experts, cfg.top_k, cfg.ranks)
    generator = torch.Generator().manual_seed(group.rank)
    pairs = []
    for step in range(-WARMUP, case.pairs):
        # One routing all along: the weights it touches are warm, as in steady state.
        ids_TK = workload.ids(0, group.rank, case.tokens)
        x_TH = torch.randn(case.tokens, cfg.hidden_size, generator=generator).bfloat16()
        weights_TK = torch.rand(ids_TK.shape, generator=generator)
        seconds = {}
        for policy in ("static", "auto") if step % 2 else ("auto", "static"):
            start = time.perf_counter()
            engine(x_TH, ids_TK, weights_TK, policy=policy)
            seconds[policy] = time.perf_counter() - start
            if policy == "auto":
                record = engine.records[-1]
        if step >= 0:
            pairs.append(
                Pair(
                    seconds["static"],
                    seconds["auto"],
                    record.imbalance_before,
                    record.imbalance_after,
                    record.replicas,
                    record.chosen,
                )
            )
    return pairs


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start.")] = 2,
) -> None:
    """Print static's time over auto's, per workload, with its spread."""
    cfg, console = layer_config(ranks), Console()
    by_rank = launch(_measure, ranks, "shm", (cfg,))
    where = environment()
    table = Table(
        title=f"one layer, {ranks} ranks over shm on {where['cores']} cores ({where['cpu']}): "
        "static / auto, above 1 is faster"
    )
    columns = ("workload", "tokens/rank", "imbalance", "reached", "replicas", "plan")
    for column in (*columns, "static ms", "auto ms", "ratio median", "quartiles", "min … max"):
        table.add_column(column, justify="left" if column in ("workload", "plan") else "right")
    for i, case in enumerate(CASES):
        table.add_row(*_row(case, [rank[i] for rank in by_rank]))
    console.print(table)


def _row(case: Case, by_rank: list[list[Pair]]) -> list[str]:
    slowest = [
        (max(p.static_s for p in pair), max(p.auto_s for p in pair))
        for pair in zip(*by_rank, strict=True)
    ]
    ratios = sorted(static / auto for static, auto in slowest)
    low, middle, high = statistics.quantiles(ratios, n=4)
    last = by_rank[0][-1]
    return [
        case.workload,
        str(case.tokens),
        f"{last.imbalance_before:.2f}",
        f"{last.imbalance_after:.2f}",
        str(last.replicas),
        last.chosen,
        f"{statistics.median(s for s, _ in slowest) * 1e3:.1f}",
        f"{statistics.median(a for _, a in slowest) * 1e3:.1f}",
        f"{middle:.2f}",
        f"{low:.2f} … {high:.2f}",
        f"{ratios[0]:.2f} … {ratios[-1]:.2f}",
    ]


if __name__ == "__main__":
    typer.run(main)
