"""What the replica slots of one layer hold, on every rank; every rank keeps the same record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .placement import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """Slot contents of one layer.

    Attributes:
        experts_RB: int64 ``[R, B]``, expert whose bytes slot b of rank r holds, -1 for none.
        used_RB: int64 ``[R, B]``, number of the step that last used the slot, -1 for never.
        step: steps recorded so far.
    """

    experts_RB: Ints
    used_RB: Ints
    step: int = 0

    @classmethod
    def empty(cls, ranks: int, slots: int) -> Residency:
        """No slot holds anything."""
        none = np.full((ranks, slots), -1, dtype=np.int64)
        return cls(none, none.copy())

    @classmethod
    def of(cls, experts_RB: object) -> Residency:
        """From a plain ``[R, B]`` table of expert ids, -1 for an empty slot."""
        table = np.asarray(experts_RB, dtype=np.int64)
        return cls(table, np.where(table >= 0, 0, -1))

    def after(self, slot_experts_RB: Ints) -> Residency:
        """The record once a plan's slots are filled: unused slots keep what they held."""
        used = slot_experts_RB >= 0
        return Residency(
            np.where(used, slot_experts_RB, self.experts_RB),
            np.where(used, self.step, self.used_RB),
            self.step + 1,
        )

    def assign(self, wanted: list[list[int]]) -> Ints:
        """Slots for the replicas each rank needs, ``[R, B]`` with -1 where unused.

        A resident expert stays where it is. A new one takes an empty slot, else the slot used
        longest ago; ties go to the lowest slot.
        """
        slot_RB = np.full_like(self.experts_RB, -1)
        age_RB = np.where(self.experts_RB >= 0, self.used_RB + 1, 0)
        oldest_RB = np.argsort(age_RB, axis=1, kind="stable").tolist()
        held_RB: list[list[int]] = self.experts_RB.tolist()
        holds_R = np.any(self.experts_RB >= 0, axis=1)
        for rank, experts in enumerate(wanted):
            if not experts:
                continue
            # reversed: a duplicate in a hand-made table resolves to the lowest slot
            held = enumerate(held_RB[rank]) if holds_R[rank] else ()
            slot_of = {e: b for b, e in reversed(list(held)) if e >= 0}
            kept = {e: slot_of[e] for e in experts if e in slot_of}
            taken = set(kept.values())
            free = (b for b in oldest_RB[rank] if b not in taken)
            new = [e for e in experts if e not in kept]
            for expert, slot in [*kept.items(), *zip(new, free, strict=False)]:
                slot_RB[rank, slot] = expert
        return slot_RB
