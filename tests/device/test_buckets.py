"""Which bucket a step takes, and what it finds in there; a stand-in for the graph just calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evenep.device.buckets import Buckets
from evenep.errors import InputError
from tests.cases import config


class Engine:
    """Doubles rows that are routed; the number of tokens it saw is kept."""

    def __init__(self) -> None:
        self.cfg = config(max_tokens_per_rank=24, top_k=2, hidden_size=4)
        self.transport = SimpleNamespace(device=torch.device("cpu"))
        self.seen: list[int] = []

    def __call__(
        self, x: Tensor, ids: Tensor, w: Tensor, layer: int, *, policy: str | None, out: Tensor
    ) -> Tensor:
        assert (layer, policy) == (3, "static")
        self.seen.append(x.shape[0])
        return out.copy_(torch.where(ids[:, :1] >= 0, 2 * x, 0))

    def capture(self, fn: Callable[[], Tensor]) -> Any:
        fn()
        return SimpleNamespace(replay=fn)


def made(sizes: list[int]) -> tuple[Engine, Buckets]:
    engine = Engine()
    buckets = Buckets(engine, sizes, 3, "static")  # type: ignore[arg-type]
    engine.seen.clear()
    return engine, buckets


def inputs(T: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(T)
    x = torch.randn(T, 4, generator=g).bfloat16()
    return x, torch.randint(0, 13, (T, 2), generator=g), torch.rand(T, 2, generator=g)


def test_a_step_takes_the_smallest_bucket_that_holds_it_and_gets_its_own_rows() -> None:
    engine, buckets = made([8, 1, 20, 8])
    assert buckets.sizes == (1, 8, 20)
    for T, size in ((0, 1), (1, 1), (2, 8), (8, 8), (9, 20), (20, 20), (3, 8)):
        x, ids, w = inputs(T)
        y = buckets(x, ids, w)
        assert engine.seen[-1] == size
        assert torch.equal(y, 2 * x)


def test_what_an_earlier_step_left_in_a_bucket_is_not_routed() -> None:
    _, buckets = made([8])
    buckets(*inputs(8))
    buckets(*inputs(3))
    left = buckets._buckets[8]
    assert (left.ids_SK[3:] == -1).all()
    assert not left.y_SH[3:].any()


def test_ranks_take_the_bucket_of_the_busiest() -> None:
    engine, buckets = made([1, 8, 20])
    x, ids, w = inputs(1)
    assert torch.equal(buckets(x, ids, w, tokens=9), 2 * x)
    assert engine.seen == [20]


@pytest.mark.parametrize("sizes", [[], [0], [25], [-1, 8]])
def test_sizes_that_no_step_can_have_are_refused(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="bucket sizes"):
        made(sizes)


def test_inputs_that_fit_no_bucket_or_each_other_are_refused_and_change_nothing() -> None:
    engine, buckets = made([8])
    x, ids, w = inputs(4)
    for args in ((*inputs(9),), (x, ids[:3], w), (x, ids, w[:3]), (x, ids, w, 3), (x, ids, w, 9)):
        with pytest.raises(InputError):
            buckets(*args)
    assert engine.seen == []
