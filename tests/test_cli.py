"""``evenep run`` and ``evenep inspect`` as people and scripts use them."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from evenep import support
from evenep.bench import session
from evenep.bench.workloads import NAMES
from evenep.cli import app
from evenep.models.kimi_k3 import write_fixture
from evenep.models.kimi_k3.reference import Oracle
from evenep.observe import STAGES

ENTRY_POINT = Path(sys.executable).parent / "evenep"
SMALL = ("--ranks", "2", "--prefill", "16", "--prefills", "1", "--decode", "2", "--batch", "4")
PHASE_KEYS = {
    "tokens_per_s",
    "layer_ms",
    "imbalance_before",
    "imbalance_after",
    "replicas_per_step",
    "fetch_bytes_per_step",
    "saved_bytes_per_step",
    "stage_ms",
    "fetch_hidden_ms",
    "chosen",
    "steps",
}


@pytest.fixture(scope="module")
def f0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("f0"), "F0")


def words(text: str) -> str:
    """Without the line breaks that a narrow terminal adds."""
    return " ".join(text.split())


# ---- run


def check_result(result: dict[str, Any], transport: str, workload: str) -> None:
    """Every promised key, no other, and figures that hang together."""
    assert set(result) == {"parity", "phases", "config", "environment"}
    parity = result["parity"]
    assert set(parity) == {"max_rel_l2", "limit", "expert_sets_equal", "ok"}
    assert parity["ok"] is True
    assert parity["expert_sets_equal"] is True
    assert 0 <= parity["max_rel_l2"] <= parity["limit"] == session.PARITY_LIMIT
    assert set(result["phases"]) == {"prefill", "decode"}
    for phase, steps in (("prefill", 1), ("decode", 2)):
        figures = result["phases"][phase]
        assert set(figures) == PHASE_KEYS | {"static"}
        assert set(figures["static"]) == PHASE_KEYS
        for variant in (figures, figures["static"]):
            assert set(variant["stage_ms"]) == set(STAGES)
            numbers = [v for v in variant.values() if isinstance(v, (int, float))]
            assert all(
                math.isfinite(n) and n >= 0 for n in (*numbers, *variant["stage_ms"].values())
            )
            assert variant["steps"] == steps
            assert variant["tokens_per_s"] > 0
            assert 1 <= variant["imbalance_after"] <= variant["imbalance_before"] <= 2
        static = figures["static"]
        assert static["chosen"] == "static"
        assert static["replicas_per_step"] == static["fetch_bytes_per_step"] == 0
        assert static["imbalance_after"] == static["imbalance_before"]
        assert figures["imbalance_before"] == static["imbalance_before"]
    asked = result["config"]["session"]
    assert (asked["transport"], asked["workload"], asked["ranks"]) == (transport, workload, 2)
    assert result["config"]["engine"]["num_experts"] == 32
    assert result["config"]["engine"]["slots_per_rank"] == 16
    assert set(result["environment"]) == {"machine", "cores", "cpu", "python", "torch", "system"}


@pytest.mark.parametrize(
    ("transport", "workload"), [("threads", "router"), ("threads", "W2"), ("shm", "router")]
)
def test_a_small_run_succeeds_and_writes_what_it_promises(
    f0: Path, tmp_path: Path, transport: str, workload: str
) -> None:
    file = tmp_path / "result.json"
    options = ("--transport", transport, "--workload", workload, "--policy", "bounded")
    ended = CliRunner().invoke(
        app, ["run", "--checkpoint", str(f0), *SMALL, *options, "--json", str(file)]
    )
    assert ended.exit_code == 0, ended.output
    result = json.loads(file.read_text())
    check_result(result, transport, workload)
    text = words(ended.output)
    assert "parity with the oracle: ok" in text
    assert "prefill: 16 tokens per rank" in text
    assert "decode: 4 tokens per rank" in text
    if workload == "W2":
        prefill = result["phases"]["prefill"]
        assert prefill["imbalance_before"] > 1.4
        assert prefill["imbalance_after"] < 1.1
        assert prefill["replicas_per_step"] > 0


def test_the_installed_command_runs_processes_under_a_forced_workload(
    f0: Path, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    options = ("--transport", "shm", "--workload", "W2", "--reduction", "exact", "--slots", "16")
    ended = subprocess.run(
        [ENTRY_POINT, "run", "--checkpoint", f0, *SMALL, *options, "--json", file],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    result = json.loads(file.read_text())
    check_result(result, "shm", "W2")
    assert result["config"]["engine"]["reduction"] == "exact"


def test_phases_can_be_left_out(f0: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ("--transport", "threads", "--decode", "0", "--layers", "1", "--workload", "W4")
    ended = CliRunner().invoke(
        app, ["run", "--checkpoint", str(f0), *SMALL, *options, "--json", str(file)]
    )
    assert ended.exit_code == 0, ended.output
    assert set(json.loads(file.read_text())["phases"]) == {"prefill"}


# ---- parity


class OneByteOff(Oracle):
    """Reads one scale byte of one hot expert as another than the engine does."""

    def tensor(self, name: str) -> Tensor:
        found = super().tensor(name)
        if name == "experts.0.w2.weight_scale":
            found = found.clone()
            found[0, 0] += 20
        return found


class Undefined(Oracle):
    """A distance that is not a number, as a NaN in the engine's output would make it."""

    def routed(self, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return torch.full_like(super().routed(z_TD, ids_TK, weights_TK), math.nan)


class OtherExperts(Oracle):
    """Routes every token one expert further than the router under test."""

    def router(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = super().router(x_TH)
        return (ids_TK + 1) % 32, weights_TK


@pytest.mark.parametrize(
    ("oracle", "workload"), [(OneByteOff, "W2"), (Undefined, "W2"), (OtherExperts, "router")]
)
def test_a_result_out_of_the_oracles_class_exits_with_1_and_says_so(
    f0: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    oracle: type[Oracle],
    workload: str,
) -> None:
    monkeypatch.setattr(session, "Oracle", oracle)
    file = tmp_path / "result.json"
    options = ("--transport", "threads", "--workload", workload, "--decode", "0")
    ended = CliRunner().invoke(
        app, ["run", "--checkpoint", str(f0), *SMALL, *options, "--json", str(file)]
    )
    assert ended.exit_code == 1, ended.output
    assert "FAILED" in ended.output
    assert json.loads(file.read_text())["parity"]["ok"] is False


# ---- help


def test_help_lists_every_option_and_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    commands: dict[str, Any] = group.commands
    assert set(commands) == {"run", "inspect"}
    for name, command in commands.items():
        shown = CliRunner().invoke(app, [name, "--help"])
        assert shown.exit_code == 0
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in shown.output, option
            if parameter.name != "help":
                assert parameter.help, f"{name} {parameter.name} has no help"
    text = words(CliRunner().invoke(app, ["run", "--help"]).output)
    for axis in ("transport", "policy", "reduction"):
        assert ", ".join(c.name for c in support.choices(axis, supported=True)) in text
    assert ", ".join(NAMES) in text
    overview = CliRunner().invoke(app, ["--help"]).output
    assert "run" in overview
    assert "inspect" in overview


# ---- fixture, inspect


def test_the_default_fixture_is_made_once_and_an_interruption_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    interrupted = True

    def write(path: Path, kind: str, **_: object) -> None:
        made.append(kind)
        (path / "half").touch()
        if interrupted:
            raise KeyboardInterrupt

    module = sys.modules["evenep.cli.run"]  # the package binds its name to the function
    cache = tmp_path / "cache"
    monkeypatch.setattr(module, "write_fixture", write)
    monkeypatch.setenv("EVENEP_CACHE_DIR", str(cache))
    with pytest.raises(KeyboardInterrupt):
        module._default_fixture(Console(quiet=True), 3)
    assert list(cache.iterdir()) == []
    interrupted = False
    first, second = (module._default_fixture(Console(quiet=True), 3) for _ in range(2))
    assert first == second
    assert list(cache.iterdir()) == [first]
    assert made == ["F1", "F1"]
    assert module._default_fixture(Console(quiet=True), 4) != first


def test_inspect_needs_no_shards(f0: Path, tmp_path: Path) -> None:
    def inspect(*arguments: str) -> str:
        ended = CliRunner().invoke(app, ["inspect", *arguments])
        assert ended.exit_code == 0, ended.output
        return ended.output

    copy = shutil.copytree(f0, tmp_path / "copy")
    whole = json.loads(inspect(str(copy), "--ranks", "3", "--json"))
    for shard in copy.glob("*.safetensors"):
        shard.unlink()
    bare = json.loads(inspect(str(copy), "--ranks", "3", "--json"))
    assert whole["shards_absent"] == 0
    assert bare["shards_absent"] == bare["shards"] > 0
    assert bare | {"shards_absent": 0} == whole
    assert [r["experts"] for r in bare["reads"]] == [11, 11, 10]
    assert "shards are not here" in words(inspect(str(copy), "--ranks", "3"))
