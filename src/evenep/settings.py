"""The only place that reads the environment. ``catalogue()`` is the documentation of it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import ConfigError, explain


def _flag(name: str, text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"", "0", "false", "no", "off"}:
        return False
    raise ConfigError(explain(f"{name} is not a flag", expected="0 or 1", got=repr(text)))


def _cache_home() -> Path:
    """The user's cache; a user without a home (a container's random uid) gets the temp folder."""
    try:
        return Path.home() / ".cache" / "evenep"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "evenep"


@dataclass(frozen=True, slots=True)
class Settings:
    """Process-wide switches, read once when first asked for."""

    debug: bool = field(
        default=False,
        metadata={"env": "EVENEP_DEBUG", "help": "check every plan's invariants at every step"},
    )
    poison: bool = field(
        default=False,
        metadata={"env": "EVENEP_POISON", "help": "fill fresh buffers with NaN instead of zero"},
    )
    cache_dir: Path = field(
        default_factory=_cache_home,
        metadata={
            "env": "EVENEP_CACHE_DIR",
            "help": "where generated fixtures and measured times are kept",
        },
    )

    @classmethod
    def from_environment(cls) -> Settings:
        values: dict[str, object] = {}
        for f in fields(cls):
            text = os.environ.get(f.metadata["env"])
            if text is None:
                continue
            values[f.name] = _flag(f.metadata["env"], text) if f.type == "bool" else Path(text)
        return cls(**values)  # type: ignore[arg-type]


def catalogue() -> list[tuple[str, str, str]]:
    """``(variable, default, meaning)`` of every variable EvenEP reads."""
    defaults = Settings()
    return [
        (f.metadata["env"], str(getattr(defaults, f.name)), f.metadata["help"])
        for f in fields(Settings)
    ]


def allow_shared_gpu() -> None:
    """Let torch's symmetric memory span processes of one GPU, unless it was told otherwise."""
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
