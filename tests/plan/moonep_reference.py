"""MoonEP's planner, written a second time from its specification: slow, plain lists, one route
at a time. Shares no code with ``evenep.plan``; the ``exact`` policy and ``rank_order`` must agree.

Phase numbers are the specification's. Groups are laid out in the compact order (own experts
ascending, then slots by ascending expert id); the classic order has the same groups in other
places, and EvenEP doesn't use it.
"""

from __future__ import annotations

Table = list[list[int]]
Row = tuple[int, int]  # (rank, row)


def exact_caps(total: int, ranks: int) -> list[int]:
    """What every rank must compute."""
    return [total // ranks + (1 if r < total % ranks else 0) for r in range(ranks)]


def pair_ranks(load: list[int], cap: list[int]) -> Table:
    """Phase 1: ``quota[h][u]``, routes donor h owes receiver u."""
    ranks = len(load)
    quota = [[0] * ranks for _ in range(ranks)]
    balance = [load[r] - cap[r] for r in range(ranks)]
    while max(balance) > 0:
        donor = receiver = 0
        for r in range(ranks):  # strict comparisons: the lowest index wins a tie
            if balance[r] > balance[donor]:
                donor = r
            if balance[r] < balance[receiver]:
                receiver = r
        owed = -balance[receiver]
        quota[donor][receiver] = owed
        balance[donor] -= owed
        balance[receiver] = 0
    return quota


def allocate(tokens_per_expert: Table, home: list[int]) -> Table:
    """Phases 1 and 2: ``alloc[rank][expert]``."""
    ranks, experts = len(tokens_per_expert), len(home)
    count = [sum(tokens_per_expert[r][e] for r in range(ranks)) for e in range(experts)]
    load = [sum(count[e] for e in range(experts) if home[e] == r) for r in range(ranks)]
    quota = pair_ranks(load, exact_caps(sum(count), ranks))
    alloc = [[count[e] if home[e] == r else 0 for e in range(experts)] for r in range(ranks)]
    for donor in range(ranks):
        owed = quota[donor]
        own = [e for e in range(experts) if home[e] == donor]
        while max(owed) > 0:
            d = owed.index(max(owed))
            e = max(own, key=lambda e: (alloc[donor][e], -e))
            moved = min(alloc[donor][e], owed[d])
            alloc[d][e] += moved
            alloc[donor][e] -= moved
            owed[d] -= moved
    return alloc


def segment_starts(alloc: Table, home: list[int], align: int) -> list[dict[int, int]]:
    """Phases 3 (compact) and 4: first row of every expert's segment on every rank."""
    starts: list[dict[int, int]] = []
    for rank, row_of in enumerate(alloc):
        here = [e for e, routes in enumerate(row_of) if routes]
        own = [e for e in here if home[e] == rank]
        foreign = [e for e in here if home[e] != rank]
        start, offsets = 0, {}
        for e in own + foreign:
            offsets[e] = start
            start += (row_of[e] + align - 1) // align * align
        starts.append(offsets)
    return starts


def rows_of_routes(
    tokens_per_expert: Table, alloc: Table, home: list[int], align: int
) -> list[dict[int, list[Row]]]:
    """Phase 5: for every source rank and expert, where its routes go, in the source's order."""
    ranks, experts = len(alloc), len(home)
    starts = segment_starts(alloc, home, align)
    rows: list[dict[int, list[Row]]] = [{} for _ in range(ranks)]
    for e in range(experts):
        places = [(d, starts[d][e] + i) for d in range(ranks) for i in range(alloc[d][e])]
        for source in range(ranks):
            mine = tokens_per_expert[source][e]
            if mine:
                rows[source][e] = places[:mine]
                places = places[mine:]
    return rows
