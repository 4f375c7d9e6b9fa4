"""Copies of a checkpoint with one thing wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MOE = "language_model.model.layers.1.block_sparse_moe."


class Checkpoint:
    """A single-shard checkpoint held in memory, edited freely, then saved elsewhere."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.index: dict[str, Any] = json.loads((path / "model.safetensors.index.json").read_text())
        (self.shard,) = set(self.index["weight_map"].values())
        with safe_open(path / self.shard, framework="pt") as stored:
            names: list[str] = stored.keys()
            self.tensors: dict[str, Tensor] = {n: stored.get_tensor(n) for n in names}

    @property
    def text(self) -> dict[str, Any]:
        found: dict[str, Any] = self.config["text_config"]
        return found

    def reindex(self) -> None:
        """Make the index list what the shard holds."""
        self.index["weight_map"] = dict.fromkeys(self.tensors, self.shard)
        self.index["metadata"]["total_size"] = sum(t.nbytes for t in self.tensors.values())

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        (path / "model.safetensors.index.json").write_text(json.dumps(self.index))
        save_file(self.tensors, path / self.shard)
        return path


Edit = Callable[[Checkpoint], None]
