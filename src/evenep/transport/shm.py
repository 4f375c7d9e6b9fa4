"""Ranks as processes of one host, sharing anonymous memory files.

On Linux a window is a memfd: it has no name, so nothing is left behind however a process ends, and
it isn't bound by the size of /dev/shm (64 MiB in a stock container). Elsewhere it is a temporary
file, unlinked as soon as every rank has mapped it. Pages are committed when first touched.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile

import torch
from torch import Tensor

from ..errors import BootstrapError, explain
from .base import Tag
from .meeting import Meeting
from .memory import MemoryTransport


class ShmTransport(MemoryTransport):
    """Peers are processes on this host."""

    name = "shm"

    def __init__(self, meeting: Meeting, *, lanes: int, gather_words: int) -> None:
        me = json.dumps([os.uname().nodename, os.getpid()])
        seats = [json.loads(b) for b in meeting.exchange(me, Tag("construct"))]
        hosts = sorted({host for host, _ in seats})
        if len(hosts) > 1:
            raise BootstrapError(
                explain(
                    "ranks are on different hosts",
                    where="transport 'shm'",
                    got=hosts,
                    fix="use transport='collective'",
                )
            )
        self._pids = [pid for _, pid in seats]
        super().__init__(meeting, lanes=lanes, gather_words=gather_words)

    def _share(self, nbytes: int) -> list[Tensor]:
        fd, path = _create(nbytes)
        try:
            sizes = self._meeting.exchange(json.dumps([path, nbytes]), Tag("construct"))
            memories = [
                _map(fd, path, nbytes) if r == self.rank else _map(None, *json.loads(seat))
                for r, seat in enumerate(sizes)
            ]
            self._meeting.exchange("mapped", Tag("construct"))
        finally:
            os.close(fd)
            if not path.startswith("/proc/"):
                os.unlink(path)
        return memories

    def _life(self, peer: int) -> str:
        return process_state(self._pids[peer])


def process_state(pid: int) -> str:
    """``running``, ``stopped`` or ``dead``; a zombie is dead."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            state = f.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if sys.platform == "linux":
            return "dead"
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "dead"
        return "running"
    except ProcessLookupError:
        return "dead"
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(state, "running")


def _create(nbytes: int) -> tuple[int, str]:
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("evenep", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            fd, path = tempfile.mkstemp(prefix="evenep-")
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise BootstrapError(
            explain(f"can't make {nbytes} bytes of shared memory: {error}", where="transport 'shm'")
        ) from error
    return fd, path


def _map(fd: int | None, path: str, nbytes: int) -> Tensor:
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC) if fd is None else fd
        try:
            memory = mmap.mmap(opened, nbytes)
        finally:
            if fd is None:
                os.close(opened)
    except OSError as error:
        raise BootstrapError(
            explain(
                f"can't map a peer's shared memory {path}: {error}",
                where="transport 'shm'",
                fix="run all ranks as one user in one PID namespace, or use transport='collective'",
            )
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)
