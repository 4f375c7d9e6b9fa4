"""counts → plan: policy, slots, layout and statistics in one pure function (C1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..config import EPConfig
from ..errors import InputError, PlanError, explain
from ..formats import format_of
from .capacity import cap_routes, receive_rows
from .cost import PS, Hardware
from .layout import Layout, Runs, build_layout, source_runs
from .placement import Ints, Placement
from .policies import POLICIES
from .problem import Problem
from .residency import Residency


@dataclass(frozen=True, slots=True)
class Fetch:
    """One replica whose bytes move this step: ``expert`` from ``owner`` to ``rank``'s ``slot``."""

    expert: int
    owner: int
    rank: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """What a plan does, in numbers; also readable as ``stats["imbalance_after"]``.

    Attributes:
        policy: the policy asked for.
        chosen: the candidate it took (differs from ``policy`` under ``auto``).
        imbalance_before: max over mean of the ranks' routes if nothing moved.
        imbalance_after: the same under this plan.
        replicas: experts computed away from home, over all ranks.
        fetches: replicas whose bytes move; the others were resident.
        fetch_bytes: bytes moved over all ranks.
        saved_bytes: bytes residency saved.
        max_in: most replicas any rank receives; max_out: most any home sends.
        moved_routes: routes computed away from their expert's home.
        epsilon_reached: ``imbalance_after - 1``; above ``epsilon`` when the slots ran out.
        time_s: modelled seconds of the layer's expert phase; static_time_s: without moving.
    """

    policy: str
    chosen: str
    imbalance_before: float
    imbalance_after: float
    replicas: int
    fetches: int
    fetch_bytes: int
    saved_bytes: int
    max_in: int
    max_out: int
    moved_routes: int
    epsilon_reached: float
    time_s: float
    static_time_s: float

    def __getitem__(self, name: str) -> object:
        if name not in {f.name for f in fields(self)}:
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One step's plan; equal bits on every rank.

    Attributes:
        counts: int64 ``[R, E]``, the planner's only input from the step.
        allocation: int64 ``[E, R]``, the planner's only decision.
        loads: int64 ``[R]``, routes each rank computes.
        slot_experts: int64 ``[R, B]``, the expert each slot serves this step, -1 when unused.
        fetches: replicas whose bytes move.
        layout: rows and segments of every rank.
        residency: what the slots hold once the fetches are done.
        stats: the numbers.
    """

    counts: Ints
    allocation: Ints
    loads: Ints
    slot_experts: Ints
    fetches: tuple[Fetch, ...]
    layout: Layout
    residency: Residency
    stats: PlanStats

    def runs(self, source: int, order: str = "local_first") -> Runs:
        """Where one source rank's routes go (see ``evenep.plan.layout``)."""
        return source_runs(self.layout, self.counts, self.allocation, source, order)


