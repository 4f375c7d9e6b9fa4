"""The pace of searching: rests grow while searches don't pay, and end when one does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenep.plan.pace import LONGEST_REST, Pace


def steps_between_searches(pace: Pace) -> int:
    steps = 1
    while not pace.search_now():
        steps += 1
    return steps


def test_rests_double_up_to_the_longest_and_end_with_a_search_that_pays() -> None:
    pace, gaps = Pace(), []
    for _ in range(8):
        gaps.append(steps_between_searches(pace))
        pace.learn(won_s=1.0, cost_s=2.0)
    assert gaps == [1, 2, 3, 5, 9, 17, 33, 33]
    assert steps_between_searches(pace) == LONGEST_REST + 1
    pace.learn(won_s=2.0, cost_s=2.0)
    assert [steps_between_searches(pace) for _ in range(3)] == [1, 1, 1]


@given(won=st.floats(0, 1e3))
def test_free_searches_never_rest(won: float) -> None:
    pace = Pace()
    pace.learn(won, cost_s=0.0)
    assert pace.search_now()
