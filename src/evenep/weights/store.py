"""The expert store: home rows, then slot rows, of every layer, as the format's own bytes.

Per layer and tensor one window ``[home rows + lanes * B, …]``: rows 0 … are this rank's experts in
ascending order, then B slots for each step that may be in flight. Peers fetch straight from home
rows into slots. A slot records what it holds (layer, expert, weight version); computing a slot
whose record doesn't match is an error, never a stale result (C7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import InputError, UnfetchedSlotError, explain
from ..formats import TensorSpec, format_of
from ..plan import Fetch, Placement, Residency
from ..transport import Transfer, Transport, Window, WindowSpec
from .layer import ExpertKey, LayerWeights
from .source import ExpertWeights, Progress


class Layout(Protocol):
    """How a runner keeps an expert's bytes, where that isn't the format's own layout."""

    def specs(self) -> list[TensorSpec]:
        """The tensors of one expert."""

    def pack(self, tensors: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """One expert's format tensors, on the store's device, into its row."""


@dataclass(slots=True)
class _Layer:
    windows: dict[str, Window]
    weights: LayerWeights
    version: int
    residency: list[Residency]  # per lane; the same record on every rank
    slots: list[list[ExpertKey | None]]  # per lane: what this rank's slots really hold


class ExpertStore:
    """This rank's experts and slots.

    Args:
        cfg, placement: sizes and homes.
        transport: makes the windows. Collective.
        layers: layer numbers to make room for; ``load`` fills them.
        layout: of the bytes kept; None: the format's own.
    """

    def __init__(
        self,
        cfg: EPConfig,
        placement: Placement,
        transport: Transport,
        layers: Sequence[int],
        layout: Layout | None = None,
    ) -> None:
        self.cfg, self.placement, self._layout = cfg, placement, layout
        self._device = transport.device
        self.home_rows = placement.max_experts_per_rank
        self.rank = transport.rank
        self._experts = placement.experts_of(self.rank)
        rows = self.home_rows + cfg.slots * cfg.in_flight
        specs = layout.specs() if layout else format_of(cfg).specs(cfg)
        made = iter(
            transport.windows(
                [
                    WindowSpec(f"{spec.name}.{layer}", (rows, *spec.shape), spec.dtype)
                    for layer in layers
                    for spec in specs
                ]
            )
        )
        self._layers: dict[int, _Layer] = {}
        for layer in layers:
            windows = {spec.name: next(made) for spec in specs}
            weights = LayerWeights({name: w.local for name, w in windows.items()})
            empty = Residency.empty(cfg.ranks, cfg.slots)
            self._layers[layer] = _Layer(
                windows,
                weights,
                version=0,
                residency=[empty] * cfg.in_flight,
                slots=[[None] * cfg.slots for _ in range(cfg.in_flight)],
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer numbers, as ``engine(layer=…)`` takes them."""
        return tuple(self._layers)

    def load(self, layer: int, source: ExpertWeights, progress: Progress | None = None) -> None:
        """Read this rank's experts of a layer into their home rows."""
        weights = self._layers[layer].weights
        rows = [weights.row(i) for i in range(len(self._experts))]
        if self._layout is None:
            source.load(layer, self._experts, rows, progress)
            return
        device = self._device if source.on_device else torch.device("cpu")
        staging = {
            spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device)
            for spec in format_of(self.cfg).specs(self.cfg)
        }
        for expert, row in zip(self._experts, rows, strict=True):
            source.load(layer, [expert], [staging], progress)
            self._layout.pack({n: t.to(self._device) for n, t in staging.items()}, row)

    def windows(self, layer: int) -> Mapping[str, Window]:
        """A layer's windows, by tensor name."""
        return self._layers[layer].windows

    def layer(self, layer: int) -> LayerWeights:
        """The tensors of a layer."""
        return self._layers[layer].weights

    def require_layer(self, layer: int) -> None:
        """Refuse a layer the store doesn't hold."""
        if layer not in self._layers:
            raise InputError(
                explain("no such layer", where="Engine", expected=list(self._layers), got=layer)
            )

    def version(self, layer: int) -> int:
        """Weight version of a layer; equal on every rank."""
        return self._layers[layer].version

    def residency(self, layer: int, lane: int) -> Residency:
        """What the slots of a lane hold, for the planner."""
        return self._layers[layer].residency[lane]

    def key(self, layer: int, expert: int) -> ExpertKey:
        """The identity of an expert's current bytes."""
        return ExpertKey(layer, expert, self._layers[layer].version)

    def bump_version(self, layer: int) -> None:
        """The layer's weights changed: every replica of the old ones is void."""
        entry = self._layers[layer]
        entry.version += 1
        self.forget(layer)

    def forget(self, layer: int | None = None, lane: int | None = None) -> None:
        """Treat slots as empty: of one layer or all, of one lane or all (after a failure, say)."""
        lanes = range(self.cfg.in_flight) if lane is None else (lane,)
        for number, entry in self._layers.items():
            if layer is None or number == layer:
                for n in lanes:
                    entry.residency[n] = Residency.empty(self.cfg.ranks, self.cfg.slots)
                    entry.slots[n] = [None] * self.cfg.slots

    def slot_row(self, lane: int, slot: int) -> int:
        """The store row of a slot."""
        return self.home_rows + lane * self.cfg.slots + slot

    def transfers(self, layer: int, lane: int, fetches: Sequence[Fetch]) -> list[Transfer]:
        """The row copies that carry out a plan's fetches."""
        local_E = self.placement.local_E
        return [
            Transfer(window, f.owner, int(local_E[f.expert]), f.rank, self.slot_row(lane, f.slot))
            for f in fetches
            for window in self._layers[layer].windows.values()
        ]

    def begin_fetch(
        self, layer: int, lane: int, fetches: Sequence[Fetch], after: Residency
    ) -> None:
        """Void the slots about to be overwritten; record what the plan will have put there."""
        entry = self._layers[layer]
        for f in fetches:
            if f.rank == self.rank:
                entry.slots[lane][f.slot] = None
        entry.residency[lane] = replace(after)

    def end_fetch(self, layer: int, lane: int, fetches: Sequence[Fetch]) -> None:
        """Record what has arrived in this rank's slots."""
        for f in fetches:
            if f.rank == self.rank:
                self._layers[layer].slots[lane][f.slot] = self.key(layer, f.expert)

    def require_slot(self, layer: int, lane: int, slot: int, expert: int) -> None:
        """Refuse to compute a slot that doesn't hold what the plan says.

        Raises:
            UnfetchedSlotError: names the slot, what it should hold and what it holds.
        """
        wanted, held = self.key(layer, expert), self._layers[layer].slots[lane][slot]
        if held != wanted:
            raise UnfetchedSlotError(
                explain(
                    f"slot {slot} of rank {self.rank} was not fetched",
                    where=f"layer {layer}",
                    expected=wanted,
                    got=held,
                    fix="call fetch() of this step before compute()",
                )
            )
