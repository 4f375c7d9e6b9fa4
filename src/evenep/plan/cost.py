"""Seconds of an allocation, in integer picoseconds so that every rank gets the same bits.

The timeline of a rank alone is ``max(home compute, fetch) + slot compute``: home segments run while
replicas arrive, slot segments after. The layer takes as long as its slowest rank; ranks that share
cores (``parallel`` P < R) slow each other down: while n of them still work, each runs at P / n of
its speed. One segment of m routes costs ``launch + max(read, padded rows * row)``: reading an
expert's bytes and multiplying rows overlap on a GPU and the larger wins; what can't overlap is in
``launch``. A replica that has just arrived costs ``cold`` once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ..errors import ConfigError, explain
from .capacity import ceil_to
from .placement import Ints

PS = 10**12


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one machine needs for the parts of a step, in picoseconds.

    Attributes:
        row_ps: one row through one expert (both GEMMs), weights at hand.
        read_ps: reading one expert's weights (decode included where the runner decodes).
        launch_ps: fixed cost of one more segment on a rank.
        fetch_ps: moving one expert's bytes from its home to a slot.
        cold_ps: first use of an expert that has just arrived, beyond ``read_ps`` (a runner that
            decodes into a cache pays it once per replica).
        parallel: ranks that can compute at the same time; 0: all of them (a device each). Fewer
            when processes share the cores of a host.
        plan_ps: searching for a better plan than ``static``; ``auto`` doesn't search where even
            perfect balance would win back less.
    """

    row_ps: int
    read_ps: int
    launch_ps: int
    fetch_ps: int
    cold_ps: int = 0
    parallel: int = 0
    plan_ps: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 0:
                raise ConfigError(
                    explain(f"bad {name}", where="Hardware", expected="an int >= 0", got=value)
                )

    @classmethod
    def from_rates(
        cls,
        *,
        expert_bytes: int,
        expert_params: int,
        flops: float,
        memory_bytes_per_s: float,
        link_bytes_per_s: float,
        launch_s: float = 0.0,
    ) -> Hardware:
        """From a data sheet: peak FLOP/s, memory and link bytes/s of one rank."""
        return cls(
            row_ps=round(2 * expert_params / flops * PS),
            read_ps=round(expert_bytes / memory_bytes_per_s * PS),
            launch_ps=round(launch_s * PS),
            fetch_ps=round(expert_bytes / link_bytes_per_s * PS),
        )

    @classmethod
    def declared(cls, expert_bytes: int, expert_params: int) -> Hardware:
        """A stand-in for one CPU core with AVX2, used where nothing was measured or declared."""
        return cls.from_rates(
            expert_bytes=expert_bytes,
            expert_params=expert_params,
            flops=60e9,
            memory_bytes_per_s=8e9,
            link_bytes_per_s=4e9,
        )


def compute_ps(routes: Ints, hardware: Hardware, align: int) -> Ints:
    """Time of each segment; an empty one costs nothing."""
    padded = ceil_to(routes, align)
    busy = hardware.launch_ps + np.maximum(hardware.read_ps, padded * hardware.row_ps)
    return np.where(routes > 0, busy, 0)


def rank_times_ps(
    allocation_ER: Ints, home_E: Ints, moved_ER: Ints, hardware: Hardware, align: int
) -> Ints:
    """Modelled time of every rank, int64 ``[R]``.

    Args:
        allocation_ER: routes of each expert on each rank.
        home_E: every expert's home.
        moved_ER: 1 where expert e's bytes travel to rank r this step (not resident), else 0.

    A rank's fetch takes as long as the busier of its own imports and the exports of any home it
    imports from: a hot home serves its receivers one after the other.
    """
    R = allocation_ER.shape[1]
    e_G, r_G = np.nonzero(allocation_ER > 0)  # few of the E x R places hold a segment
    cost_G = compute_ps(allocation_ER[e_G, r_G], hardware, align)
    at_home_G = home_E[e_G] == r_G
    home_R = _sum_by(r_G[at_home_G], cost_G[at_home_G], R)
    slot_R = _sum_by(r_G[~at_home_G], cost_G[~at_home_G], R)
    fetch_R = np.zeros(R, dtype=np.int64)
    moved_e, moved_r = np.nonzero(moved_ER)
    if moved_e.size:
        owners = home_E[moved_e]
        out_R = np.bincount(owners, minlength=R)
        in_R = np.bincount(moved_r, minlength=R)
        busiest = np.maximum(in_R[moved_r], out_R[owners])
        np.maximum.at(fetch_R, moved_r, busiest * hardware.fetch_ps)
        slot_R += in_R * hardware.cold_ps
    return np.maximum(home_R, fetch_R) + slot_R


def layer_time_ps(times_R: Ints, parallel: int) -> int:
    """When the last rank is done, if at most ``parallel`` run at full speed (0: all).

    Ranks share the processors fairly. Example: times ``1 1 4`` on 2 processors: all three run at
    2/3 speed until 1.5, then the last one alone for 3 more: 4.5.
    """
    ranks = times_R.size
    if parallel <= 0 or parallel >= ranks:
        return int(times_R.max())
    ascending_R = np.sort(times_R)
    gaps_R = np.diff(ascending_R, prepend=0)
    crowd_R = np.maximum(np.arange(ranks, 0, -1), parallel)  # still working, at least P
    return int((gaps_R * crowd_R).sum()) // parallel


def _sum_by(index: Ints, values: Ints, size: int) -> Ints:
    """Sum integers by index, exactly (``bincount`` with weights would go through floats)."""
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out
