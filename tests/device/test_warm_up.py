"""What a machine runs before its first step, with everything but the calls left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenep import EPConfig
from evenep.device.warm_up import likely_rows, warm_up
from tests.cases import config


class Machine:
    """Takes notes of the calls that a runner would get."""

    sms_beside_fetch = 100

    def __init__(self, cfg: EPConfig) -> None:
        self.cfg, self.runner, self.calls = cfg, self, list[Any]()
        self.counts = torch.full((8,), 7)
        plan = SimpleNamespace(group_start_G=torch.full((8,), 7), group_count_G=self.counts)
        some = SimpleNamespace(local="weights"), SimpleNamespace(local="rows")
        self.lanes = [SimpleNamespace(plan=plan, weight=some[0], rows=some[1])]

    def groups(self, layer: int, lane: int, *, slots: bool, likely: int) -> tuple[int, int, bool]:
        return layer, lane, slots

    def warm_up(self, rows: str, weight: str | None, groups: Any, largest: int, sms: Any) -> None:
        assert not self.counts.any(), "counts of an earlier life"
        self.calls.append((rows, weight, groups, largest, sms))


@pytest.mark.parametrize("place", ["output", "activation"])
def test_every_kind_of_call_is_made_once_for_the_largest_step(place: str) -> None:
    machine = Machine(config(route_weight=place))
    warm_up(machine, 5)  # type: ignore[arg-type]
    weight = None if place == "output" else "weights"
    largest = likely_rows(machine.cfg, machine.cfg.max_tokens_per_rank)
    assert machine.calls == [
        ("rows", weight, (5, 0, slots), largest, sms)
        for slots, sms in ((False, None), (False, 100), (True, None))
    ]


def test_without_slots_there_is_no_fetch_to_leave_room_for() -> None:
    machine = Machine(config(slots_per_rank=0))
    warm_up(machine, 0)  # type: ignore[arg-type]
    assert [(groups[2], sms) for _, _, groups, _, sms in machine.calls] == [(False, None)]


def test_a_busy_group_has_twice_the_mean_as_a_power_of_two() -> None:
    cfg = config(num_experts=12, top_k=4, ranks=3)
    assert [likely_rows(cfg, T) for T in (0, 1, 24)] == [1, 2, 64]
