"""Which rank is home to which expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, explain

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Every expert's home rank.

    Attributes:
        home_E: int64 ``[E]``, the rank that owns expert e's weights.
        local_E: int64 ``[E]``, e's row among its home's experts, ascending by expert id.
        ranks: R.
        owned: the experts of each rank, ascending.
    """

    home_E: Ints
    local_E: Ints
    ranks: int
    owned: tuple[tuple[int, ...], ...]

    @staticmethod
    @functools.cache
    def contiguous(num_experts: int, ranks: int) -> Placement:
        """Blocks of consecutive experts; the first ``E mod R`` ranks own one more.

        Example: E = 7, R = 3 gives homes ``[0, 0, 0, 1, 1, 2, 2]``.
        """
        sizes = [num_experts // ranks + (r < num_experts % ranks) for r in range(ranks)]
        return Placement.from_homes(np.repeat(np.arange(ranks), sizes).tolist(), ranks)

    @classmethod
    def from_homes(cls, homes: Sequence[int], ranks: int) -> Placement:
        """Any map of experts to ranks.

        Raises:
            ConfigError: a home is outside ``0 … ranks - 1``.
        """
        given = np.asarray(homes)
        home_E = given.astype(np.int64) if given.dtype.kind in "iu" else np.zeros(0, dtype=np.int64)
        valid = given.ndim == 1 and given.size == home_E.size
        if not valid or (home_E.size and not (0 <= home_E.min() <= home_E.max() < ranks)):
            raise ConfigError(
                explain(
                    "bad placement map",
                    where="Placement",
                    expected=f"one home rank in [0, {ranks}) per expert",
                    got=homes,
                )
            )
        local_E = np.zeros_like(home_E)
        owned = tuple(tuple(np.flatnonzero(home_E == rank).tolist()) for rank in range(ranks))
        for experts in owned:
            local_E[list(experts)] = np.arange(len(experts))
        return cls(home_E, local_E, ranks, owned)

    @classmethod
    def resolve(
        cls, given: Placement | Sequence[int] | None, num_experts: int, ranks: int
    ) -> Placement:
        """Contiguous homes for None, a map of one home rank per expert, or a placement as it is.

        Raises:
            ConfigError: it is for other sizes.
        """
        if given is None:
            return cls.contiguous(num_experts, ranks)
        found = given if isinstance(given, Placement) else cls.from_homes(given, ranks)
        if (found.num_experts, found.ranks) != (num_experts, ranks):
            raise ConfigError(
                explain(
                    "placement doesn't fit the config",
                    where="Placement",
                    expected=f"{num_experts} experts on {ranks} ranks",
                    got=f"{found.num_experts} experts on {found.ranks} ranks",
                )
            )
        return found

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.home_E.size)

    @property
    def max_experts_per_rank(self) -> int:
        """Home experts of the fullest rank; home rows every rank allocates."""
        return max(len(experts) for experts in self.owned)

    def experts_of(self, rank: int) -> list[int]:
        """The experts a rank is home to, ascending; row i of its store holds the i-th."""
        return list(self.owned[rank])
