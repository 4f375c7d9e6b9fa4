"""MoonEP's greedy: every rank computes exactly its share, bit for bit as MoonEP allocates.

Two phases, ties always to the lowest index. *Pairing*: the most overloaded rank fills the most
starved one completely, even if that starves the donor, until no rank is above its share; each
receiver is thereby fed by one donor only, so it needs slots for at most one home group. *Experts*:
a donor serves its largest remaining quota from its largest remaining expert.

Worked example (R = 3, two experts a rank, counts per expert ``1 5 3 2 1 0``): loads ``6 5 1``,
share 4, balances ``+2 +1 -3``. Rank 0 gives 3 to rank 2 (balance -1, +1, 0), rank 1 gives 1 to
rank 0. Expert 1 hands 3 routes to rank 2, expert 2 hands 1 to rank 0.
"""

from __future__ import annotations

from ..placement import Ints
from ..problem import Problem


def pair_ranks(balance: list[int]) -> list[tuple[int, int, int]]:
    """``(donor, receiver, routes)`` until no balance is positive; ``balance`` is consumed."""
    quotas: list[tuple[int, int, int]] = []
    while True:
        most = max(balance)
        if most <= 0:
            return quotas
        donor, receiver = balance.index(most), balance.index(min(balance))
        quota = -balance[receiver]
        quotas.append((donor, receiver, quota))
        balance[donor] -= quota
        balance[receiver] = 0


def exact(problem: Problem) -> Ints:
    """The exact allocation; ``[E, R]``.

    Always exists: a donor is above its share, so it owns what it gives away. It needs at most
    one home group of slots per rank; whether they exist is the caller's check (``fits``).
    """
    share_R = problem.caps(0.0)
    alloc_ER = problem.static_allocation()
    quotas = pair_ranks((problem.home_loads_R - share_R).tolist())
    quota_of: dict[int, dict[int, int]] = {}
    for donor, receiver, quota in quotas:
        quota_of.setdefault(donor, {})[receiver] = quota
    routes_E = problem.routes_E.tolist()
    for donor, owed in quota_of.items():
        _serve(alloc_ER, donor, owed, problem.placement.experts_of(donor), routes_E)
    return alloc_ER


def _serve(
    alloc_ER: Ints, donor: int, owed: dict[int, int], experts: list[int], routes_E: list[int]
) -> None:
    """Serve one donor's quotas from its experts, largest first on both sides."""
    receivers = sorted(owed)
    quota = [owed[r] for r in receivers]
    remaining = [routes_E[e] for e in experts]
    while True:
        largest_quota, largest = max(quota), max(remaining)
        if largest_quota <= 0:
            return
        d, j = quota.index(largest_quota), remaining.index(largest)
        routes = min(largest, largest_quota)
        alloc_ER[experts[j], receivers[d]] += routes
        alloc_ER[experts[j], donor] -= routes
        remaining[j] -= routes
        quota[d] -= routes
