"""Kimi-K3 weights for the engine: routed experts on demand, and the rest of a MoE block.

Shapes: H hidden, D latent, I expert FFN width, E experts, X shared width (num_shared_experts * I).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import EPConfig
from ...errors import CheckpointError, InputError, explain
from ...formats import format_of
from ...weights.source import ExpertWeights, Progress
from .config import KimiK3Config
from .index import CheckpointIndex
from .names import EXPERT_PIECES, Entry, expert_entries
from .reader import TORCH_DTYPES, CheckpointReader

MAX_SCALE = 252  # 253 and 254 times a large code overflow BF16; 255 is NaN


class CheckpointWeights(ExpertWeights):
    """The routed experts of a checkpoint directory; ``load`` reads only the asked experts.

    Attributes:
        index: the checked index, with the model's config.
    """

    def __init__(self, index: CheckpointIndex, cfg: EPConfig, layers: Sequence[int]) -> None:
        self.index, self.cfg, self.layers = index, cfg, tuple(layers)
        self._reader = CheckpointReader(index)

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        rows: Sequence[Mapping[str, Tensor]],
        progress: Progress | None = None,
    ) -> None:
        """See ``ExpertWeights.load``. Rows must be contiguous CPU tensors.

        Raises:
            InputError: a layer or expert this source doesn't hold, or rows of another format.
            CheckpointError: a shard is absent or broken, a tensor has the wrong dtype or shape,
                or a scale byte is above 252. The rows' contents are then undefined.
        """
        self._check_request(layer, experts, rows)
        wanted = [
            piece
            for expert, tensors in zip(experts, rows, strict=True)
            for piece in self._pieces(layer, expert, tensors)
        ]
        self._reader.read(wanted, progress)
        for entry, tensor in wanted:
            if entry.name.endswith("weight_scale"):
                self._check_scale(entry, tensor)

    def _check_request(
        self, layer: int, experts: Sequence[int], rows: Sequence[Mapping[str, Tensor]]
    ) -> None:
        where, E = f"CheckpointWeights.load(layer={layer})", self.cfg.num_experts
        if layer not in self.layers:
            raise InputError(
                explain("unknown layer", where=where, expected=f"one of {self.layers}", got=layer)
            )
        if len(experts) != len(rows) or any(not 0 <= e < E for e in experts):
            raise InputError(
                explain(
                    "bad experts",
                    where=where,
                    expected=f"ids in 0..{E - 1}, one row each",
                    got=f"{list(experts)} with {len(rows)} rows",
                )
            )
        names = {spec.name for spec in format_of(self.cfg).specs(self.cfg)}
        for tensors in rows:
            if set(tensors) != names:
                raise InputError(
                    explain("wrong tensor names", where=where, expected=sorted(names),
                            got=sorted(tensors))
                )  # fmt: skip

    def _pieces(
        self, layer: int, expert: int, tensors: Mapping[str, Tensor]
    ) -> list[tuple[Entry, Tensor]]:
        """Each checkpoint tensor with the rows of the engine's tensor that it fills."""
        fmt = self.index.weight_format
        entries = expert_entries(self.index.config, layer, expert, fmt)
        return [
            (entry, tensors[piece.engine_name].narrow(0, piece.half * rows, rows))
            for entry, piece in zip(entries, EXPERT_PIECES[fmt], strict=True)
            for rows in (entry.shape[0],)
        ]

    def _check_scale(self, entry: Entry, scale: Tensor) -> None:
        top = int(scale.max())
        if top > MAX_SCALE:
            meaning = "NaN" if top == 255 else "a factor whose larger codes overflow BF16"
            raise CheckpointError(
                explain(
                    f"scale byte 0x{top:02X} in {entry.name} is {meaning}",
                    where=str(self.index.path / self.index.shard_of[entry.name]),
                    expected=f"E8M0 bytes 0..{MAX_SCALE}",
                    got=top,
                    fix="export the expert again; its weights were not finite or far too large",
                )
            )


def checkpoint_weights(
    path: str | Path, *, layers: Sequence[int] | None = None, **choices: Any
) -> CheckpointWeights:
    """The routed experts of a Kimi-K3-format directory, ready for an engine.

    Args:
        layers: decoder layer numbers (0-based); None for every MoE layer in the index.
        choices: ``EPConfig`` fields the checkpoint doesn't decide.

    Raises:
        CheckpointError: the config or index is refused, or a needed shard is absent.
        ConfigError: a choice contradicts the checkpoint.
    """
    index = CheckpointIndex.open(path)
    chosen = index.require_layers(layers)
    cfg = index.config.ep_config(weight_format=index.weight_format, **choices)
    for shard in index.plan([], chosen).shards:
        if not (index.path / shard).exists():
            raise CheckpointError(
                explain(
                    "the index names a shard that is not there",
                    where=str(index.path / shard), expected="the file", got="nothing",
                    fix="finish the download, or ask for layers whose shards are here",
                )
            )  # fmt: skip
    return CheckpointWeights(index, cfg, chosen)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A MoE block without its routed experts. BF16 as stored, except the fp32 bias.

    ``post_attention_norm_H`` is None in a checkpoint that holds MoE blocks only.
    """

    config: KimiK3Config
    layer: int
    gate_EH: Tensor
    bias_E: Tensor
    latent_down_DH: Tensor
    latent_norm_D: Tensor
    latent_up_HD: Tensor
    shared_gate_XH: Tensor
    shared_up_XH: Tensor
    shared_down_HX: Tensor
    post_attention_norm_H: Tensor | None


def load_block_weights(path: str | Path | CheckpointIndex, layer: int) -> BlockWeights:
    """Read one layer's router, latent projections, norms and shared experts.

    Args:
        path: the directory, or its opened index (opening the real one takes seconds).

    Raises:
        CheckpointError: no such MoE layer, or its tensors are absent or of another kind.
    """
    index = path if isinstance(path, CheckpointIndex) else CheckpointIndex.open(path)
    index.require_layers([layer])
    entries = index.block_entries(layer)
    tensors = [torch.empty(e.shape, dtype=TORCH_DTYPES[e.dtype]) for e in entries]
    CheckpointReader(index).read(list(zip(entries, tensors, strict=True)))
    gate, bias, down, norm, up, shared_gate, shared_up, shared_down, *rest = tensors
    return BlockWeights(
        config=index.config,
        layer=layer,
        gate_EH=gate,
        bias_E=bias,
        latent_down_DH=down,
        latent_norm_D=norm,
        latent_up_HD=up,
        shared_gate_XH=shared_gate,
        shared_up_XH=shared_up,
        shared_down_HX=shared_down,
        post_attention_norm_H=rest[0] if rest else None,
    )
