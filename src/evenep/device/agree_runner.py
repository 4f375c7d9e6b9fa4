"""All ranks settle on one runner, from the same table of times.

Each rank brings its times, from its cache or measured now, the slowest rank's count, and a runner
that doesn't work on every rank is out. Caches may hold what they like: the table that ranks choose
from, and write back, is the one they exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import UnsupportedError, explain
from ..experts.auto_runner import AutoRunner, Timer
from ..experts.choice import ROWS, Table, choose, full_rows
from ..experts.device import DeviceRunner
from ..transport import Tag, Transport
from .runner_times import RunnerTimes

ABSENT = 2**62
"""In place of a time: the runner doesn't work on this rank."""


def agree_on_runner(
    runner: DeviceRunner,
    cfg: EPConfig,
    transport: Transport,
    cache: RunnerTimes,
    tensors: Mapping[str, Tensor],
    timer: Timer | None = None,
) -> None:
    """Settle a runner that has candidates; any other stays as it is. Collective.

    Args:
        runner: the same kind on every rank.
        cfg, transport: the engine's.
        cache: where this rank keeps times.
        tensors: ``[G, …]`` each, experts to measure with.
        timer: nanoseconds of a call; None: CUDA events.

    Raises:
        UnsupportedError: no candidate works on every rank.
    """
    if not isinstance(runner, AutoRunner):
        return
    tag = Tag("construct")
    mine: Table = {}
    for turn in range(transport.size):  # ranks that share a GPU don't measure each other
        if turn == transport.rank:
            mine = cache.read(runner.candidates) or runner.measure(tensors, timer)
        transport.barrier(tag, cfg.load_timeout_s)  # kernels compile the first time
    agreed = exchange_times(transport, tag, runner.names, mine)
    if not agreed:
        raise UnsupportedError(
            explain("no runner works on every rank", got=repr(runner.refused), where="auto")
        )
    for name in mine:
        if name not in agreed:
            runner.refused[name] = "it doesn't work on every rank"
    runner.settle(choose(agreed, full_rows(cfg)))
    cache.write({**mine, **agreed})


def exchange_times(
    transport: Transport, tag: Tag, names: tuple[str, ...], mine: Table
) -> dict[str, tuple[int, ...]]:
    """The slowest rank's times of the runners that work on every rank. Collective."""
    columns = []
    for i in range(len(ROWS)):  # few words at a time: a transport carries as many as experts
        words = [mine[name][i] if name in mine else ABSENT for name in names]
        columns.append(transport.all_gather(torch.tensor(words), tag, 0).amax(0).tolist())
    rows = zip(names, zip(*columns, strict=True), strict=True)
    return {name: tuple(times) for name, times in rows if ABSENT not in times}
