"""What no plan can beat: lower bounds on replicas and time (``optimum``: tiny cases, exactly).

The bounds look at home loads ``L_r`` and caps ``C_r`` (``Problem.caps``) only, so they hold for
every policy. A *replica* is an edge between an expert and a rank that isn't its home; drawn
between the home and that rank it makes a graph on the ranks, and routes flow along its edges only.
Two facts carry every proof below. *Component fact*: routes can't leave a connected component, so
its home loads sum to at most its caps. *Edge fact*: one replica carries at most its expert's
routes, and at most the cap of the rank it sits on.

``python -m evenep.plan.bounds`` prints how far the policies are from the bounds.

Letters: R ranks, E experts, S tokens per rank, K top-k; P two to the number of unbalanced ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .cost import Hardware, compute_ps
from .optimum import brute_force_replicas, brute_force_time
from .placement import Ints, Placement
from .policies.bounded import bounded
from .policies.exact import exact
from .problem import Problem
from .residency import Residency

__all__ = [
    "brute_force_replicas",
    "brute_force_time",
    "donor_bound",
    "forest_bound",
    "lower_bound",
    "receiver_bound",
    "room_bound",
    "time_bound_ps",
]

SPLIT_LIMIT = 16  # unbalanced ranks up to which zero-sum groups are counted exactly


def lower_bound(problem: Problem, epsilon: float) -> int:
    """Replicas every allocation within ``problem.caps(epsilon)`` has, whatever the slot budget.

    The largest of bounds that hold each for itself.
    """
    return max(
        bound(problem, epsilon) for bound in (forest_bound, donor_bound, receiver_bound, room_bound)
    )


def forest_bound(problem: Problem, epsilon: float) -> int:
    """Unbalanced ranks minus the zero-sum groups they can be split into; 0 where caps have slack.

    Proof. When the caps sum to the total, every rank computes exactly its cap, so by the component
    fact ``sum(L - C) <= 0`` in every component, and as these add up to 0 each is 0. A component of
    k ranks has at least k - 1 edges; dropping its balanced ranks leaves a zero-sum group with no
    more edges needed. So edges >= ranks - groups over unbalanced ranks, least at the most groups.

    Beyond ``SPLIT_LIMIT`` unbalanced ranks the most groups (a subset-sum problem) are bounded
    from above: a group of two is a pair ``+x, -x``, every other group has three ranks or more.
    """
    gap_R = problem.home_loads_R - problem.caps(epsilon)
    if int(gap_R.sum()) < 0:
        return 0
    gaps = [g for g in gap_R.tolist() if g]
    if len(gaps) <= SPLIT_LIMIT:
        return len(gaps) - most_zero_sum_groups(gaps)
    pairs = sum(min(gaps.count(g), gaps.count(-g)) for g in set(gaps) if g > 0)
    return len(gaps) - pairs - (len(gaps) - 2 * pairs) // 3


def most_zero_sum_groups(gaps: list[int]) -> int:
    """The most groups of sum 0 that non-zero numbers of sum 0 can be split into.

    Write the numbers down group after group: the sum so far is 0 after each group. Conversely the
    stretches between zero sums of any order are such groups. So the answer is the most zero sums
    any order passes: ``best(set) = max over i of best(set - i) + (sum(set) == 0)``.
    """
    if not gaps:
        return 0
    sum_P, size_P = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for gap in gaps:
        sum_P = np.concatenate([sum_P, sum_P + gap])
        size_P = np.concatenate([size_P, size_P + 1])
    best_P = np.zeros(sum_P.size, dtype=np.int64)
    for size in range(1, len(gaps) + 1):
        sets = np.flatnonzero(size_P == size)
        for bit in (1 << i for i in range(len(gaps))):
            having = sets[(sets & bit) > 0]
            best_P[having] = np.maximum(best_P[having], best_P[having ^ bit])
        best_P[sets] += sum_P[sets] == 0
    return int(best_P[-1])


def donor_bound(problem: Problem, epsilon: float) -> int:
    """Replicas that overloaded homes must send out; with slack too.

    Proof. At least ``L_r - C_r`` of home r's routes are computed elsewhere. By the edge fact, k
    replicas of an expert with n routes carry at most ``min(n, k * c)``, c the largest cap of the
    other ranks: its first ``n // c`` replicas c each, the next one the rest. Any m replicas thus
    carry no more than the m largest of these pieces, so r sends at least as many replicas as the
    fewest pieces that reach ``L_r - C_r``. A replica has one home, so homes add up.

    (Pieces as wide as the largest deficit would be wrong here: a receiver may hand its own experts
    on and take in more than its deficit. Over all homes together they hold: ``room_bound``.)
    """
    caps = problem.caps(epsilon).tolist()
    bound = 0
    for rank, load in enumerate(problem.home_loads_R.tolist()):
        if load > caps[rank]:
            widest = max(cap for r, cap in enumerate(caps) if r != rank)
            own_E = problem.routes_E[problem.placement.experts_of(rank)]
            bound += _fewest(_pieces(own_E.tolist(), widest), load - caps[rank])
    return bound


def receiver_bound(problem: Problem, epsilon: float) -> int:
    """Replicas that starved ranks must take in.

    Proof. The other ranks compute at most the sum of their caps, so rank r computes at least the
    total minus that, and what exceeds ``L_r`` is foreign (when slack swallows it, nothing is
    owed). One replica per foreign expert carries at most its routes and at most ``C_r``; the
    fewest, taken largest first, that cover the need is what r takes in. A replica has one
    receiver, so receivers add up.
    """
    caps_R = problem.caps(epsilon)
    need_R = problem.total - (int(caps_R.sum()) - caps_R) - problem.home_loads_R
    bound = 0
    for rank, need in enumerate(need_R.tolist()):
        foreign_E = problem.routes_E[problem.placement.home_E != rank]
        bound += _fewest(np.minimum(foreign_E, caps_R[rank]).tolist(), need)
    return bound


def room_bound(problem: Problem, epsilon: float) -> int:
    """What the starved ranks' room costs; with slack too, where ``forest_bound`` is 0.

    Proof. Take a component with a donors and b receivers; it has ``a + b - 1`` edges or more. By
    the component fact the receivers' room covers the donors' surpluses ``s``. First, summed up,
    components with a donor have at least q receivers, the fewest whose room holds all surplus, and
    ``a + b - 1 >= b``, so there are q edges. Second, let d be the widest room: ``b >= sum(s) / d``
    and each ``ceil(s / d)`` rounds up by less than 1, so ``sum(ceil(s / d)) < a + b`` (or equals
    ``sum(s) / d <= b`` when nothing rounds): no more than the component's edges.
    """
    gaps: list[int] = (problem.home_loads_R - problem.caps(epsilon)).tolist()
    rooms, surplus = [-g for g in gaps if g < 0], [g for g in gaps if g > 0]
    if not surplus:
        return 0
    return max(_fewest(rooms, sum(surplus)), sum(-(-s // max(rooms)) for s in surplus))


def time_bound_ps(problem: Problem) -> int:
    """Modelled time no allocation is below.

    Proof. A segment's cost is subadditive: splitting never lowers an expert's cost summed over
    ranks. So the ranks' times sum to at least the cost of all experts unsplit, and the slowest
    is at least their mean. Also some rank computes ``ceil(n / R)`` routes or more of every expert,
    and cost doesn't fall with routes.
    """
    spread_E = -(-problem.routes_E // problem.ranks)
    whole = int(compute_ps(problem.routes_E, problem.hardware, problem.align).sum())
    return max(
        -(-whole // problem.ranks),
        int(compute_ps(spread_E, problem.hardware, problem.align).max()),
    )


def _pieces(routes: Iterable[int], widest: int) -> list[int]:
    """Experts cut into replicas that carry at most ``widest`` routes each."""
    if widest <= 0:
        return []
    return [min(widest, n - a) for n in routes for a in range(0, n, widest)]


def _fewest(sizes: Iterable[int], need: int) -> int:
    """How many of the largest sizes it takes to reach ``need``."""
    count = 0
    for size in sorted(sizes, reverse=True):
        if need <= 0 or size <= 0:
            break
        need, count = need - size, count + 1
    return count


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table: experts' popularity is lognormal, as skewed as ``max_vio`` says."""

    name: str
    num_experts: int
    ranks: int
    tokens: int
    top_k: int
    max_vio: float

    def problem(self, seed: int, epsilon: float) -> Problem:
        """One draw: contiguous homes, slots for a home group, empty slots."""
        placement = Placement.contiguous(self.num_experts, self.ranks)
        slots = placement.max_experts_per_rank
        return Problem(
            counts_RE=skewed_counts(self, np.random.default_rng(seed)),
            placement=placement,
            slots=slots,
            epsilon=epsilon,
            residency=Residency.empty(self.ranks, slots),
            hardware=Hardware(row_ps=1, read_ps=0, launch_ps=0, fetch_ps=0),
            align=1,
        )


