"""Engines whose steps are the GPU's kernels, interpreted: ranks are processes, windows host memory.

Everything above the transport is what runs on a GPU. Ranks are launched as ``shm`` ones; inside
``interpreted()`` their engines find ``InterpretedTransport`` under that name. Ranks must be
processes of their own, since Triton's interpreter keeps its state in globals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch

from evenep.errors import UnsupportedError, explain
from evenep.transport import BY_DEVICE, TRANSPORTS, DeviceTransport, Tag
from evenep.transport.shm import ShmTransport
from tests.interpreter import round_to_nearest


class InterpretedTransport(ShmTransport, DeviceTransport):
    """Windows that interpreted kernels reach by address; a gate holds the host itself."""

    def gate(self, tag: Tag, lane: int) -> None:
        self._wait(tag, lane)

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        raise UnsupportedError(explain("nothing is queued here", where="capture"))

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        raise UnsupportedError(explain("nothing is queued here", where="replay"))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Engines that ``shm`` ranks build inside run the GPU's steps. For rank processes."""
    round_to_nearest()
    with mock.patch.dict(BY_DEVICE, cpu={**TRANSPORTS, "shm": InterpretedTransport}):
        yield
