"""How often ``auto`` searches: seldom while its searches win back less than they cost.

One pace per layer and lane. It depends only on plans and agreed constants, so every rank keeps the
same one.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_REST = 32  # steps; the routing may have changed by then


@dataclass(slots=True)
class Pace:
    """Rest 1, 2, 4 … steps after each search in a row that didn't pay; none after one that did.

    Attributes:
        resting: steps left before the next search.
        rest: length of the latest rest.
    """

    resting: int = 0
    rest: int = 0

    def search_now(self) -> bool:
        """Whether this step searches; call it once a step."""
        if self.resting == 0:
            return True
        self.resting -= 1
        return False

    def learn(self, won_s: float, cost_s: float) -> None:
        """What a search won over ``static``, and what it cost."""
        self.rest = min(2 * self.rest or 1, LONGEST_REST) if won_s < cost_s else 0
        self.resting = self.rest
