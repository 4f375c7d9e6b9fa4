"""``python -m evenep.bench.exchange``: the exchange kernels against plain copies, on one GPU.

R virtual ranks live in one process: every rank has its own receive buffer, and rank 0's kernels
reach them through address tables as they would over a link. Each kernel runs beside a
``Tensor.copy_`` that reads and writes as many bytes in total, in CUDA graphs, alternating; what
counts is copy time over kernel time.

T tokens a rank, K top-k, E experts, R ranks, H row width, N receive rows, G groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..kernels.combine import combine_compact, combine_exact, fold
from ..kernels.count import HEADER, RouteScratch, count_routes, push_counts
from ..kernels.dispatch import dispatch
from ..kernels.fetch import fetch_slots
from ..kernels.positions import place_routes
from ..kernels.settle import settle

RANKS, EXPERTS, ALIGN = 8, 896, 16
SHAPES = ((3584, 16), (7168, 8))  # (H, K)
TOKENS = (16, 128, 512, 2048, 8192)
REPLAYS = 15
FETCH_PROGRAMS = (4, 8, 16, 32)
EXPERT_BYTES = (2 * 2048 * 1792, 2 * 2048 * 112, 3584 * 1024, 3584 * 64)  # MXFP4, I = 2048
FETCH_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: quartiles of the replays."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        return cls(*statistics.quantiles(seconds, n=4))

    def __str__(self) -> str:
        return f"{self.median * 1e6:.1f} ({self.low * 1e6:.1f} … {self.high * 1e6:.1f})"


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What rank 0 needs for one step, and the bytes that each kernel moves for it."""

    ids_TK: Tensor
    dest_TK: Tensor
    row_TK: Tensor
    x_TH: Tensor
    y_TH: Tensor
    weights_TK: Tensor
    rows: list[Tensor]
    chain: list[Tensor]
    weight: list[Tensor]
    start_G: Tensor
    count_G: Tensor
    rows_1: Tensor
    take_ER: Tensor
    row_ER: Tensor
    moved: dict[str, int]


