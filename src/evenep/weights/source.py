"""Where expert weights come from: a source fills the tensors a rank owns, and no others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import InputError, explain
from ..formats import format_of

Progress = Callable[[int], None]
"""Called with the number of bytes just loaded."""


class ExpertWeights(ABC):
    """All routed experts of a stack of MoE layers, read on demand.

    A source is cheap and says nothing about ranks: the engine asks it for the experts its rank
    is home to, straight into the store's memory.

    Attributes:
        cfg: sizes and format the tensors follow.
        layers: layer numbers this source holds, as the engine's ``layer=`` argument names them.
        on_device: ``load`` fills tensors on a GPU too; else it is given ones on the host.
    """

    cfg: EPConfig
    layers: tuple[int, ...]
    on_device: bool = False

    @abstractmethod
    def load(
        self,
        layer: int,
        experts: Sequence[int],
        rows: Sequence[Mapping[str, Tensor]],
        progress: Progress | None = None,
    ) -> None:
        """Fill ``rows[i]``, the named tensors of ``experts[i]``, in place.

        The tensors have the shapes and dtypes of ``format_of(cfg).specs(cfg)``.

        Raises:
            CheckpointError: what is stored can't fill them.
        """

    @staticmethod
    def random(cfg: EPConfig, layers: int = 1, seed: int = 0, device: str = "cpu") -> ExpertWeights:
        """Random weights of ``cfg``'s format: a pure function of (seed, layer, expert, device).

        Args:
            device: where they are drawn; ``cuda`` draws large ones fast.
        """
        _require_layers(layers)
        return _RandomWeights(cfg, layers, seed, device)

    @staticmethod
    def from_tensors(
        cfg: EPConfig, tensors: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
    ) -> ExpertWeights:
        """Weights held in memory: per layer, each tensor of the format stacked to ``[E, …]``.

        Raises:
            InputError: a tensor is missing, extra, or has the wrong shape or dtype.
        """
        layers = [tensors] if isinstance(tensors, Mapping) else list(tensors)
        _require_layers(len(layers))
        return _TensorWeights(cfg, layers)

    @staticmethod
    def from_checkpoint(
        path: str | Path, *, layers: Sequence[int] | None = None, **choices: object
    ) -> ExpertWeights:
        """The routed experts of a Kimi-K3-format checkpoint directory.

        ``choices`` are ``EPConfig`` fields the checkpoint doesn't decide (``ranks``,
        ``max_tokens_per_rank``, ``policy`` …). ``layers`` are decoder layer numbers; None
        means every MoE layer. The result's ``cfg`` is the config to build the engine with.
        """
        from ..models.kimi_k3.weights import checkpoint_weights  # models stand above this room

        return checkpoint_weights(Path(path), layers=layers, **choices)


def _require_layers(layers: int) -> None:
    if layers < 1:
        raise InputError(
            explain("no layers", where="ExpertWeights", expected="at least one", got=layers)
        )


class _RandomWeights(ExpertWeights):
    def __init__(self, cfg: EPConfig, layers: int, seed: int, device: str) -> None:
        self.cfg, self.layers, self._seed = cfg, tuple(range(layers)), seed
        self._device, self.on_device = device, device != "cpu"

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        rows: Sequence[Mapping[str, Tensor]],
        progress: Progress | None = None,
    ) -> None:
        fmt = format_of(self.cfg)
        for expert, tensors in zip(experts, rows, strict=True):
            stream = (self._seed * 1_000_003 + layer) * 1_000_003 + expert
            generator = torch.Generator(self._device).manual_seed(stream % 2**63)
            fmt.fill_random(tensors, generator)
            for name in ("w13_bias", "w2_bias"):
                if name in tensors:
                    values = torch.randn(
                        tensors[name].shape, generator=generator, device=self._device
                    )
                    tensors[name].copy_(values * 0.1)
            if progress:
                progress(fmt.expert_bytes(self.cfg))


class _TensorWeights(ExpertWeights):
    on_device = True

    def __init__(self, cfg: EPConfig, layers: list[Mapping[str, Tensor]]) -> None:
        self.cfg, self.layers, self._tensors = cfg, tuple(range(len(layers))), layers
        fmt = format_of(cfg)
        specs = {spec.name: spec for spec in fmt.specs(cfg)}
        for layer, tensors in enumerate(layers):
            where = f"ExpertWeights.from_tensors, layer {layer}"
            if set(tensors) != set(specs):
                raise InputError(
                    explain(
                        f"wrong tensor names for format '{fmt.name}'",
                        where=where,
                        expected=sorted(specs),
                        got=sorted(tensors),
                    )
                )
            for name, spec in specs.items():
                shape, got = (cfg.num_experts, *spec.shape), tensors[name]
                if tuple(got.shape) != shape or got.dtype != spec.dtype:
                    raise InputError(
                        explain(
                            f"wrong tensor {name}",
                            where=where,
                            expected=f"{spec.dtype} {shape}",
                            got=f"{got.dtype} {tuple(got.shape)}",
                        )
                    )
            for expert in range(cfg.num_experts):
                fmt.validate(
                    {n: t[expert] for n, t in tensors.items()}, f"{where}, expert {expert}"
                )

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        rows: Sequence[Mapping[str, Tensor]],
        progress: Progress | None = None,
    ) -> None:
        for expert, tensors in zip(experts, rows, strict=True):
            for name, out in tensors.items():
                out.copy_(self._tensors[layer][name][expert])
            if progress:
                progress(format_of(self.cfg).expert_bytes(self.cfg))
