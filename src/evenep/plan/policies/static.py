"""Plain expert parallelism: every route runs on its expert's home."""

from __future__ import annotations

from ..placement import Ints
from ..problem import Problem


def static(problem: Problem) -> Ints:
    """Move nothing."""
    return problem.static_allocation()
