"""A mistake on the command line ends with 2 and a message for people, whatever it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenep.cli import main
from evenep.models.kimi_k3 import write_fixture

from .test_cli import SMALL, words


@pytest.fixture(scope="module")
def f0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("f0"), "F0")


BAD_RUN: list[tuple[tuple[str, ...], str]] = [
    (("--ranks", "0"), "--ranks"),
    (("--ranks", "two"), "--ranks"),
    (("--prefill", "-1"), "--prefill"),
    (("--slots", "-1"), "--slots"),
    (("--magic", "1"), "--magic"),
    (("--transport", "magic"), "unknown transport (expected one of ['threads', 'shm'"),
    (("--transport", "symm"), "Fix: use transport='shm'"),
    (("--policy", "magic"), "unknown policy (expected one of ['static', 'exact'"),
    (("--policy", "exact", "--slots", "1"), "slots_per_rank >= experts_per_rank"),
    (("--reduction", "sum"), "bad reduction (expected one of ('compact', 'exact'), got sum)"),
    (("--workload", "W9"), "unknown workload"),
    (("--layers", "one"), "bad --layers (expected 1,2 or 1-3, got one)"),
    (("--layers", ""), "bad --layers"),
    (("--layers", "1-2-3"), "bad --layers"),
    (("--layers", "3-1"), "bad --layers"),
    (("--layers", "[/a]"), "got [/a]"),
    (("--layers", "[red]"), "got [red]"),
    (("--layers", "99"), "no MoE block in decoder layer 99"),
    (("--checkpoint", "/nowhere"), "/nowhere/config.json"),
    (("--json", "/nowhere/result.json"), "/nowhere"),
]


def fails(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a failing command says on stderr, through the installed entry point's function."""
    monkeypatch.setattr(sys, "argv", ["evenep", *arguments])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return words(said.err)


@pytest.mark.parametrize(("options", "message"), BAD_RUN, ids=[" ".join(o) for o, _ in BAD_RUN])
def test_a_bad_option_exits_with_2_and_a_message_on_stderr(
    f0: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    good = ("run", "--checkpoint", str(f0), *SMALL, "--transport", "threads", "--decode", "0")
    assert message in fails([*good, *options], monkeypatch, capsys)


def test_inspecting_nothing_exits_with_2_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(["inspect", str(tmp_path)], monkeypatch, capsys)
    assert "CheckpointError" in said
    assert "config.json" in said
