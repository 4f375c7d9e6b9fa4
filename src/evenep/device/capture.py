"""Steps as CUDA graphs: recorded once, replayed with whatever routing the inputs hold by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ..errors import StateError, explain
from ..observe import StepRecord
from ..transport import DeviceTransport

if TYPE_CHECKING:
    from ..engine import Engine

Result = TypeVar("Result")


class Captured(Generic[Result]):
    """What ``Engine.capture`` recorded.

    Attributes:
        result: what the function returned while it was recorded: tensors that each replay fills.
    """

    def __init__(self, engine: Engine, fn: Callable[[], Result]) -> None:
        if torch.cuda.current_stream() == torch.cuda.default_stream():
            raise StateError(
                explain(
                    "a graph can't be captured on the default stream",
                    where="Engine.capture",
                    fix="call it inside torch.cuda.stream(torch.cuda.Stream())",
                )
            )
        assert isinstance(engine.transport, DeviceTransport)
        self._engine, self._graph = engine, torch.cuda.CUDAGraph()
        self._fn = fn  # a replay reads and writes the tensors that it holds
        try:
            fn()  # kernels compile and caches fill before anything is recorded
            engine.synchronize()
            with (
                engine.transport.capture(self._graph) as self._number,
                engine.collect_records() as self._records,
            ):
                self.result = fn()
            engine.require_idle("capture")
        except BaseException as error:
            engine.poison(error)  # peers wait to meet this rank, and its lanes may be half used
            raise

    @property
    def records(self) -> list[StepRecord]:
        """What the steps inside did in the latest replay; waits for it."""
        self._engine.synchronize()
        return [record() for record in self._records]

    def replay(self) -> Result:
        """Queue it again on the current stream. Collective, like the steps inside."""
        self._engine.require_usable("replay")
        self._engine.require_idle("replay")  # it uses the lanes it was recorded on
        assert isinstance(self._engine.transport, DeviceTransport)
        try:
            with self._engine.replaying():
                self._engine.transport.replay(self._graph, self._number)
        except BaseException as error:
            self._engine.poison(error)
            raise
        return self.result
