"""``evenep inspect``: what a checkpoint holds and what each rank would read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..models.kimi_k3.index import CheckpointIndex, ReadPlan
from ..models.kimi_k3.names import NEEDED
from ..plan.placement import Placement


def inspect(
    directory: Annotated[
        Path, typer.Argument(help="Directory with config.json and the index; shards may be absent.")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Size of the EP group.")] = 16,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a Kimi-K3-format checkpoint holds and what each rank would read."""
    index = CheckpointIndex.open(directory)
    placement = Placement.contiguous(index.config.num_experts, ranks)
    reads = []
    for rank in range(ranks):
        plan = index.plan(placement.experts_of(rank))
        reads.append(_rank_summary(rank, plan))
    summary = _summary(index, ranks, reads)
    if json_out:
        typer.echo(json.dumps(summary, indent=2))
        return
    console = Console()
    for table in (_contents_table(summary), _ranks_table(summary)):
        console.print(table)
    _print_notes(console, summary)


def _rank_summary(rank: int, plan: ReadPlan) -> dict[str, Any]:
    return {
        "rank": rank,
        "experts": len(plan.experts),
        "routed_bytes": plan.routed.nbytes,
        "routed_tensors": plan.routed.tensors,
        "block_bytes": plan.block.nbytes,
        "block_tensors": plan.block.tensors,
        "shards": len(plan.shards),
    }


def _summary(index: CheckpointIndex, ranks: int, reads: list[dict[str, Any]]) -> dict[str, Any]:
    config = index.config
    names = sorted(set(index.shard_of.values()))
    return {
        "directory": str(index.path),
        "tensors": len(index.shard_of),
        "bytes": index.total_size,
        "shards": len(names),
        "shards_absent": sum(not (index.path / name).exists() for name in names),
        "weight_format": index.weight_format,
        "moe_layers": len(index.moe_layers),
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_token,
        "hidden_size": config.hidden_size,
        "latent_size": config.routed_expert_hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "uses": {
            use: {"tensors": t.tensors, "bytes": t.nbytes, "read_by_engine": use in NEEDED}
            for use, t in index.cover.uses.items()
        },
        "absent_groups": list(index.cover.absent),
        "ranks": ranks,
        "reads": reads,
    }


def human_bytes(count: int) -> str:
    """Decimal units, as disks and the published sizes are counted."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _contents_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"{summary['directory']}: {summary['weight_format']} experts")
    for name in ("use", "tensors", "bytes"):
        table.add_column(name, justify="left" if name == "use" else "right")
    table.add_column("read by the engine")
    for use, total in summary["uses"].items():
        read = "yes" if total["read_by_engine"] else "no"
        table.add_row(use, f"{total['tensors']:,}", human_bytes(total["bytes"]), read)
    table.add_section()
    table.add_row("all", f"{summary['tensors']:,}", human_bytes(summary["bytes"]), "")
    return table


def _ranks_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"what each of {summary['ranks']} ranks reads")
    columns = ("rank", "experts", "routed", "routed tensors", "MoE block", "shards")
    for name in columns:
        table.add_column(name, justify="right")
    for r in summary["reads"]:
        table.add_row(
            str(r["rank"]),
            str(r["experts"]),
            human_bytes(r["routed_bytes"]),
            f"{r['routed_tensors']:,}",
            human_bytes(r["block_bytes"]),
            str(r["shards"]),
        )
    return table


def _print_notes(console: Console, summary: dict[str, Any]) -> None:
    console.print(
        f"{summary['moe_layers']} MoE layers; {summary['num_experts']} experts, "
        f"{summary['num_experts_per_token']} per token; rows of {summary['latent_size']} "
        f"(hidden {summary['hidden_size']}), FFN {summary['moe_intermediate_size']}"
    )
    if summary["shards_absent"]:
        console.print(f"{summary['shards_absent']} of {summary['shards']} shards are not here")
    if summary["absent_groups"]:
        console.print(f"not in the index: {', '.join(summary['absent_groups'])}")