CASES = (
    Case("V3 E256 R8 K8 MaxVio 6", 256, 8, 8192, 8, 6.0),
    Case("V3 E256 R64 K8 MaxVio 6", 256, 64, 8192, 8, 6.0),
    Case("K3 E896 R16 K16 MaxVio 1", 896, 16, 8192, 16, 1.0),
)


def skewed_counts(case: Case, rng: np.random.Generator) -> Ints:
    """Counts ``[R, E]`` of one step whose popularity's max over mean - 1 is ``max_vio``."""
    normal_E = rng.standard_normal(case.num_experts)
    low, high = 0.0, 8.0
    for _ in range(60):
        sigma = (low + high) / 2
        popularity_E = np.exp(sigma * (normal_E - normal_E.max()))
        skew = 1 / popularity_E.mean() - 1
        low, high = (sigma, high) if skew < case.max_vio else (low, sigma)
    counts_RE: Ints = rng.multinomial(
        case.tokens * case.top_k, popularity_E / popularity_E.sum(), size=case.ranks
    )
    return counts_RE.astype(np.int64)


def table(draws: int = 12, epsilon: float = 0.02) -> list[str]:
    """Mean replicas over draws, exact and bounded, beside their bounds; markdown lines."""
    lines = [
        f"| S=8192, {draws} draws | static imbalance | exact | bound | bounded {epsilon:.0%} "
        "| bound | bounded / exact |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        rows = []
        for seed in range(draws):
            p = case.problem(seed, epsilon)
            rows.append(
                (
                    p.home_loads_R.max() / p.home_loads_R.mean(),
                    p.replicas(exact(p)).sum(),
                    lower_bound(p, 0.0),
                    p.replicas(bounded(p, epsilon)).sum(),
                    lower_bound(p, epsilon),
                )
            )
        imbalance, exact_, floor, slack, slack_floor = np.mean(rows, axis=0)
        lines.append(
            f"| {case.name} | {imbalance:.2f} | {exact_:.1f} | {floor:.1f} | {slack:.1f} "
            f"| {slack_floor:.1f} | {slack / exact_:.2f} |"
        )
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
