"""EvenEP: balanced expert parallelism. Every rank does the same work, whatever the router chose."""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from . import errors
from .activation import Activation
from .config import EPConfig
from .engine import Engine
from .errors import EvenEPError
from .group import EPGroup
from .launch import launch
from .plan import Hardware, Placement, Residency
from .step import Step
from .weights.source import ExpertWeights

if TYPE_CHECKING:
    from .plan.planner import plan as plan
else:
    from . import plan  # the room itself, which is callable

__version__ = _version("evenep")

__all__ = [
    "Activation",
    "EPConfig",
    "EPGroup",
    "Engine",
    "EvenEPError",
    "ExpertWeights",
    "Hardware",
    "Placement",
    "Residency",
    "Step",
    "errors",
    "launch",
    "plan",
]
