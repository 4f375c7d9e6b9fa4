"""Engines whose steps are the GPU's kernels, interpreted: ranks are processes, windows host memory.

Everything above the transport is what runs on a GPU. Ranks are launched as ``shm`` ones; inside
``interpreted()`` their engines find ``InterpretedTransport`` under that name. Ranks must be
processes of their own, since Triton's interpreter keeps its state in globals.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from evenep import EPConfig, launch
from evenep.errors import LaunchError, UnsupportedError, explain
from evenep.kernels import combine, settle
from evenep.transport import BY_DEVICE, TRANSPORTS, DeviceTransport, Tag
from evenep.transport.shm import ShmTransport
from tests import cases
from tests.interpreter import patch_once_a_launch, round_to_nearest

only_interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles here: tests/gpu runs the same steps"
)


class InterpretedTransport(ShmTransport, DeviceTransport):
    """Windows that interpreted kernels reach by address; a gate holds the host itself."""

    def gate(self, tag: Tag, lane: int) -> None:
        self._wait(tag, lane)

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[int]:
        raise UnsupportedError(explain("nothing is queued here", where="capture"))

    def replay(self, graph: torch.cuda.CUDAGraph, number: int) -> None:
        raise UnsupportedError(explain("nothing is queued here", where="replay"))


@contextlib.contextmanager
def interpreted(**environment: str) -> Iterator[None]:
    """Engines that ``shm`` ranks build inside run a GPU's steps. For rank processes.

    Args:
        environment: settings that differ from what all tests run with.
    """
    round_to_nearest()
    patch_once_a_launch()
    kinds = {**TRANSPORTS, "shm": InterpretedTransport}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(BY_DEVICE, cpu=kinds))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for kernels in (settle, combine):  # few programs, which then take several rows each
            stack.enter_context(mock.patch.object(kernels, "PER_SM", 1))
        yield


def config(**changes: Any) -> EPConfig:
    """As small as a step can be and still move experts: the interpreter is slow."""
    sizes = {
        "num_experts": 5,
        "top_k": 3,
        "hidden_size": 32,
        "intermediate_size": 32,
        "max_tokens_per_rank": 6,
        "timeout_s": 60.0,
        "runner": "triton",
    }
    return cases.config(**(sizes | changes))


def run_ranks(fn: Callable[..., Any], ranks: int, *args: object) -> list[Any]:
    """What each rank returns; one rank's own failure is raised as it was."""
    try:
        return launch(fn, ranks, "shm", args)
    except LaunchError as error:
        raise next(iter(error.failures.values())) from error
