"""``evenep run``: serve a checkpoint's MoE layers on R ranks of this machine, beside static EP."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import __version__, support
from ..bench.session import SessionSpec, run_session
from ..bench.workloads import NAMES
from ..errors import ConfigError, explain
from ..models.kimi_k3 import write_fixture
from ..plan import Placement
from ..settings import Settings

EXIT_PARITY = 1


def _names(axis: str) -> str:
    return ", ".join(c.name for c in support.choices(axis, supported=True))


def run(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Kimi-K3-format directory. Without one, a small fixture is generated."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Decoder layers, as 1,2 or 1-3. Default: all MoE layers.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="R, ranks to start.")] = 4,
    transport: Annotated[str, typer.Option(help=_names("transport") + ".")] = "shm",
    workload: Annotated[
        str, typer.Option(help=f"router, or forced ids: {', '.join(NAMES)}.")
    ] = "router",
    prefill: Annotated[int, typer.Option(min=0, help="Tokens per rank in a prefill pass.")] = 512,
    prefills: Annotated[int, typer.Option(min=0, help="Prefill passes measured.")] = 3,
    decode: Annotated[int, typer.Option(min=0, help="Decode steps.")] = 32,
    batch: Annotated[int, typer.Option(min=0, help="Tokens per rank in a decode step.")] = 8,
    policy: Annotated[str, typer.Option(help=_names("policy") + ".")] = "auto",
    reduction: Annotated[str, typer.Option(help=_names("reduction") + ".")] = "compact",
    slots: Annotated[
        int | None,
        typer.Option(min=0, help="Replica slots per rank. Default: as many as home experts."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of fixture, tokens and workload.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file.")
    ] = None,
) -> None:
    """Run prefill and decode through the MoE layers, balanced and static side by side.

    Exits with 1 when the result is outside the oracle's numerical class.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(
            explain("bad --json", expected="a file in an existing directory", got=json_file)
        )
    console = Console()
    if checkpoint is None:
        checkpoint = _default_fixture(console, seed)
    spec = SessionSpec(
        checkpoint=str(checkpoint),
        ranks=ranks,
        transport=transport,
        layers=_layers(layers),
        workload=workload,
        prefill=prefill,
        prefills=prefills,
        decode=decode,
        batch=batch,
        seed=seed,
        choices={"policy": policy, "reduction": reduction, **_slots(checkpoint, ranks, slots)},
    )
    with _Live(console) as live:
        result = run_session(spec, live.event)
    _print(console, spec, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    if not result["parity"]["ok"]:
        raise typer.Exit(EXIT_PARITY)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        numbers = range(int(span[1]), int(span[2] or span[1]) + 1) if span else range(0)
        if not numbers:
            raise ConfigError(explain("bad --layers", expected="1,2 or 1-3", got=text))
        layers += numbers
    return tuple(layers)


def _slots(checkpoint: Path, ranks: int, slots: int | None) -> dict[str, int]:
    """On a laptop the full guarantee is cheap: a slot for every home expert reaches any epsilon."""
    if slots is None:
        from ..models.kimi_k3 import KimiK3Config

        experts = KimiK3Config.from_file(checkpoint / "config.json").num_experts
        slots = Placement.contiguous(experts, ranks).max_experts_per_rank if ranks > 1 else 0
    return {"slots_per_rank": slots}


def _default_fixture(console: Console, seed: int) -> Path:
    """The F1 fixture, generated once: 112 experts, top-16, two layers in Kimi-K3's own format."""
    path = Settings.from_environment().cache_dir / f"kimi-k3-f1-{__version__}-seed{seed}"
    if not path.exists():
        console.print(f"Generating a small Kimi-K3 checkpoint in {path} …")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
        try:
            write_fixture(draft, "F1", seed=seed, layers=(1, 2))
            with contextlib.suppress(OSError):  # another run was first: its bytes are the same
                draft.rename(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return path


class _Live:
    """Progress of loading and of each phase."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._load = self._progress.add_task("loading experts", total=None, state="")
        self._phases: dict[str, Any] = {}
        self._loaded = 0

    def __enter__(self) -> _Live:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._progress.__exit__(*exc)

    def event(self, rank: int, message: Any) -> None:
        """What a rank reports: bytes loaded by all, steps as rank 0 counts them."""
        kind, *rest = message
        if kind == "load":
            self._loaded += rest[0]
            self._progress.update(self._load, state=f"{self._loaded / 1e6:.0f} MB")
        elif rank == 0:
            phase, done, total = rest
            if phase not in self._phases:
                self._progress.update(self._load, total=1, completed=1)
                self._phases[phase] = self._progress.add_task(phase, total=total, state="")
            self._progress.update(
                self._phases[phase], completed=done, state=f"step {done} of {total}"
            )


def _print(console: Console, spec: SessionSpec, result: dict[str, Any]) -> None:
    engine = result["config"]["engine"]
    console.print(
        f"{engine['num_experts']} experts, top-{engine['top_k']}, {engine['weight_format']}; "
        f"{spec.ranks} ranks over {spec.transport}, workload {spec.workload}, "
        f"{engine['slots_per_rank']} slots per rank\n"
    )
    for phase, figures in result["phases"].items():
        console.print(_phase_table(phase, spec, figures))
    parity = result["parity"]
    verdict = "[green]ok[/green]" if parity["ok"] else "[red]FAILED[/red]"
    distance = parity["max_rel_l2"]
    console.print(
        f"parity with the oracle: {verdict}, relative L2 "
        f"{'not a number' if distance is None else f'{distance:.2e}'} "
        f"(limit {parity['limit']:.0e}), expert sets "
        f"{'equal' if parity['expert_sets_equal'] else 'DIFFER'}"
    )


def _phase_table(phase: str, spec: SessionSpec, figures: dict[str, Any]) -> Table:
    static = figures["static"]
    tokens = spec.prefill if phase == "prefill" else spec.batch
    speedup = static["layer_ms"] / figures["layer_ms"]
    table = Table(title=f"{phase}: {tokens} tokens per rank, layer {speedup:.2f}x static's speed")
    for column in ("", spec.choices["policy"], "static"):
        table.add_column(column, justify="left" if not column else "right")
    rows: list[tuple[str, str, float]] = [
        ("tokens/s", "tokens_per_s", 1),
        ("layer, ms (median)", "layer_ms", 1),
        ("imbalance before", "imbalance_before", 1),
        ("imbalance after", "imbalance_after", 1),
        ("replicas per step", "replicas_per_step", 1),
        ("fetched per step, MB", "fetch_bytes_per_step", 1e-6),
        ("saved by residency, MB", "saved_bytes_per_step", 1e-6),
    ]
    for label, key, scale in rows:
        table.add_row(label, *(f"{f[key] * scale:,.2f}" for f in (figures, static)))
    for stage in figures["stage_ms"]:
        shown = "fetch (exposed)" if stage == "fetch" else stage
        table.add_row(f"  {shown}, ms", *(f"{f['stage_ms'][stage]:.2f}" for f in (figures, static)))
    table.add_row("  fetch hidden, ms", *(f"{f['fetch_hidden_ms']:.2f}" for f in (figures, static)))
    table.add_row("plan chosen", figures["chosen"], static["chosen"])
    return table
