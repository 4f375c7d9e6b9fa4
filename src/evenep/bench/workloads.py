"""W0–W7: routings that force what the router would choose (the set of Megatron-LM#7488).

Each is a pure function of (workload, seed, step, rank): every rank can draw its own part, and two
runs draw the same. Every token gets exactly K distinct experts. Homes are contiguous.

| name | what it stresses |
|---|---|
| W0 | balanced: every expert gets the same number of routes, give or take one |
| W1 | a hot set of experts, anywhere |
| W2 | a hot rank: the same heat, all of it on the experts of one rank |
| W3 | the heat of W2 dealt evenly over the ranks: hot experts, even ranks |
| W4 | ragged sources: W1 with rank r bringing r / (R - 1) of the tokens (rank 0 none) |
| W5 | idle corners: the last rank's experts get nothing and it brings no tokens |
| W6 | a rotating hotspot: W2 with another rank hot at every step |
| W7 | bursts: W0, but every fourth step is W2 on a rank drawn for that burst |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError, explain
from ..plan import Placement

NAMES = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")
HOT_FRACTION = 1 / 8  # of all experts
HEAT = 2.0  # how much likelier a hot expert is, in nats: e**2 = 7.4 times
BURST_EVERY = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One named workload over E experts on R ranks, K per token.

    Raises:
        ConfigError: the name is unknown, or too few experts stay active for K distinct ones.
    """

    name: str
    num_experts: int
    top_k: int
    ranks: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(
                explain("unknown workload", expected=f"one of {NAMES}", got=self.name)
            )
        for size, least in (("num_experts", 1), ("top_k", 1), ("ranks", 1), ("seed", 0)):
            if getattr(self, size) < least:
                raise ConfigError(
                    explain(
                        f"bad {size}",
                        where="Workload",
                        expected=f">= {least}",
                        got=getattr(self, size),
                    )
                )
        active = int(np.isfinite(self.log_popularity(0)).sum())
        if active < self.top_k:
            raise ConfigError(
                explain(
                    f"workload {self.name} leaves too few experts active",
                    expected=f">= top_k = {self.top_k}",
                    got=active,
                )
            )

    def tokens(self, rank: int, capacity: int) -> int:
        """Tokens a rank brings to one step, at most ``capacity``."""
        if self.name == "W4" and self.ranks > 1:
            return capacity * rank // (self.ranks - 1)
        if self.name == "W5" and self.ranks > 1 and rank == self.ranks - 1:
            return 0
        return capacity

    def ids(self, step: int, rank: int, tokens: int) -> Tensor:
        """Expert ids of a rank's tokens, int64 ``[T, K]``, distinct in each row."""
        if self.name == "W0" or (self.name == "W7" and step % BURST_EVERY != BURST_EVERY - 1):
            return self._dealt(step, rank, tokens)
        rng = self._rng(step, rank + 1)
        # Gumbel top-k: K draws without replacement, in proportion to the popularity.
        scores_TE = self.log_popularity(step) + rng.gumbel(size=(tokens, self.num_experts))
        ids_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, : self.top_k]
        return torch.from_numpy(np.ascontiguousarray(ids_TK))

    def log_popularity(self, step: int) -> NDArray[np.float64]:
        """Relative log-likelihood of each expert; ``-inf`` never gets a route."""
        log_E = np.zeros(self.num_experts)
        homes = Placement.contiguous(self.num_experts, self.ranks)
        if self.name in ("W1", "W4"):
            hot = max(1, round(self.num_experts * HOT_FRACTION))
            log_E[self._rng().permutation(self.num_experts)[:hot]] = HEAT
        elif self.name in ("W2", "W3", "W6", "W7"):
            rank = {"W6": step % self.ranks, "W7": int(self._rng(step).integers(self.ranks))}
            hot = len(homes.experts_of(0))
            heated = homes.experts_of(rank.get(self.name, 0))
            if self.name == "W3":
                heated = np.linspace(0, self.num_experts - 1, hot).round().astype(int).tolist()
            log_E[heated] = HEAT
        elif self.name == "W5" and self.ranks > 1:
            log_E[homes.experts_of(self.ranks - 1)] = -np.inf
        return log_E

    def _dealt(self, step: int, rank: int, tokens: int) -> Tensor:
        """Deal experts like cards: K consecutive ones of a shuffled deck to each token."""
        deck = torch.from_numpy(self._rng(step).permutation(self.num_experts))
        first_T = (rank * tokens + torch.arange(tokens)) * self.top_k
        return deck[(first_T[:, None] + torch.arange(self.top_k)) % self.num_experts]

    def _rng(self, *more: int) -> np.random.Generator:
        return np.random.default_rng([NAMES.index(self.name), self.seed, *more])
