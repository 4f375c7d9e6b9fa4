"""``python -m evenep.bench.experts``: MXFP4 expert MLPs on one GPU, side by side in one run.

E experts, m rows each, H row width, I FFN width. Backends:

* ``gluon``: the runner as the engine calls it: gate+up, activation and down in two launches, plans
  on the device;
* ``humming``: batch-invariant W4A16 with its own tuning, if ``humming`` can be imported;
* ``torch bf16``: ``grouped_mm`` on decoded weights, four times the bytes.

Every backend's first figure is the whole MLP, gate+up to down with the activation between. The two
others have none of their own, so they are given ``kernels.activation``'s, one launch on the first
GEMM's output, its table of rows made beforehand. Their GEMMs alone stand behind it, as if that
activation cost nothing. A ratio is theirs over gluon's whole MLP.

CUDA events, two warm-ups, a 3 ms spin first so that launches are queued, median of nine, twice;
the table gives the lower median and how far the two lie apart. Weights exceed the L2 cache many
times, so it isn't flushed; with few active experts they fit, and the numbers are warm.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import grouped_mm

from ..activation import Activation
from ..config import EPConfig
from ..experts.activations import activate
from ..kernels.activation import activate as activate_rows
from ..kernels.group_tiles import group_tiles
from ..kernels.mxfp4_tiles import SMALL, SMALL_SPREAD, TILES, Tile, rows_of_tile
from .expert_backends import Gluon, H, Humming, I, decode, random_experts

REPEATS, ROUNDS, SPIN_CYCLES = 9, 2, 5_000_000
# Half the weight rows a tile: for few tiles, and for a shorter last wave.
FINE = Tile(8, 64, 256, 4, pipelined=False, warps=4, ctas=3, registers=80)
SWEEP: dict[int, list[Tile]] = {
    8: [
        SMALL,
        dataclasses.replace(SMALL, exact=True),
        SMALL_SPREAD,
        dataclasses.replace(SMALL_SPREAD, exact=True),
        Tile(8, 128, 128, 8, pipelined=True, warps=4, ctas=2, registers=128),
        Tile(8, 128, 128, 8, pipelined=False, warps=4, ctas=2, registers=128),
        Tile(8, 256, 128, 6, pipelined=True, warps=8, ctas=1),
        FINE,
        dataclasses.replace(FINE, exact=True),
    ],
    16: [
        TILES[16],
        Tile(16, 128, 128, 5, pipelined=False, warps=4, ctas=3, registers=80),
        Tile(16, 128, 128, 6, pipelined=False, warps=4, ctas=2, registers=128),
        Tile(16, 256, 128, 6, pipelined=True, warps=8, ctas=1),
    ],
    32: [TILES[32], Tile(32, 256, 128, 6, pipelined=True, warps=8, ctas=1)],
    64: [
        TILES[64],
        Tile(64, 256, 64, 10, pipelined=True, warps=8, ctas=1),
        Tile(64, 256, 128, 5, pipelined=True, warps=8, ctas=1),
        Tile(64, 128, 128, 5, pipelined=True, warps=8, ctas=1),
    ],
    128: [
        TILES[128],
        Tile(128, 128, 128, 5, pipelined=True, warps=8, ctas=1),
        Tile(128, 128, 64, 9, pipelined=True, warps=8, ctas=1),
        Tile(256, 128, 64, 5, pipelined=True, warps=8, ctas=1),
    ],
}

app = typer.Typer(add_completion=False)
console = Console(width=150)


@dataclass(frozen=True, slots=True)
class Time:
    """Lower of the medians in us, and the other's distance in per cent."""

    us: float
    spread: float

    def __str__(self) -> str:
        return f"{self.us:.0f} ±{self.spread:.1f}%"


Call = Callable[[], object]


def in_turn(calls: list[Call]) -> None:
    """Several calls as one."""
    for call in calls:
        call()


def timed(call: Call) -> Time:
    """Time of one call on the GPU; see the module's docstring."""
    for _ in range(2):
        call()
    medians = []
    for _ in range(ROUNDS):
        event: Any = functools.partial(torch.cuda.Event, enable_timing=True)
        events = [(event(), event()) for _ in range(REPEATS)]
        spin: Any = torch.cuda._sleep
        spin(SPIN_CYCLES)
        for begin, end in events:
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        medians.append(statistics.median(a.elapsed_time(b) * 1e3 for a, b in events))
    return Time(min(medians), 100 * (max(medians) / min(medians) - 1))


def host_us(call: Call, calls: int = 100) -> float:
    """Host time of one eager call, in us: the GPU's queue is long enough not to block it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took / calls * 1e6


def config() -> EPConfig:
    """Kimi-K3's experts."""
    return EPConfig(
        num_experts=896,
        top_k=16,
        hidden_size=H,
        intermediate_size=I,
        max_tokens_per_rank=1024,
        weight_format="mxfp4",
        activation=Activation.situ(),
    )


