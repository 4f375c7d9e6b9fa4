"""The expert store: where rows and slots lie, what a fetch copies, what a slot may be used for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep import EPConfig, EPGroup, ExpertWeights, Placement, Residency
from evenep.errors import InputError, LaunchError, UnfetchedSlotError
from evenep.formats import format_of
from evenep.launch import launch
from evenep.plan import Fetch
from evenep.transport import Tag
from evenep.weights.layer import ExpertKey
from evenep.weights.store import ExpertStore

from ..oracle import expert_tensors


def config(**changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": 7,
        "top_k": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "max_tokens_per_rank": 8,
        "ranks": 3,
        "slots_per_rank": 2,
        "in_flight": 2,
        "weight_format": "mxfp4",
        "timeout_s": 10.0,
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


def on_every_rank(
    check: Callable[[ExpertStore], object], cfg: EPConfig, homes: Sequence[int] | None = None
) -> list[object]:
    """A store of two layers per rank (threads of this process); what ``check`` returns."""

    def body(group: EPGroup) -> object:
        E, R = cfg.num_experts, cfg.ranks
        placed = Placement.contiguous(E, R) if homes is None else Placement.from_homes(homes, R)
        wire = group.connect(timeout_s=cfg.timeout_s, lanes=cfg.in_flight, gather_words=8)
        source = ExpertWeights.random(cfg, 2, seed=4)
        store = ExpertStore(cfg, placed, wire, source.layers)
        for layer in source.layers:
            store.load(layer, source)
        store.wire = wire  # type: ignore[attr-defined]  # for tests that fetch
        wire.barrier(Tag("construct"))
        try:
            return check(store)
        finally:
            wire.close()

    try:
        return launch(body, cfg.ranks, "threads")
    except LaunchError as error:
        raise next(iter(error.failures.values())) from None


def holds(store: ExpertStore, layer: int, row: int, expert: int) -> bool:
    """The row's bytes are the expert's, in every tensor."""
    want = expert_tensors(store.cfg, ExpertWeights.random(store.cfg, 2, seed=4), layer, expert)
    got = store.layer(layer).row(row)
    return all(torch.equal(got[n].view(torch.uint8), t.view(torch.uint8)) for n, t in want.items())


# ---- geometry


@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["bf16", "mxfp4"]),
)
def test_one_window_holds_home_rows_then_the_slots_of_each_lane(
    E: int, R: int, slots: int, lanes: int, weight_format: str
) -> None:
    cfg = config(
        num_experts=E, top_k=1, ranks=R, slots_per_rank=slots, in_flight=lanes,
        weight_format=weight_format, policy="static",
    )  # fmt: skip

    def check(store: ExpertStore) -> None:
        home = -(-E // R)
        assert store.layers == (0, 1)
        assert store.home_rows == home
        taken = [store.slot_row(lane, slot) for lane in range(lanes) for slot in range(slots)]
        assert taken == list(range(home, home + lanes * slots)), "no two slots share a row"
        for layer in store.layers:
            stacked = store.layer(layer).stacked
            for spec in format_of(cfg).specs(cfg):
                assert stacked[spec.name].shape == (home + lanes * slots, *spec.shape)
                assert stacked[spec.name].dtype == spec.dtype
            for row, expert in enumerate(store.placement.experts_of(store.rank)):
                assert holds(store, layer, row, expert)

    on_every_rank(check, cfg)


def test_any_placement_puts_experts_ascending_and_an_idle_rank_has_rows_too() -> None:
    homes = [2, 0, 2, 2, 0, 0, 2]  # rank 1 owns nothing

    def check(store: ExpertStore) -> None:
        assert store.home_rows == 4
        for row, expert in enumerate(e for e, home in enumerate(homes) if home == store.rank):
            assert holds(store, 1, row, expert)

    on_every_rank(check, config(), homes)


# ---- fetching

FETCHES = (Fetch(0, 0, 1, 1), Fetch(6, 2, 0, 0), Fetch(4, 1, 2, 1))


def test_transfers_copy_every_tensor_from_the_home_row_to_the_lanes_slot() -> None:
    def check(store: ExpertStore) -> None:
        names = [s.name for s in format_of(store.cfg).specs(store.cfg)]
        stacked = store.layer(1).stacked
        got = [
            (t.source, t.source_row, t.dest, t.dest_row, t.window.local.data_ptr())
            for t in store.transfers(1, 1, FETCHES)
        ]
        # 7 experts at home as 3 2 2; lane 1's slots are rows 5 and 6.
        where = [(0, 0, 1, 6), (2, 1, 0, 5), (1, 1, 2, 6)]
        assert got == [(*w, stacked[name].data_ptr()) for w in where for name in names]
        assert store.transfers(0, 0, ()) == []

    on_every_rank(check, config())


def test_a_fetch_brings_the_experts_bytes_and_touches_nothing_else() -> None:
    def check(store: ExpertStore) -> None:
        rank, lane, layer = store.rank, 1, 1
        before = {n: t.clone() for n, t in store.layer(layer).stacked.items()}
        other = {n: t.clone() for n, t in store.layer(0).stacked.items()}
        store.wire.fetch(store.transfers(layer, lane, FETCHES), Tag("fetch"))  # type: ignore[attr-defined]
        store.wire.barrier(Tag("construct"))  # type: ignore[attr-defined]
        mine = [f for f in FETCHES if f.rank == rank]
        written = {store.slot_row(lane, f.slot) for f in mine}
        for f in mine:
            assert holds(store, layer, store.slot_row(lane, f.slot), f.expert)
        for name, tensor in store.layer(layer).stacked.items():
            for row in set(range(tensor.shape[0])) - written:
                assert torch.equal(tensor[row], before[name][row]), (name, row)
        assert all(torch.equal(t, other[n]) for n, t in store.layer(0).stacked.items())

    on_every_rank(check, config())


# ---- records


def arrived(store: ExpertStore, layer: int = 0, lane: int = 0) -> None:
    """As a step does: begin, copy, end."""
    table = [[6, -1], [-1, 0], [-1, 4]]
    store.begin_fetch(layer, lane, FETCHES, Residency.of(table))
    store.end_fetch(layer, lane, FETCHES)


def mine(store: ExpertStore) -> Fetch:
    return next(f for f in FETCHES if f.rank == store.rank)


def test_a_slot_may_be_computed_only_between_the_end_of_its_fetch_and_the_next_begin() -> None:
    def check(store: ExpertStore) -> None:
        f = mine(store)
        with pytest.raises(UnfetchedSlotError):
            store.require_slot(0, 0, f.slot, f.expert)
        store.begin_fetch(0, 0, FETCHES, Residency.empty(3, 2))
        with pytest.raises(UnfetchedSlotError):
            store.require_slot(0, 0, f.slot, f.expert)
        store.end_fetch(0, 0, FETCHES)
        store.require_slot(0, 0, f.slot, f.expert)
        for layer, lane, slot, expert in (
            (1, 0, f.slot, f.expert),
            (0, 1, f.slot, f.expert),
            (0, 0, 1 - f.slot, f.expert),
            (0, 0, f.slot, f.expert + 1),
        ):
            with pytest.raises(UnfetchedSlotError):
                store.require_slot(layer, lane, slot, expert)
        store.begin_fetch(0, 0, FETCHES, Residency.empty(3, 2))
        with pytest.raises(UnfetchedSlotError):
            store.require_slot(0, 0, f.slot, f.expert)

    on_every_rank(check, config())


def test_the_error_of_an_unfetched_slot_names_slot_rank_layer_and_both_contents() -> None:
    def check(store: ExpertStore) -> str:
        arrived(store, layer=1)
        with pytest.raises(UnfetchedSlotError) as caught:
            store.require_slot(1, 0, mine(store).slot, 5)
        return str(caught.value)

    for rank, text in enumerate(map(str, on_every_rank(check, config()))):
        f = next(f for f in FETCHES if f.rank == rank)
        for words in (
            f"slot {f.slot} of rank {rank} was not fetched",
            "layer 1",
            f"expected {ExpertKey(1, 5, 0)}",
            f"got {ExpertKey(1, f.expert, 0)}",
            "Fix: call fetch() of this step before compute()",
        ):
            assert words in text


def test_new_weights_void_the_replicas_of_their_layer_alone() -> None:
    def check(store: ExpertStore) -> None:
        f = mine(store)
        for layer in (0, 1):
            for lane in (0, 1):
                arrived(store, layer, lane)
                assert store.residency(layer, lane).experts_RB[f.rank, f.slot] == f.expert
        store.bump_version(1)
        assert (store.version(0), store.version(1)) == (0, 1)
        assert store.key(1, 3) == ExpertKey(1, 3, 1)
        for lane in (0, 1):
            store.require_slot(0, lane, f.slot, f.expert)
            assert store.residency(0, lane).experts_RB.max() >= 0
            assert store.residency(1, lane).experts_RB.max() == -1
            with pytest.raises(UnfetchedSlotError):
                store.require_slot(1, lane, f.slot, f.expert)

    on_every_rank(check, config())


@pytest.mark.parametrize("layer", [None, 0])
def test_forget_empties_the_slots_asked_for_and_keeps_versions(layer: int | None) -> None:
    def check(store: ExpertStore) -> None:
        f = mine(store)
        for number in (0, 1):
            arrived(store, number, 1)
        store.forget(layer)
        assert (store.version(0), store.version(1)) == (0, 0)
        with pytest.raises(UnfetchedSlotError):
            store.require_slot(0, 1, f.slot, f.expert)
        if layer is None:
            with pytest.raises(UnfetchedSlotError):
                store.require_slot(1, 1, f.slot, f.expert)
        else:
            store.require_slot(1, 1, f.slot, f.expert)
        arrived(store, 0, 1)
        store.require_slot(0, 1, f.slot, f.expert)

    on_every_rank(check, config())


def test_reloading_a_layer_overwrites_home_rows_and_no_slot() -> None:
    def check(store: ExpertStore) -> None:
        slots = {
            n: t[store.home_rows :].fill_(7).clone() for n, t in store.layer(0).stacked.items()
        }
        store.load(0, ExpertWeights.random(store.cfg, 2, seed=5))
        own = len(store.placement.experts_of(store.rank))
        assert not any(holds(store, 0, row, store.placement.experts_of(store.rank)[row])
                       for row in range(own))  # fmt: skip
        for name, tensor in store.layer(0).stacked.items():
            assert torch.equal(tensor[store.home_rows :], slots[name])

    on_every_rank(check, config())


def test_an_unknown_layer_is_refused_with_those_there_are() -> None:
    def check(store: ExpertStore) -> None:
        store.require_layer(1)
        with pytest.raises(InputError, match=r"no such layer \(expected \[0, 1\], got 2\)"):
            store.require_layer(2)

    on_every_rank(check, config())
