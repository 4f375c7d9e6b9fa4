"""One engine's planner: the pure plan of ``evenep.plan`` fed with what the engine knows.

It measures the cost constants at the first ``auto`` step and lets ``auto`` rest where searching
doesn't pay. Both depend only on agreed numbers, so all ranks plan alike (C9).
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch import Tensor

from .agreement import StepHeader, agreed_max
from .config import EPConfig
from .experts import Runner
from .experts.measure import measure
from .plan import Hardware, Placement, Plan, plan
from .plan.cost import PS
from .plan.pace import Pace
from .plan.planner import verify
from .transport import Tag, Transport
from .weights.store import ExpertStore


class StepPlanner:
    """Plans every step of an engine.

    Args:
        hardware: cost constants; None: measured when first needed.
        debug: check every plan's invariants.

    Attributes:
        hardware: the constants in use, None until known.
    """

    def __init__(
        self,
        cfg: EPConfig,
        placement: Placement,
        transport: Transport,
        store: ExpertStore,
        runner: Runner,
        hardware: Hardware | None,
        *,
        debug: bool,
    ) -> None:
        self.hardware = hardware
        self._cfg, self._placement, self._debug = cfg, placement, debug
        self._transport, self._store, self._runner = transport, store, runner
        self._paces: dict[tuple[int, int], Pace] = {}  # of a layer and lane, as residency

    def plan(self, counts_RE: Tensor, header: StepHeader, policy: str) -> Plan:
        """The step's plan. Collective: the first ``auto`` step measures."""
        if policy != "auto":
            return self._plan(counts_RE, header, policy, self.hardware)
        if self.hardware is None:
            self.hardware = self._measure(counts_RE, header)
        pace = self._paces.setdefault((header.layer, header.lane), Pace())
        if not pace.search_now():
            return self._plan(counts_RE, header, "static", self.hardware)
        made = self._plan(counts_RE, header, policy, self.hardware)
        # Whole picoseconds: on a device the same comparison is made in integers.
        won_s = round((made.stats.static_time_s - made.stats.time_s) * PS) / PS
        pace.learn(won_s, self.hardware.plan_ps / PS)
        return made

    def forget(self, layer: int | None = None) -> None:
        """Start searching afresh, on one layer or all (after a reset, say)."""
        for key in [k for k in self._paces if layer is None or k[0] == layer]:
            del self._paces[key]

    def _measure(self, counts_RE: Tensor, header: StepHeader) -> Hardware:
        """Cost constants of this machine, planning included; the slowest rank's count.

        Measured once the counts are in: by then all ranks agree that this step is ``auto``.
        """
        lane, tag = header.lane, Tag("counts", header.layer, header.epoch)
        found = measure(self._runner, self._store, self._transport, lane=lane, tag=tag)
        times_s = []
        for _ in range(2):  # the first one pays for imports and caches
            start = time.perf_counter()
            self._plan(counts_RE, header, "auto", found)
            times_s.append(time.perf_counter() - start)
        plan_ps = agreed_max(self._transport, round(min(times_s) * PS), tag, lane)
        return replace(found, plan_ps=plan_ps)

    def _plan(
        self, counts_RE: Tensor, header: StepHeader, policy: str, hardware: Hardware | None
    ) -> Plan:
        residency = self._store.residency(header.layer, header.lane)
        made = plan(counts_RE.numpy(), self._cfg, self._placement, residency, policy, hardware)
        if self._debug:
            verify(made, self._cfg, self._placement)
        return made