def make_case(T: int, H: int, K: int, device: torch.device) -> Case:
    """Uniform routing, every expert at home; all ranks' rows arrive."""
    torch.manual_seed(T + H)
    scores = torch.rand(RANKS * T, EXPERTS, device=device)
    ids_AK = scores.topk(K, dim=1).indices  # A: tokens of all ranks
    per_rank = EXPERTS // RANKS
    count_E = torch.bincount(ids_AK.reshape(-1), minlength=EXPERTS)
    padded_RG = ((count_E + ALIGN - 1) // ALIGN * ALIGN).view(RANKS, per_rank)
    start_E = (padded_RG.cumsum(1) - padded_RG).view(-1)
    order = torch.argsort(ids_AK.reshape(-1), stable=True)
    first_E = count_E.cumsum(0) - count_E
    row_n = torch.empty_like(order)  # n: all routes of all ranks
    sorted_ids = ids_AK.reshape(-1)[order]
    row_n[order] = torch.arange(order.numel(), device=device) - first_E[sorted_ids]
    row_AK = (row_n + start_E[ids_AK.reshape(-1)]).view_as(ids_AK).int()
    dest_AK = (ids_AK // per_rank).int()
    ids_TK = ids_AK[:T].contiguous()
    mine_E = torch.bincount(ids_TK.reshape(-1), minlength=EXPERTS).int()
    take_ER = torch.zeros(EXPERTS, RANKS, dtype=torch.int32, device=device)
    home_E = torch.arange(EXPERTS, device=device) // per_rank
    take_ER[torch.arange(EXPERTS, device=device), home_E] = mine_E
    row_ER = start_E[:, None].expand(EXPERTS, RANKS).int().contiguous()
    n = int(padded_RG.sum(1).max())
    case = Case(
        ids_TK=ids_TK,
        dest_TK=dest_AK[:T].contiguous(),
        row_TK=row_AK[:T].contiguous(),
        x_TH=torch.randn(T, H, device=device).bfloat16(),
        y_TH=torch.empty(T, H, dtype=torch.bfloat16, device=device),
        weights_TK=torch.rand(T, K, device=device) / K,
        rows=[torch.zeros(n, H, dtype=torch.bfloat16, device=device) for _ in range(RANKS)],
        chain=[torch.zeros(n, dtype=torch.int32, device=device) for _ in range(RANKS)],
        weight=[torch.zeros(n, device=device) for _ in range(RANKS)],
        start_G=start_E[:per_rank].int(),
        count_G=count_E[:per_rank].int(),
        rows_1=padded_RG[0].sum().int().view(1),
        take_ER=take_ER,
        row_ER=row_ER,
        moved={},
    )
    for source in range(RANKS):
        at = slice(source * T, (source + 1) * T)
        dest_TK, row_TK = dest_AK[at].contiguous(), row_AK[at].contiguous()
        dispatch(case.x_TH, case.weights_TK, dest_TK, row_TK, *tables(case))
    case.moved.update(_bytes(case, H))
    return case


def _bytes(case: Case, H: int) -> dict[str, int]:
    """Bytes read and written by each kernel; payload only."""
    T, K = case.ids_TK.shape
    leads = sum(int((case.dest_TK == r).any(1).sum()) for r in range(RANKS))
    real = int(case.count_G.sum())
    rows_N = torch.arange(case.chain[0].numel(), device=case.x_TH.device)[:, None]
    in_group = (rows_N >= case.start_G) & (rows_N < case.start_G + case.count_G)
    words = case.chain[0][in_group.any(1)]
    leaders, alone = int((words < 0).sum()), int((words == -1).sum())
    rows = {
        "dispatch": T + leads,
        "settle": leaders - alone + int(case.rows_1) - leaders,  # read, written or zeroed
        "fold": real + leaders,
        "combine_exact": T * K + T,
        "combine_compact": leads + T,
    }
    return {name: max(count, 1) * H * 2 for name, count in rows.items()}


def tables(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Address tables of rows, chain and weight."""
    return _addresses(case.rows), _addresses(case.chain), _addresses(case.weight)


def _addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], device=tensors[0].device)


def calls(case: Case) -> dict[str, Callable[[], None]]:
    """One call of each kernel."""
    rows_R, chain_R, weight_R = tables(case)
    dest_TK, row_TK, w, y_TH = case.dest_TK, case.row_TK, case.weights_TK, case.y_TH
    groups = (case.start_G, case.count_G, case.rows_1)
    # Rank 0's own rows for what changes them, so that other kernels' inputs stay as they are.
    folded_NH = case.rows[0].clone()
    settled = (case.rows[0], case.weight[0], case.chain[0], *groups)
    summed = (folded_NH, case.weight[0], case.chain[0], *groups)
    return {
        "dispatch": lambda: dispatch(case.x_TH, w, dest_TK, row_TK, rows_R, chain_R, weight_R),
        "settle": lambda: settle(*settled, dest_TK.shape[1]),
        "fold": lambda: fold(*summed, dest_TK.shape[1]),
        "combine_exact": lambda: combine_exact(dest_TK, row_TK, w, rows_R, y_TH),
        "combine_compact": lambda: combine_compact(dest_TK, row_TK, rows_R, y_TH),
    }


def route_call(case: Case) -> tuple[Callable[[], None], Tensor, Tensor]:
    """What precedes dispatch (count, push to all ranks, place), and the two tensors it fills."""
    (T, K), device = case.ids_TK.shape, case.x_TH.device
    scratch = RouteScratch.make(T, K, EXPERTS, device)
    counts = torch.zeros(RANKS, RANKS, HEADER + EXPERTS, dtype=torch.int32, device=device)
    ptrs_R = _addresses(list(counts))
    dest_TK, row_TK = torch.empty_like(case.dest_TK), torch.empty_like(case.row_TK)

    def route() -> None:
        assert counts.numel()  # kept alive: kernels only know its addresses
        count_routes(case.ids_TK, scratch, EXPERTS)
        push_counts(scratch, (0, 0, 0, 0, T), ptrs_R, 0, EXPERTS)
        place_routes(case.ids_TK, scratch, case.take_ER, case.row_ER, 0, dest_TK, row_TK, 2**31 - 1)

    return route, dest_TK, row_TK


def copy_call(moved: int, device: torch.device) -> Callable[[], None]:
    """A plain copy that reads and writes ``moved`` bytes in total."""
    src = torch.zeros(max(moved // 2, 16), dtype=torch.uint8, device=device)
    dest = torch.empty_like(src)

    def copy() -> None:
        dest.copy_(src)

    return copy


def side_by_side(fns: list[Callable[[], None]], repeats: int) -> list[Timing]:
    """Seconds of one call of each, from graphs of ``repeats`` calls replayed in turn."""
    graphs = []
    for fn in fns:
        fn()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                fn()
        graphs.append(graph)
    seconds: list[list[float]] = [[] for _ in fns]
    for replay in range(-2, REPLAYS):
        for graph, into in zip(graphs, seconds, strict=True):
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 0:
                into.append(start.elapsed_time(end) / 1e3 / repeats)
    return [Timing.of(s) for s in seconds]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


def bench_kernels(table: Table, device: torch.device) -> None:
    """A row per kernel, shape and T."""
    for H, K in SHAPES:
        for T in TOKENS:
            case = make_case(T, H, K, device)
            repeats = 20 if T <= 512 else 4
            for name, fn in calls(case).items():
                kernel, copy = side_by_side([fn, copy_call(case.moved[name], device)], repeats)
                table.add_row(
                    name, str(T), str(H), str(K), str(kernel), str(copy),
                    f"{100 * copy.median / kernel.median:.0f} %",
                    f"{case.moved[name] / kernel.median / 1e9:.0f}",
                )  # fmt: skip
            (route,) = side_by_side([route_call(case)[0]], repeats)
            table.add_row("count, push, place", str(T), "", str(K), str(route), "", "", "")
            table.add_section()


def bench_fetch(table: Table, device: torch.device) -> None:
    """A row per number of programs; bytes are counted once, as a link would carry them."""
    home = [
        [torch.zeros(FETCH_SLOTS, size, dtype=torch.uint8, device=device) for _ in range(RANKS)]
        for size in EXPERT_BYTES
    ]
    slots = [torch.empty(FETCH_SLOTS, s, dtype=torch.uint8, device=device) for s in EXPERT_BYTES]
    src_ptrs_XR = torch.stack([_addresses(rows_R) for rows_R in home])
    experts = torch.arange(RANKS * FETCH_SLOTS, dtype=torch.int32, device=device)
    slot_B = experts[:FETCH_SLOTS] * 5 % experts.numel()  # from all ranks
    moved_B, dest_ptrs_X = torch.ones_like(slot_B), _addresses(slots)
    home_E, local_E = experts % RANKS, experts // RANKS
    moved = FETCH_SLOTS * sum(EXPERT_BYTES)
    copy = copy_call(2 * moved, device)
    for programs in FETCH_PROGRAMS:

        def fetch(programs: int = programs) -> None:
            fetch_slots(
                slot_B, moved_B, home_E, local_E, src_ptrs_XR, EXPERT_BYTES, dest_ptrs_X, programs
            )

        timing, plain = side_by_side([fetch, copy], 2)
        table.add_row(
            str(programs), str(timing), f"{moved / timing.median / 1e9:.0f}", str(plain),
            f"{moved / plain.median / 1e9:.0f}",
        )  # fmt: skip


def main(
    kernels: Annotated[bool, typer.Option(help="Time the row kernels.")] = True,
    fetch: Annotated[bool, typer.Option(help="Time fetching replicas.")] = True,
) -> None:
    """Print each kernel's time beside a copy of the same bytes, with quartiles."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    console = Console(width=130)
    if kernels:
        table = Table(title=f"{RANKS} virtual ranks on one {torch.cuda.get_device_name()}")
        for column in ("kernel", "T", "H", "K", "µs (quartiles)", "copy µs", "of copy", "GB/s"):
            table.add_column(column, justify="left" if column == "kernel" else "right")
        bench_kernels(table, device)
        console.print(table)
    if fetch:
        size = FETCH_SLOTS * sum(EXPERT_BYTES) / 1e6
        table = Table(title=f"fetch_slots: {FETCH_SLOTS} experts, {size:.0f} MB")
        for column in ("programs", "µs (quartiles)", "GB/s one way", "copy µs", "copy GB/s"):
            table.add_column(column, justify="right")
        bench_fetch(table, device)
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
