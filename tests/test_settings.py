"""Settings: the only place that reads the environment, and a complete catalogue of it."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from evenep.errors import ConfigError
from evenep.settings import Settings, catalogue

SOURCE = Path(__file__).parents[1] / "src" / "evenep"
FLAGS = ("EVENEP_DEBUG", "EVENEP_POISON")


def field_of(variable: str) -> str:
    return next(f.name for f in dataclasses.fields(Settings) if f.metadata["env"] == variable)


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, _, _ in catalogue():
        monkeypatch.delenv(variable, raising=False)


def test_nothing_set_means_the_defaults() -> None:
    assert Settings.from_environment() == Settings()
    assert not Settings().debug
    assert not Settings().poison
    assert Settings().cache_dir == Path.home() / ".cache" / "evenep"


@pytest.mark.parametrize("variable", FLAGS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, True) for text in ("1", "true", "TRUE", "yes", "Yes", "on")),
        *((text, False) for text in ("", "0", "false", "False", "no", "off", "OFF")),
    ],
)
def test_flags_parse(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, value: bool
) -> None:
    monkeypatch.setenv(variable, text)
    changed = Settings.from_environment()
    assert changed == dataclasses.replace(Settings(), **{field_of(variable): value})  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", FLAGS)
@pytest.mark.parametrize("text", ["2", "maybe", " ", "-1", "truee"])
def test_a_bad_flag_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment()
    assert str(caught.value) == f"{variable} is not a flag (expected 0 or 1, got {text!r})."


def test_the_cache_directory_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENEP_CACHE_DIR", "/somewhere/else")
    assert Settings.from_environment().cache_dir == Path("/somewhere/else")


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().debug = True  # type: ignore[misc]


# ---- nothing else reads the environment


def test_the_catalogue_names_every_variable_with_default_and_meaning() -> None:
    listed = {variable for variable, _, _ in catalogue()}
    assert len(catalogue()) == len(listed) == len(dataclasses.fields(Settings))
    written = {
        variable
        for path in SOURCE.rglob("*.py")
        for variable in re.findall(r"\bEVENEP_[A-Z_]+", path.read_text())
    }
    assert written == listed
    for variable, default, meaning in catalogue():
        assert default == str(getattr(Settings(), field_of(variable)))
        assert len(meaning.split()) >= 3


def reads_environment(tree: ast.AST) -> bool:
    """``os.environ``, ``os.getenv`` and their kin, also imported by name."""
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            return True
        if isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names}:
            return True
        if isinstance(node, ast.keyword) and node.arg == "envvar":  # typer reads these
            return True
    return False


def test_only_settings_reads_the_environment() -> None:
    readers = [
        path.relative_to(SOURCE).as_posix()
        for path in sorted(SOURCE.rglob("*.py"))
        if reads_environment(ast.parse(path.read_text()))
    ]
    assert readers == ["settings.py"]


@pytest.mark.parametrize(
    "code",
    ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"],
)
def test_the_search_above_would_find_a_reader(code: str) -> None:
    assert reads_environment(ast.parse(code))
    assert not reads_environment(ast.parse("import os\nos.cpu_count()"))
