"""The cache of decoded experts: bounded, keyed by version, useful under a scan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.experts.decoded import Decoded, DecodedCache
from evenep.weights.layer import ExpertKey

UNIT = 16  # bytes of one unit of weights: two fp32 vectors of two


def weights(units: int) -> Decoded:
    return torch.zeros(2 * units), torch.zeros(2 * units)


def nbytes(cache: DecodedCache) -> int:
    """Counted from the tensors kept, not from the cache's own books."""
    kept = (pair for pair, _, _ in cache._entries.values())
    return sum(t.numel() * t.element_size() for pair in kept for t in pair)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 12),
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.integers(0, 2)),
            st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 1)),
        ),
        max_size=60,
    ),
)
def test_never_above_its_bound_and_what_comes_back_is_always_the_keys(
    limit: int, calls: list[tuple[object, ...]]
) -> None:
    cache, made = DecodedCache(limit * UNIT), dict[ExpertKey, Decoded]()
    for call in calls:
        if call[0] == "pass":
            cache.begin_pass(int(str(call[1])))
            continue
        layer, expert, version = (int(str(n)) for n in call)
        key = ExpertKey(layer, expert, version)
        kept = key in cache._entries
        fresh: list[Decoded] = []

        def decode(key: ExpertKey = key, fresh: list[Decoded] = fresh) -> Decoded:
            fresh.append(weights(1 + key.expert))
            return fresh[0]

        got = cache.get(key, decode)
        assert bool(fresh) != kept, "decodes exactly when it isn't kept"
        assert got is (made[key] if kept else fresh[0])
        made[key] = got
        assert nbytes(cache) == cache.nbytes <= limit * UNIT


def test_a_hit_returns_the_same_object_and_does_not_decode() -> None:
    cache = DecodedCache(UNIT)
    key = ExpertKey(0, 0, 0)
    first = cache.get(key, lambda: weights(1))

    def fail() -> Decoded:
        raise AssertionError("decoded again")

    assert cache.get(key, fail) is first


def test_a_new_version_is_another_key() -> None:
    cache = DecodedCache(10 * UNIT)
    old = cache.get(ExpertKey(0, 3, 0), lambda: weights(1))
    new = cache.get(ExpertKey(0, 3, 1), lambda: weights(1))
    other_layer = cache.get(ExpertKey(1, 3, 0), lambda: weights(1))
    assert len({id(w) for w in (old, new, other_layer)}) == 3


def test_an_old_versions_weights_make_room_in_the_end() -> None:
    cache = DecodedCache(4 * UNIT)
    for version in range(5):
        for _ in range(3):
            cache.begin_pass(0)
            for expert in range(4):
                cache.get(ExpertKey(0, expert, version), lambda: weights(1))
        assert {key.version for key in cache._entries} == {version}


@pytest.mark.parametrize("experts", [9, 12, 16])
def test_a_scan_over_more_than_fits_still_hits(experts: int) -> None:
    """Plain LRU would miss every time: each entry would go right before its next use."""
    room, passes = 8, 20
    cache, decoded = DecodedCache(room * UNIT), 0

    def decode() -> Decoded:
        nonlocal decoded
        decoded += 1
        return weights(1)

    for _ in range(passes):
        cache.begin_pass(0)
        for expert in range(experts):
            cache.get(ExpertKey(0, expert, 0), decode)
    assert decoded <= experts + (passes - 1) * (experts - room)


def test_what_went_out_of_use_gives_way() -> None:
    cache = DecodedCache(4 * UNIT)
    for hot in (range(4), range(4, 8)):
        for _ in range(4):
            cache.begin_pass(0)
            for expert in hot:
                cache.get(ExpertKey(0, expert, 0), lambda: weights(1))
        assert {key.expert for key in cache._entries} == set(hot)


def test_weights_larger_than_the_bound_push_nothing_out() -> None:
    cache = DecodedCache(4 * UNIT)
    for expert in range(4):
        cache.get(ExpertKey(0, expert, 0), lambda: weights(1))
    for _ in range(3):
        cache.begin_pass(0)
    cache.get(ExpertKey(0, 9, 0), lambda: weights(5))
    assert len(cache._entries) == 4


def test_no_bytes_allowed_means_nothing_kept() -> None:
    cache = DecodedCache(0)
    cache.get(ExpertKey(0, 0, 0), lambda: weights(1))
    assert (cache.nbytes, len(cache._entries)) == (0, 0)