def check_some(
    cfg: EPConfig, experts: dict[str, Tensor], x: Tensor, out: Tensor, m: int, picked: list[int]
) -> float:
    """Largest relative L2 error of some experts' rows, against fp32 on decoded weights."""
    worst = 0.0
    for e in picked:
        w13, w2 = (
            decode(experts[f"{n}_packed"][e], experts[f"{n}_scale"][e]).float()
            for n in ("w13", "w2")
        )
        span = slice(e * m, (e + 1) * m)
        h = (x[span].float() @ w13.T).bfloat16()
        want = activate(cfg, h).bfloat16().float() @ w2.T
        error = float((out[span].float() - want).norm() / want.norm())
        worst = max(worst, error) if error == error else float("inf")
    return worst


def load_humming(experts: dict[str, Tensor]) -> tuple[Humming | None, str]:
    """humming's experts, or why there are none: it is a guest, and must not end the run."""
    if importlib.util.find_spec("humming") is None:
        return None, "not installed"
    try:
        humming = Humming(experts)
        humming.check(experts)
    except Exception as e:
        return None, f"{type(e).__name__}: {e}"
    return humming, ""


def side_by_side(E: int, sizes: list[int], bf16: bool) -> Table:
    """One table: every backend at every size."""
    cfg = config()
    experts = random_experts(E)
    gluon = Gluon(cfg, experts)
    humming, absent = load_humming(experts)
    dense: list[Tensor] = []
    if bf16:
        for name in ("w13", "w2"):
            pairs = zip(experts[f"{name}_packed"], experts[f"{name}_scale"], strict=True)
            dense.append(torch.stack([decode(p, s) for p, s in pairs]).transpose(1, 2))
    title = (
        f"E = {E}, H = {H}, I = {I}; us: whole MLP with activation, GEMMs alone (gate+up / down)"
    )
    table = Table(title=title)
    columns = ["m", "gluon, whole MLP", "TB/s", "error"]
    for name in ("humming", "torch bf16"):
        columns += [f"{name}, whole MLP", f"{name}, GEMMs alone"]
    for column in columns:
        table.add_column(column, justify="right")
    weight_bytes = sum(t.nbytes for t in gluon.packed.values())
    for m in sizes:
        M = E * m
        g = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(M, H, generator=g, device="cuda").bfloat16()
        rows = x.clone()
        groups = gluon.groups([m] * E, likely=m)
        gluon.runner.run(rows, None, groups)
        error = check_some(cfg, experts, x, rows, m, [0, E // 2, E - 1])
        run = functools.partial(gluon.runner.run, rows, None, groups)
        whole = timed(run)
        tile = TILES[rows_of_tile(m)]
        gemm = functools.partial(gluon.launch, rows=rows, groups=groups, tile=tile)
        parts = [timed(functools.partial(gemm, down)) for down in (False, True)]
        cells = [str(m), f"{whole} ({parts[0].us:.0f} / {parts[1].us:.0f})"]
        cells += [f"{weight_bytes / whole.us / 1e6:.2f}", f"{error:.1e}"]
        offsets = torch.arange(E + 1, dtype=torch.int32, device="cuda") * m
        h = torch.empty(M, 2 * I, dtype=torch.bfloat16, device="cuda")
        a = torch.randn(M, I, generator=g, device="cuda").bfloat16()
        between = functools.partial(
            activate_rows, h, a, group_tiles(groups.start_G, groups.count_G, M, 16), cfg.act
        )
        calls: list[list[Call]] = [[], []]
        if humming:
            calls[0] = [
                functools.partial(humming.launch, "w13", x, h, offsets),
                between,
                functools.partial(humming.launch, "w2", a, rows, offsets),
            ]
        if dense:
            grouped = functools.partial(grouped_mm, offs=offsets[1:].contiguous())
            up, down = (
                functools.partial(grouped, z, w) for z, w in zip((x, a), dense, strict=True)
            )
            calls[1] = [up, between, down]
        for three in calls:
            cells += against(three, whole) if three else [absent or "not asked for", ""]
        table.add_row(*cells)
    return table


def against(calls: list[Call], ours: Time) -> list[str]:
    """Cells of a backend: its GEMMs with the activation between them, and without."""
    up, _, down = calls
    parts = [timed(call) for call in (up, down)]
    alone, mlp = (timed(functools.partial(in_turn, some)) for some in ([up, down], calls))
    return [
        f"{mlp} {mlp.us / ours.us:.2f}x",
        f"{alone.us:.0f} ({parts[0].us:.0f} / {parts[1].us:.0f}) {alone.us / ours.us:.2f}x",
    ]


def uneven_rows(E: int, means: list[int]) -> Table:
    """Log-normal popularity (sigma 1): what the hint ``likely`` costs when it is wrong."""
    gluon = Gluon(config(), random_experts(E))
    hints = (8, 16, 32, 64, 128)
    table = Table(title=f"E = {E}, uneven rows; us, whole MLP by hint of a busy group's rows")
    for column in ("mean", "largest", *(f"hint {n}" for n in hints)):
        table.add_column(column, justify="right")
    for mean in means:
        g = torch.Generator().manual_seed(mean)
        popularity = torch.randn(E, generator=g).exp()
        drawn = torch.multinomial(popularity, mean * E, replacement=True, generator=g)
        counts = drawn.bincount(minlength=E).tolist()
        rows = torch.randn(mean * E, H, device="cuda").bfloat16()
        cells = [str(mean), str(max(counts))]
        for likely in hints:
            groups = gluon.groups(counts, likely)
            cells.append(str(timed(functools.partial(gluon.runner.run, rows, None, groups))))
        table.add_row(*cells)
    return table


def few_active(E: int) -> Table:
    """One row for each of a few experts: what decode looks like on a rank. L2-warm up to 4."""
    gluon = Gluon(config(), random_experts(E))
    table = Table(title=f"1 row for each of the active among {E} experts; us, whole MLP")
    names = ("chosen", "8 warps x 2", "the same, exact", "4 warps x 3", "64 rows x 3", "and exact")
    for column in ("active", *names, "apart", "host"):
        table.add_column(column, justify="right")
    for active in (1, 4, 14, 56, E):
        counts = [0] * E
        for i in range(active):
            counts[i * E // active] = 1
        groups = gluon.groups(counts, likely=1)
        rows = torch.randn(active, H, device="cuda").bfloat16()
        runner = gluon.runner
        run = functools.partial(runner.run, rows, None, groups)
        cells = [str(active)]
        exact = dataclasses.replace(SMALL, exact=True)
        fine = dataclasses.replace(FINE, exact=True)
        for tile in (None, SMALL, exact, SMALL_SPREAD, FINE, fine):
            runner.tiles = (tile, tile) if tile else None
            cells.append(str(timed(run)))
        runner.tiles = None
        runner._mlp.overlap = False
        cells.append(str(timed(run)))
        runner._mlp.overlap = True
        cells.append(f"{host_us(run):.0f}")
        table.add_row(*cells)
    return table


def sweep_tiles(E: int, sizes: list[int]) -> Table:
    """Every candidate tile on each GEMM, and the MLP with and without overlap."""
    gluon = Gluon(config(), random_experts(E))
    fields = "rows, bn, bk, stages, pipe, warps, ctas, regs, exact"
    table = Table(title=f"E = {E}; us. Tile: {fields}; the first of an m is the one chosen now")
    for column in ("m", "tile", "gate+up", "down", "MLP", "MLP apart", "same bits"):
        table.add_column(column, justify="right")
    for m in sizes:
        g = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(E * m, H, generator=g, device="cuda").bfloat16()
        groups = gluon.groups([m] * E, likely=m)
        key = next((r for r in SWEEP if r >= m), max(SWEEP))
        wider = next((r for r in SWEEP if r >= 2 * m), max(SWEEP))
        candidates = SWEEP[key] + (SWEEP[wider][:1] if wider != key else [])
        first: Tensor | None = None
        runner = gluon.runner
        for tile in candidates:
            runner.tiles = (tile, tile)
            rows = x.clone()
            runner.run(rows, None, groups)
            first = rows.clone() if first is None else first
            same = torch.equal(rows.view(torch.int16), first.view(torch.int16))
            gemm = functools.partial(gluon.launch, rows=rows, groups=groups, tile=tile)
            parts = [timed(functools.partial(gemm, down)) for down in (False, True)]
            run = functools.partial(runner.run, rows, None, groups)
            both = []
            for overlap in (True, False):
                runner._mlp.overlap = overlap
                both.append(timed(run))
            runner._mlp.overlap = True
            name = " ".join(str(int(v)) for v in dataclasses.astuple(tile))
            table.add_row(str(m), name, *map(str, parts + both), "yes" if same else "NO")
        runner.tiles = None
    return table


@app.command()
def main(
    experts: Annotated[str, typer.Option(help="Experts per rank, comma separated.")] = "56,112",
    rows: Annotated[str, typer.Option(help="Rows per expert.")] = "1,4,16,64,256,1024",
    sweep: Annotated[bool, typer.Option(help="Candidate tiles instead of backends.")] = False,
    few: Annotated[bool, typer.Option(help="Few active experts of 112.")] = False,
    uneven: Annotated[bool, typer.Option(help="Uneven rows, by hint.")] = False,
    bf16: Annotated[bool, typer.Option(help="Include torch BF16.")] = True,
) -> None:
    """Expert MLPs side by side on one Hopper GPU."""
    if not torch.cuda.is_available():
        raise typer.Exit("needs an NVIDIA GPU")  # type: ignore[arg-type]
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sizes = [int(m) for m in rows.split(",")]
    if few:
        console.print(few_active(112))
        return
    if uneven:
        console.print(uneven_rows(56, [4, 16, 64]))
        return
    for E in (int(e) for e in experts.split(",")):
        console.print(sweep_tiles(E, sizes) if sweep else side_by_side(E, sizes, bf16))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    app()
