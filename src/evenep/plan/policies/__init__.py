"""Policies: problem → allocation ``[E, R]``, the only decision of a plan (C2).

Adding one: a file with a function of a ``Problem``, one entry in ``POLICIES`` and one ``Choice``
in ``evenep.support``.
"""

from __future__ import annotations

from collections.abc import Callable

from ..placement import Ints
from ..problem import Problem
from .auto import auto
from .bounded import bounded
from .exact import exact
from .static import static

Policy = Callable[[Problem], tuple[Ints, str]]
"""Returns the allocation and the name of the candidate it came from."""

POLICIES: dict[str, Policy] = {
    "static": lambda problem: (static(problem), "static"),
    "exact": lambda problem: (exact(problem), "exact"),
    "bounded": lambda problem: (bounded(problem, problem.epsilon), "bounded"),
    "auto": auto,
}
