"""``evenep inspect`` knows what every rank would read without a single shard."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from evenep.cli.inspect import human_bytes, inspect

app = typer.Typer()
app.command()(inspect)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_published_model_at_sixteen_ranks(published: Path) -> None:
    summary = json.loads(run(str(published), "--ranks", "16", "--json"))
    assert summary["bytes"] == 1_560_860_324_864
    assert summary["shards"] == summary["shards_absent"] == 96
    assert len(summary["reads"]) == 16
    for read in summary["reads"]:
        assert read["routed_bytes"] == 56 * 92 * 17_547_264
        assert read["routed_tensors"] == 56 * 92 * 6
        assert read["shards"] == 92
    assert human_bytes(summary["reads"][0]["routed_bytes"]) == "90.4 GB"


def test_tables_name_ranks_and_uses(f2: Path) -> None:
    text = run(str(f2), "--ranks", "5")
    for word in ("routed experts", "attention", "896", "4 MoE layers", "mxfp4"):
        assert word in text


def test_moe_only_checkpoint(f0: Path) -> None:
    assert "not in the index: layer 0 rest" in run(str(f0))


def test_units() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 90_400_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "90.4 GB",
    ]
