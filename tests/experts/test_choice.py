"""Which runner ``auto`` is: a function of the agreed table and the config, and of nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenep import EPConfig
from evenep.experts.choice import ROWS, choose, full_rows, reached

times = st.tuples(*[st.integers(0, 2**40)] * len(ROWS))
tables = st.dictionaries(st.sampled_from("abcd"), times, min_size=1)


def test_the_worked_example() -> None:
    cfg = EPConfig(
        num_experts=256, top_k=8, hidden_size=64, intermediate_size=64, max_tokens_per_rank=512,
        ranks=4,
    )  # fmt: skip
    assert full_rows(cfg) == 64
    name, why = choose({"a": (10, 12, 40, 9, 9), "b": (8, 13, 50, 0, 0)}, full_rows(cfg))
    assert name == "a"
    assert "over 1, 16, 64 rows" in why
    assert "b 0.1 us" in why


@pytest.mark.parametrize(
    ("rows", "buckets"), [(0, 1), (1, 1), (2, 2), (16, 2), (17, 3), (256, 4), (257, 5), (9999, 5)]
)
def test_buckets_up_to_the_first_that_holds_a_full_step(rows: int, buckets: int) -> None:
    assert reached(rows) == buckets


@given(tables, st.integers(1, 3000))
def test_the_choice_has_the_least_total(table: dict[str, tuple[int, ...]], rows: int) -> None:
    chosen = choose(table, rows).name
    totals = {name: sum(ns[: reached(rows)]) for name, ns in table.items()}
    assert totals[chosen] == min(totals.values())


@given(tables, st.integers(1, 3000), st.integers(0, len(ROWS) - 1), st.integers(1, 2**40))
def test_a_chosen_runner_stays_chosen_when_it_gets_faster_or_another_slower(
    table: dict[str, tuple[int, ...]], rows: int, bucket: int, ns: int
) -> None:
    chosen = choose(table, rows).name

    def changed(name: str, by: int) -> dict[str, tuple[int, ...]]:
        row = list(table[name])
        row[bucket] = max(0, row[bucket] + by)
        return {**table, name: tuple(row)}

    assert choose(changed(chosen, -ns), rows).name == chosen
    for other in table.keys() - {chosen}:
        assert choose(changed(other, ns), rows).name == chosen


@given(times, st.integers(1, 3000))
def test_of_equals_the_first_is_taken(ns: tuple[int, ...], rows: int) -> None:
    assert choose({"first": ns, "second": ns}, rows).name == "first"
