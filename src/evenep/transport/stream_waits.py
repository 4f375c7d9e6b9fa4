"""Waits that a stream carries out by itself: the driver's memory operations, by ctypes.

A wait holds back one stream until a 32-bit word in GPU memory has a value. It occupies no
multiprocessor and needs no kernel, so ranks whose processes take turns on one GPU can wait for one
another, and a CUDA graph can contain it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import BootstrapError, TransportError, explain

_WAIT_VALUE_32, _WRITE_VALUE_32, _WAIT_EQUAL = 1, 2, 1


class _Param(ctypes.Structure):
    """CUstreamBatchMemOpParams of cuda.h: a union of 48 bytes; waits and writes share this view."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("_pad0", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("_pad1", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("_pad2", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Write:
    """Store a word once everything queued before is done and visible to the whole system."""

    address: int
    value: int


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Hold the stream until a word equals a value."""

    address: int
    value: int


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BootstrapError(
            explain("the CUDA driver library can't be loaded", where="transport 'symm'", got=error)
        ) from error


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else has: torch deals out 32 in turn, and a wait on any of them, or a
    graph being recorded there, would hold up whoever was dealt the same one."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the context exists
        status = _driver().cuStreamCreate(ctypes.byref(handle), 1)  # CU_STREAM_NON_BLOCKING
    if status or handle.value is None:
        raise TransportError(
            explain(f"the driver made no stream (CUresult {status})", where="transport 'symm'")
        )
    return torch.cuda.ExternalStream(handle.value, device)


def relax_capture() -> None:
    """This thread's calls neither fail nor spoil a graph that another thread is recording."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_AT_ONCE = 255  # operations the driver takes in one call


class Batch:
    """A fixed list of operations, made once, queued many times."""

    def __init__(self, operations: Sequence[Write | WaitFor]) -> None:
        self._parts = [
            _params(operations[i : i + _AT_ONCE]) for i in range(0, len(operations), _AT_ONCE)
        ]

    def queue(self, stream: torch.cuda.Stream) -> None:
        """Queue all of them, in order."""
        handle = ctypes.c_void_p(stream.cuda_stream)
        for params in self._parts:
            status = _driver().cuStreamBatchMemOp_v2(handle, len(params), params, 0)
            if status:
                raise TransportError(
                    explain(
                        f"the driver refused memory operations on a stream (CUresult {status})",
                        where="transport 'symm'",
                        expected="cuStreamBatchMemOp_v2: a driver for CUDA 12 or newer",
                    )
                )


def _params(operations: Sequence[Write | WaitFor]) -> ctypes.Array[_Param]:
    params = (_Param * len(operations))()
    for param, op in zip(params, operations, strict=True):
        waits = isinstance(op, WaitFor)
        param.operation = _WAIT_VALUE_32 if waits else _WRITE_VALUE_32
        param.address, param.value = op.address, op.value
        param.flags = _WAIT_EQUAL if waits else 0
    return params
