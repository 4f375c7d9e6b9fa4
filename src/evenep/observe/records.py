"""What one step did, in numbers; the engine keeps the latest of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..plan import Plan

STAGES = ("plan", "dispatch", "fetch", "compute", "combine")


@dataclass(slots=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        layer, epoch: which step.
        tokens, routes: what this rank brought.
        computed: routes this rank computed.
        policy, chosen: asked for, and the candidate taken.
        imbalance_before, imbalance_after: max over mean of the ranks' routes.
        replicas, fetches, fetch_bytes, saved_bytes: over all ranks, as ``PlanStats``.
        stage_s: seconds of this rank per stage. ``fetch`` is the part compute had to wait for.
        fetch_busy_s: seconds the fetch lane worked, hidden or not.
    """

    layer: int
    epoch: int
    tokens: int
    routes: int
    computed: int
    policy: str
    chosen: str
    imbalance_before: float
    imbalance_after: float
    replicas: int
    fetches: int
    fetch_bytes: int
    saved_bytes: int
    stage_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    fetch_busy_s: float = 0.0

    @classmethod
    def of(
        cls, plan: Plan, rank: int, *, layer: int, epoch: int, tokens: int, policy: str
    ) -> StepRecord:
        """The record of a step whose plan is made."""
        stats = plan.stats
        return cls(
            layer=layer,
            epoch=epoch,
            tokens=tokens,
            routes=int(plan.counts[rank].sum()),
            computed=int(plan.loads[rank]),
            policy=policy,
            chosen=stats.chosen,
            imbalance_before=stats.imbalance_before,
            imbalance_after=stats.imbalance_after,
            replicas=stats.replicas,
            fetches=stats.fetches,
            fetch_bytes=stats.fetch_bytes,
            saved_bytes=stats.saved_bytes,
        )

    @contextlib.contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Add the time inside the block to a stage."""
        start = time.perf_counter()
        yield
        self.stage_s[stage] += time.perf_counter() - start

    @property
    def total_s(self) -> float:
        """Seconds of the whole step on this rank."""
        return sum(self.stage_s.values())
