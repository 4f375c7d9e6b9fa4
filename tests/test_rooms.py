"""Imports point downwards only (docs/architecture.md); the exceptions are listed and deferred."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "evenep"
ORDER = [
    "errors",
    "activation",
    "settings",
    "support",
    "config",
    "formats",
    "plan",
    "kernels",
    "transport",
    "group",
    "launch",
    "agreement",
    "weights",
    "checks",
    "exchange",
    "experts",
    "planning",
    "observe",
    "machine",
    "host",
    "device",
    "step",
    "engine",
    "models",
    "bench",
    "cli",
]
# (from, to): imported inside a function or for types only, so that nothing runs at import.
DEFERRED = {
    ("config", "support"),
    ("support", "config"),
    ("weights", "models"),
    ("step", "engine"),
    ("device", "engine"),
}


def imports(file: Path) -> list[tuple[str, bool]]:
    """``(room, at top level)`` of every relative import of a file."""
    package = file.relative_to(SRC).parts[:-1]
    found = []
    tree = ast.parse(file.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = [*base, *(node.module or "").split(".")]
            room = next((part for part in target if part), None)
            rooms = [room] if room else [a.name for a in node.names if a.name in ORDER]
            found += [(r, id(node) in top) for r in rooms]
    return found


def test_rooms_only_import_rooms_below_them() -> None:
    for file in SRC.rglob("*.py"):
        room = file.relative_to(SRC).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for target, top in imports(file):
            if (room, target) in DEFERRED:
                assert not top, f"{file.name}: {target} must be imported where it is used"
            else:
                assert ORDER.index(target) <= ORDER.index(room), f"{file}: imports {target}"
