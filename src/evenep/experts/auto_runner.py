"""Several runners that read the same bytes, until one of them is chosen.

N receive rows, H row width, G groups.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import UnsupportedError, explain
from ..formats import TensorSpec
from .choice import ROWS, RunnerChoice
from .device import DeviceRunner, Groups

_GROUPS, _MOST_ROWS = 16, 4096  # of a timed call
_REPEATS, _SPIN_CYCLES = 7, 3_000_000

Make = Callable[[], DeviceRunner]
Timer = Callable[[Callable[[], None]], int]


class AutoRunner(DeviceRunner):
    """The first candidate that works, until ``settle`` puts another in its place.

    Args:
        cfg, device: as for any runner.
        makers: name to constructor, the preferred one first; all keep experts in one layout.

    Attributes:
        names: every candidate, also those that don't work here.
        refused: why those don't.

    Raises:
        UnsupportedError: none works here.
    """

    def __init__(self, cfg: EPConfig, device: torch.device, makers: Mapping[str, Make]) -> None:
        super().__init__(cfg, device)
        self.names, self.refused = tuple(makers), dict[str, str]()
        self._makers, self._reserved = makers, 0
        self._candidates = dict[str, DeviceRunner]()
        for name, make in makers.items():
            try:
                self._candidates[name] = make()
            except UnsupportedError as error:
                self.refused[name] = str(error)
        if not self._candidates:
            raise UnsupportedError(
                explain(
                    f"no runner for {cfg.weight_format} works here",
                    where=str(device),
                    got="; ".join(self.refused.values()),
                )
            )
        self._use(next(iter(self._candidates.values())), "not measured yet")

    @property
    def candidates(self) -> tuple[str, ...]:
        """Those that work here."""
        return tuple(self._candidates)

    def specs(self) -> list[TensorSpec]:
        return self._runner.specs()

    def pack(self, tensors: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        self._runner.pack(tensors, out)

    def reserve(self, rows: int) -> None:
        self._reserved = max(self._reserved, rows)
        self._runner.reserve(rows)

    @property
    def classes(self) -> Sequence[int]:
        return self._runner.classes

    def run(
        self, rows_NH: Tensor, weight_N: Tensor | None, groups: Groups, sms: int | None = None
    ) -> None:
        self._runner.run(rows_NH, weight_N, groups, sms)

    def measure(
        self, tensors: Mapping[str, Tensor], timer: Timer | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Nanoseconds an expert of every candidate at ``ROWS`` rows. A candidate that fails is
        refused.

        Args:
            tensors: ``[G, …]`` each, any experts; without one every time is 0.
            timer: nanoseconds of a call; None: CUDA events.
        """
        table = dict[str, tuple[int, ...]]()
        for name, runner in list(self._candidates.items()):
            try:
                table[name] = tuple(self._times(runner, tensors, timer or median_ns))
            except Exception as error:  # whatever a library raises is the reason
                self.refused[name] = f"failed while it was timed: {type(error).__name__}: {error}"
                del self._candidates[name]
        return table

    def settle(self, choice: RunnerChoice) -> None:
        """Use the chosen one from here on and let the others go, with what timing reserved."""
        for name, why in self.refused.items():
            choice = choice._replace(why=f"{choice.why}; not '{name}': {why}")
        self._candidates.clear()
        self._use(self._makers[choice.name](), choice.why)
        self._candidates[choice.name] = self._runner
        self._runner.reserve(self._reserved)

    def _use(self, runner: DeviceRunner, why: str) -> None:
        self._runner, self.why = runner, why
        self.name, self.batch_invariant = runner.name, runner.batch_invariant

    def _times(
        self, runner: DeviceRunner, tensors: Mapping[str, Tensor], timer: Timer
    ) -> Iterator[int]:
        held = min((t.shape[0] for t in tensors.values()), default=0)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        for rows in ROWS:
            G = min(held, _GROUPS, _MOST_ROWS // rows)
            if G == 0:
                yield 0
                continue
            x_NH = torch.randn(G * rows, self.cfg.hidden_size, device=self.device).bfloat16()
            weight_N = torch.ones(G * rows, device=self.device)
            groups = Groups(
                start_G=torch.arange(G, **ints) * rows,
                count_G=torch.full((G,), rows, **ints),
                tensors={name: t[:G] for name, t in tensors.items()},
                rows=G * rows,
                likely=rows,
            )
            runner.reserve(max(groups.rows, self._reserved))
            yield round(timer(functools.partial(runner.run, x_NH, weight_N, groups)) / G)


def median_ns(call: Callable[[], None]) -> int:
    """Median time of a call on the GPU; a spin first, so that the host's time doesn't count."""
    for _ in range(2):
        call()
    event: Any = functools.partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(_REPEATS)]
    spin: Any = torch.cuda._sleep
    spin(_SPIN_CYCLES)
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [begin.elapsed_time(end) for begin, end in events]
    return round(statistics.median(times_ms) * 1e6)
