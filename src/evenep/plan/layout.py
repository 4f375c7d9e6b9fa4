"""allocation → segments, row offsets, and who sends what where.

A rank's receive buffer is a run of segments: its home experts ascending, then its slots; only
experts with routes have one, each padded to the row alignment. Inside a segment rows are ordered
by source rank, then by the route's order at its source.

How an expert's routes are dealt to the ranks that compute it (``order``):

* ``local_first``: routes stay on their source rank as far as it computes the expert; what is
  left fills the ranks in ascending order. Fewer rows travel.
* ``rank_order``: MoonEP's rule: the routes of all sources, lowest source first, fill the ranks in
  ascending order, home or not.

Worked example (one expert, routes per source ``2 2 1``, allocation ``2 0 3``): ``rank_order``
sends source 0's two to rank 0 and the rest to rank 2. ``local_first`` keeps source 0's two and
source 2's one at home, and source 1's two go to rank 2: the same rows here, but with allocation
``0 2 3`` source 1 keeps both of its own while ``rank_order`` would hand it source 0's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import PlanError, explain
from .capacity import ceil_to
from .placement import Ints, Placement

ORDERS = ("local_first", "rank_order")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """One rank's segments, in row order. G segments.

    Attributes:
        expert_G: expert of each segment.
        weight_row_G: its weights' row on this rank: home row, or ``home_rows + slot``.
        start_G: first row.
        count_G: rows that hold a route.
        padded_G: rows including padding.
        rows: rows of all segments, the step's receive buffer size.
    """

    expert_G: Ints
    weight_row_G: Ints
    start_G: Ints
    count_G: Ints
    padded_G: Ints
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Where one source's routes go: consecutive routes of one expert to consecutive rows. N runs.

    Runs are sorted by expert, so that a stable sort of the source's routes by expert lines up
    with them: the first ``count_N[0]`` sorted routes go to rows ``row_N[0] …`` of ``dest_N[0]``.
    """

    expert_N: Ints
    dest_N: Ints
    row_N: Ints
    count_N: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Where every row of a step lives, on every rank.

    Attributes:
        start_ER: int64 ``[E, R]``, first row of expert e's segment on rank r, -1 without one.
        segments: one ``Segments`` per rank.
    """

    start_ER: Ints
    segments: tuple[Segments, ...]


def build_layout(alloc_ER: Ints, placement: Placement, slot_RB: Ints, align: int) -> Layout:
    """Segments and offsets of an allocation.

    Args:
        alloc_ER: routes of each expert on each rank.
        slot_RB: the expert in each slot, -1 when unused.

    Raises:
        PlanError: an expert computes away from home without a slot.
    """
    E, R = alloc_ER.shape
    home_rows = placement.max_experts_per_rank
    weight_row_ER = np.full((E, R), -1, dtype=np.int64)
    ranks, slots = np.nonzero(slot_RB >= 0)
    weight_row_ER[slot_RB[ranks, slots], ranks] = home_rows + slots
    weight_row_ER[np.arange(E), placement.home_E] = placement.local_E
    e_G, r_G = np.nonzero(alloc_ER > 0)
    row_G = weight_row_ER[e_G, r_G]
    if (row_G < 0).any():
        lost = int(np.argmax(row_G < 0))
        raise PlanError(
            explain(
                f"expert {e_G[lost]} has routes on rank {r_G[lost]} but no weights there",
                where="build_layout",
                fix="raise slots_per_rank or use a policy that fits the budget",
            )
        )
    order = np.lexsort((row_G, r_G))
    r_G, e_G, row_G = r_G[order], e_G[order], row_G[order]
    count_G = alloc_ER[e_G, r_G]
    padded_G = ceil_to(count_G, align)
    ends_G = np.cumsum(padded_G)
    first_R1 = np.searchsorted(r_G, np.arange(R + 1))
    base_R = np.concatenate([[0], ends_G])[first_R1]
    start_G = ends_G - padded_G - base_R[r_G]
    start_ER = np.full((E, R), -1, dtype=np.int64)
    start_ER[e_G, r_G] = start_G
    segments = tuple(
        Segments(
            expert_G=e_G[a:b],
            weight_row_G=row_G[a:b],
            start_G=start_G[a:b],
            count_G=count_G[a:b],
            padded_G=padded_G[a:b],
            rows=int(base_R[r + 1] - base_R[r]),
        )
        for r, (a, b) in enumerate(zip(first_R1[:-1].tolist(), first_R1[1:].tolist(), strict=True))
    )
    return Layout(start_ER=start_ER, segments=segments)


def source_runs(
    layout: Layout, counts_RE: Ints, alloc_ER: Ints, source: int, order: str = "local_first"
) -> Runs:
    """Destination rows of one source rank's routes."""
    if order not in ORDERS:
        raise PlanError(explain("unknown route order", expected=f"one of {ORDERS}", got=order))
    mine = np.flatnonzero(counts_RE[source])
    split = (alloc_ER[mine] > 0).sum(axis=1) > 1
    whole, parted = mine[~split], mine[split]
    dest_W = alloc_ER[whole].argmax(axis=1)
    e_P, dest_P, offset_P, count_P = _deal(counts_RE[:, parted], alloc_ER[parted], source, order)
    expert_N = np.concatenate([whole, parted[e_P]])
    dest_N = np.concatenate([dest_W, dest_P])
    offset_N = np.concatenate([counts_RE[:source, whole].sum(axis=0), offset_P])
    count_N = np.concatenate([counts_RE[source, whole], count_P])
    by_expert = np.argsort(expert_N, kind="stable")
    expert_N, dest_N = expert_N[by_expert], dest_N[by_expert]
    return Runs(
        expert_N=expert_N,
        dest_N=dest_N,
        row_N=layout.start_ER[expert_N, dest_N] + offset_N[by_expert],
        count_N=count_N[by_expert],
    )


def _deal(
    counts_RP: Ints, alloc_PR: Ints, source: int, order: str
) -> tuple[Ints, Ints, Ints, Ints]:
    """Deal the routes of P experts that run on several ranks.

    Returns, per run: index of the expert, destination, offset in its segment there, routes.
    """
    R = alloc_PR.shape[1]
    local_first = order == "local_first"
    kept_RP = np.minimum(counts_RP, alloc_PR.T) if local_first else np.zeros_like(counts_RP)
    rest_RP, room_PR = counts_RP - kept_RP, alloc_PR - kept_RP.T
    before_P1 = rest_RP[:source].sum(axis=0)[:, None]
    filled_PR = np.cumsum(room_PR, axis=1) - room_PR
    # Sources and destinations both cut the same line of leftover routes into intervals.
    take_PR = np.minimum(before_P1 + rest_RP[source][:, None], filled_PR + room_PR)
    take_PR = np.maximum(take_PR - np.maximum(before_P1, filled_PR), 0)
    offset_PR = np.clip(before_P1 - filled_PR, 0, room_PR)
    offset_PR[:, :source] += kept_RP[:source].T
    take_PR[:, source] += kept_RP[source]
    columns = np.arange(R)
    if local_first:
        columns = np.concatenate([[source], np.delete(columns, source)])
    p_N, c_N = np.nonzero(take_PR[:, columns])
    dest_N = columns[c_N]
    return p_N, dest_N, offset_PR[p_N, dest_N], take_PR[p_N, dest_N]
