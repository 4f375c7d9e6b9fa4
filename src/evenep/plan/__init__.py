"""counts → plan. Pure functions of integers: no transport, no device.

Read in this order: ``placement`` (who is home to what), ``problem`` (all a policy may look at),
``policies`` (problem → allocation), ``cost`` (seconds of an allocation), ``layout`` (allocation →
rows), ``planner`` (all of it together), ``bounds`` (what no plan can beat).

The room is callable: ``evenep.plan(counts, cfg)`` is ``evenep.plan.planner.plan``.
"""

import sys
from types import ModuleType

from .cost import Hardware
from .placement import Placement
from .planner import Fetch, Plan, PlanStats, plan
from .problem import Problem
from .residency import Residency

__all__ = ["Fetch", "Hardware", "Placement", "Plan", "PlanStats", "Problem", "Residency", "plan"]


class _CallableRoom(ModuleType):
    __call__ = staticmethod(plan)


sys.modules[__name__].__class__ = _CallableRoom
