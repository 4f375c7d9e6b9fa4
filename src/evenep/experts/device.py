"""What the engine asks of a runner on a GPU: rows of groups whose sizes only the device knows.

N receive rows, H row width, I FFN width, G groups. Rounding points are ``evenep.experts.runner``'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import EPConfig
from ..formats import TensorSpec, format_of


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Consecutive groups of a rank and the weights they use.

    Attributes:
        start_G: int32 on the device, first row of each group; any value where the count is 0.
            Starts ascend, but groups may leave gaps (padding) between them.
        count_G: int32 on the device, rows that hold a route.
        tensors: the runner's tensors, ``[G, …]`` each, contiguous, row g for group g.
        rows: what the host knows: an upper bound on the sum of the counts (never wrong).
        likely: what the host guesses: rows of a busy group. Only speed may depend on it.
        busy: int32 ``[1]`` on the device: replicas that are copied meanwhile. Where it is 0, a
            runner that can look needn't leave SMs to the copies. None: unknown.
    """

    start_G: Tensor
    count_G: Tensor
    tensors: Mapping[str, Tensor]
    rows: int
    likely: int
    busy: Tensor | None = None


class DeviceRunner(ABC):
    """Computes experts for one engine on one GPU; queues work, never waits for it.

    The store keeps expert bytes in the runner's own layout (``specs``): per expert contiguous, so
    a replica is plain copies. A layout that is the format's own bytes keeps the defaults.

    Args:
        cfg: sizes and choices.
        device: where it runs.

    Raises:
        UnsupportedError: at construction, with the reason, where it can't run this config here.
    """

    name: str
    batch_invariant: bool
    """A row's output doesn't depend on the rows beside it, so neither on R nor on the plan."""
    why: str = "asked for"
    """Why it is this runner and no other."""

    def __init__(self, cfg: EPConfig, device: torch.device) -> None:
        self.cfg, self.device = cfg, device
        self.format = format_of(cfg)

    def specs(self) -> list[TensorSpec]:
        """The tensors of one expert as the store keeps them."""
        return self.format.specs(self.cfg)

    def pack(self, tensors: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """One expert's format tensors (on the device) into a store row. Not on the step path."""
        for name, row in out.items():
            row.copy_(tensors[name])

    def reserve(self, rows: int) -> None:  # noqa: B027
        """Allocate scratch for ``Groups.rows`` up to this many. Once, before the first ``run``."""

    @property
    def classes(self) -> Sequence[int]:
        """The largest ``Groups.likely`` of each set of values that compile alike, ascending; the
        last set has no end."""
        return (1,)

    def warm_up(
        self,
        rows_NH: Tensor,
        weight_N: Tensor | None,
        groups: Groups,
        largest: int,
        sms: int | None = None,
    ) -> None:
        """Compile what ``run`` may need for any ``likely`` up to ``largest``: one call a class.

        The arguments are those of a step, except that every count is 0.
        """
        classes, below = self.classes, 0
        for top in classes:
            if below < largest:
                self.run(rows_NH, weight_N, replace(groups, likely=min(top, largest)), sms)
            below = top

    @abstractmethod
    def run(
        self, rows_NH: Tensor, weight_N: Tensor | None, groups: Groups, sms: int | None = None
    ) -> None:
        """Overwrite each group's rows with its expert's outputs, on the current stream.

        Args:
            rows_NH: BF16 receive rows, contiguous.
            weight_N: fp32 route weight per row, where the model applies it before the output.
            groups: of one layer; rows outside the groups stay untouched.
            sms: leave the rest of the GPU to others; None: use all of it.
        """