def plan(
    counts: object,
    cfg: EPConfig,
    placement: Placement | Sequence[int] | None = None,
    residency: Residency | object | None = None,
    policy: str | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """Plan one step.

    Args:
        counts: ``[R, E]`` integers: routes each source rank sends to each expert. Ids below zero
            are not routes and are not counted.
        cfg: sizes and choices; equal on every rank.
        placement: homes, or a list of one home rank per expert; None: contiguous.
        residency: what the slots hold, or a ``[R, B]`` table of expert ids; None: nothing.
        policy: overrides ``cfg.policy``.
        hardware: constants of the cost model; None: ``Hardware.declared``.

    Raises:
        InputError: counts or residency have the wrong shape or values.
        ConfigError: the placement is for other sizes.
        PlanError: the policy needs more slots than there are.
    """
    counts_RE = _checked_counts(counts, cfg)
    placement = Placement.resolve(placement, cfg.num_experts, cfg.ranks)
    problem = Problem(
        counts_RE=counts_RE,
        placement=placement,
        slots=cfg.slots,
        epsilon=cfg.epsilon,
        residency=_checked_residency(residency, cfg),
        hardware=hardware or declared_hardware(cfg),
        align=cfg.row_alignment,
    )
    name = policy or cfg.policy
    if name not in POLICIES:
        raise InputError(
            explain("unknown policy", where="plan", expected=f"one of {list(POLICIES)}", got=name)
        )
    alloc_ER, chosen = POLICIES[name](problem)
    _require_room(problem, cfg, name, alloc_ER)
    return _finish(problem, cfg, name, chosen, alloc_ER)


def _require_room(problem: Problem, cfg: EPConfig, name: str, alloc_ER: Ints) -> None:
    """Refuse an allocation that needs more slots or rows than the config provides."""
    if not problem.fits(alloc_ER):
        needed = int(problem.replicas(alloc_ER).sum(axis=0).max())
        raise PlanError(
            explain(
                f"policy '{name}' needs {needed} slots on a rank",
                where="plan",
                expected=f"slots_per_rank >= {needed}",
                got=cfg.slots,
                fix="raise slots_per_rank, or use 'bounded' or 'auto', which fit the budget",
            )
        )
    cap = cap_routes(cfg, problem.placement.max_experts_per_rank)
    load = int(alloc_ER.sum(axis=0).max())
    if load > cap:
        raise PlanError(
            explain(
                f"policy '{name}' puts more routes on a rank than the config has room for",
                where="plan",
                expected=f"<= {cap}, what policy '{cfg.policy}' promises",
                got=load,
                fix=f"configure policy='{name}' or 'auto'",
            )
        )


def declared_hardware(cfg: EPConfig) -> Hardware:
    """Cost constants where nothing was measured."""
    params = (cfg.w13_rows + cfg.intermediate_size) * cfg.hidden_size
    return Hardware.declared(format_of(cfg).expert_bytes(cfg), params)


def verify(plan_: Plan, cfg: EPConfig, placement: Placement) -> None:
    """Check the invariants of C2.

    Raises:
        PlanError: names the broken invariant.
    """
    alloc_ER, segments = plan_.allocation, plan_.layout.segments
    home_rows = placement.max_experts_per_rank
    cap = cap_routes(cfg, home_rows)
    rows = receive_rows(cap, home_rows + cfg.slots, cfg.row_alignment)
    placed = plan_.slot_experts
    checks = {
        "allocations are non-negative": (alloc_ER >= 0).all(),
        "row sums equal the counts": (alloc_ER.sum(1) == plan_.counts.sum(0)).all(),
        f"no rank exceeds the cap of {cap} routes": (alloc_ER.sum(0) <= cap).all(),
        f"segments fit the receive buffer of {rows} rows": all(s.rows <= rows for s in segments),
        "a slot serves one expert": all(
            len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in placed
        ),
        "no slot holds an expert at its home": all(
            placement.home_E[e] != r for r, row in enumerate(placed) for e in row[row >= 0]
        ),
    }
    broken = [what for what, ok in checks.items() if not ok]
    if broken:
        raise PlanError(explain(f"broken invariant: {'; '.join(broken)}", where="plan.verify"))


def _finish(problem: Problem, cfg: EPConfig, name: str, chosen: str, alloc_ER: Ints) -> Plan:
    home_E = problem.placement.home_E
    e_M, r_M = np.nonzero(problem.replicas(alloc_ER))  # M replicas
    wanted: list[list[int]] = [[] for _ in range(problem.ranks)]
    for expert, rank in zip(e_M.tolist(), r_M.tolist(), strict=True):
        wanted[rank].append(expert)
    slot_RB = problem.residency.assign(wanted)
    new_RB = (slot_RB >= 0) & (slot_RB != problem.residency.experts_RB)
    fetches = tuple(
        Fetch(int(slot_RB[r, b]), int(home_E[slot_RB[r, b]]), int(r), int(b))
        for r, b in zip(*np.nonzero(new_RB), strict=True)
    )
    loads_R, home_R = alloc_ER.sum(axis=0), problem.home_loads_R
    expert_bytes, replicas = format_of(cfg).expert_bytes(cfg), int(e_M.size)
    stats = PlanStats(
        policy=name,
        chosen=chosen,
        imbalance_before=_imbalance(home_R),
        imbalance_after=_imbalance(loads_R),
        replicas=replicas,
        fetches=len(fetches),
        fetch_bytes=len(fetches) * expert_bytes,
        saved_bytes=(replicas - len(fetches)) * expert_bytes,
        max_in=int(np.bincount(r_M, minlength=1).max()),
        max_out=int(np.bincount(home_E[e_M], minlength=1).max()),
        moved_routes=int(alloc_ER[e_M, r_M].sum()),
        epsilon_reached=_excess(loads_R),
        time_s=problem.time_ps(alloc_ER) / PS,
        static_time_s=problem.static_time_ps / PS,
    )
    return Plan(
        counts=problem.counts_RE,
        allocation=alloc_ER,
        loads=loads_R,
        slot_experts=slot_RB,
        fetches=fetches,
        layout=build_layout(alloc_ER, problem.placement, slot_RB, cfg.row_alignment),
        residency=problem.residency.after(slot_RB),
        stats=stats,
    )


def _imbalance(load_R: Ints) -> float:
    total = int(load_R.sum())
    return int(load_R.max()) * load_R.size / total if total else 1.0


def _excess(load_R: Ints) -> float:
    """``_imbalance - 1``, rounded once, so that it compares with an epsilon exactly reached."""
    total = int(load_R.sum())
    return (int(load_R.max()) * load_R.size - total) / total if total else 0.0


def _checked_counts(counts: object, cfg: EPConfig) -> Ints:
    try:
        counts_RE = np.asarray(counts)
    except ValueError:  # ragged
        counts_RE = np.asarray(None)
    shape = (cfg.ranks, cfg.num_experts)
    if counts_RE.shape != shape or counts_RE.dtype.kind not in "iu":
        raise InputError(
            explain(
                "bad counts",
                where="plan",
                expected=f"integers of shape {shape}",
                got=f"{counts_RE.dtype} {counts_RE.shape}",
            )
        )
    if counts_RE.size and counts_RE.min() < 0:
        raise InputError(explain("counts are negative", where="plan", got=int(counts_RE.min())))
    per_rank = cfg.max_tokens_per_rank * cfg.top_k
    largest = int(counts_RE.max())  # first: a sum of huge counts would wrap
    if largest > per_rank or int(counts_RE.sum(axis=1).max()) > per_rank:
        raise InputError(
            explain(
                "a rank brings more routes than its capacity",
                where="plan",
                expected=f"<= max_tokens_per_rank * top_k = {per_rank}",
                got=max(largest, int(counts_RE.sum(axis=1).max())),
                fix="raise max_tokens_per_rank or split the batch",
            )
        )
    return counts_RE.astype(np.int64)


def _checked_residency(residency: object, cfg: EPConfig) -> Residency:
    shape = (cfg.ranks, cfg.slots)
    if residency is None:
        return Residency.empty(*shape)
    try:
        record = residency if isinstance(residency, Residency) else Residency.of(residency)
    except (TypeError, ValueError) as error:
        raise InputError(
            explain(
                "bad residency",
                where="plan",
                expected=f"expert ids of shape {shape}",
                got=residency,
            )
        ) from error
    table = record.experts_RB
    if table.shape != shape or (
        table.size and not -1 <= table.min() <= table.max() < cfg.num_experts
    ):
        raise InputError(
            explain(
                "bad residency",
                where="plan",
                expected=f"expert ids in [-1, {cfg.num_experts}) of shape {shape}",
                got=f"shape {table.shape}",
            )
        )
    return record
