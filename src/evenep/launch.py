"""Run a function on R ranks of this machine and collect what it returns.

``threads`` runs them in this process; ``shm`` and ``collective`` start R processes. When a rank
fails, the others get a grace period to notice and name it themselves, then are ended. Nothing
outlives the call.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .errors import ConfigError, EvenEPError, LaunchError, explain
from .group import EPGroup
from .settings import allow_shared_gpu
from .support import require_transport

Event = Callable[[int, Any], None]
"""Called in the launching process with ``(rank, object)`` for everything a rank reports."""


class RankExit(EvenEPError, RuntimeError):
    """A rank's process ended without returning or raising (killed, or it called exit)."""


_reporters = threading.local()


def report(message: object) -> None:
    """From inside a launched rank: hand an object to the launcher's ``on_event``."""
    send = getattr(_reporters, "send", None)
    if send is not None:
        send(message)


def launch(
    fn: Callable[..., Any],
    ranks: int = 4,
    transport: str = "shm",
    args: Sequence[object] = (),
    *,
    device: str = "cpu",
    on_event: Event | None = None,
    grace_s: float = 10.0,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run ``fn(group, *args)`` on every rank; the results, by rank.

    Args:
        fn: a module-level function under ``shm`` and ``collective`` (it is pickled).
        ranks: R.
        transport: ``threads``, ``shm`` or ``collective``; on a GPU ``threads`` or ``symm``.
        device: ``cpu`` or ``cuda``. On a GPU every rank runs on a stream of its own; ``threads``
            share the current GPU, ``symm`` ranks take the visible GPUs in turn.
        on_event: receives what ranks ``report``.
        grace_s: seconds other ranks get to finish by themselves once one has failed.
        timeout_s: seconds for the whole call, None for no limit.

    Raises:
        LaunchError: ``failures`` maps every failed rank to its exception.
    """
    require_transport(transport, device, where="launch")
    if ranks < 1:
        raise ConfigError(explain("bad ranks", where="launch", expected="ranks >= 1", got=ranks))
    run = _launch_threads if transport == "threads" else _launch_processes
    shared = device == "cuda" and transport == "threads"
    gpu = torch.cuda.current_device() if shared else 0
    job = _Job(fn, ranks, transport, device, tuple(args), gpu)
    outcomes = run(job, on_event, grace_s, timeout_s)
    failures = {r: o for r, (ok, o) in outcomes.items() if not ok}
    if failures:
        raise LaunchError(failures)
    return [outcomes[r][1] for r in range(ranks)]


Outcomes = dict[int, tuple[bool, Any]]


@dataclass(frozen=True, slots=True)
class _Job:
    """What to run on every rank; it is pickled."""

    fn: Callable[..., Any]
    ranks: int
    transport: str
    device: str
    args: tuple[object, ...]
    gpu: int = 0

    def group(self, store: dist.Store, rank: int) -> EPGroup:
        return EPGroup(store, rank, self.ranks, transport=self.transport, device=self.device)

    def stream(self, rank: int) -> contextlib.AbstractContextManager[object]:
        """A stream of the rank's own, current inside the block."""
        if self.device == "cpu":
            return contextlib.nullcontext()
        if self.transport == "symm":
            # Several ranks may share a GPU; torch refuses that unless it is asked not to.
            allow_shared_gpu()
            torch.cuda.set_device(rank % torch.cuda.device_count())
        else:
            torch.cuda.set_device(self.gpu)  # a new thread would start on the first
        return torch.cuda.stream(torch.cuda.Stream())


def _call(job: _Job, store: dist.Store, rank: int) -> tuple[bool, Any]:
    """``(True, result)`` or ``(False, exception)``; the peers hear of the latter."""
    group = None
    try:
        group = job.group(store, rank)
        with job.stream(rank):
            return True, job.fn(group, *job.args)
    except BaseException as error:  # a rank's end is data for the launcher, whatever it was
        if group is not None:
            group.abort(error)
        return False, error


def _launch_threads(
    job: _Job,
    on_event: Event | None,
    grace_s: float,
    timeout_s: float | None,
) -> Outcomes:
    store, outcomes, ranks = dist.HashStore(), Outcomes(), job.ranks

    def body(rank: int) -> None:
        if on_event is not None:
            _reporters.send = lambda message: on_event(rank, message)
        outcomes[rank] = _call(job, store, rank)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(_threads_per_rank(ranks))
    threads = [
        threading.Thread(target=body, args=(r,), name=f"evenep-rank-{r}", daemon=True)
        for r in range(ranks)
    ]
    try:
        for thread in threads:
            thread.start()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failed = False
        while any(t.is_alive() for t in threads):
            for thread in threads:
                thread.join(0.01)
            if not failed and any(not ok for ok, _ in list(outcomes.values())):
                failed = True
                grace_end = time.monotonic() + grace_s
                deadline = grace_end if deadline is None else min(deadline, grace_end)
            if deadline is not None and time.monotonic() > deadline:
                break
    finally:
        torch.set_num_threads(threads_before)
    for rank in range(ranks):
        late = RankExit(f"rank {rank} did not finish in time; its thread is left to itself")
        outcomes.setdefault(rank, (False, late))
    return outcomes


def _launch_processes(
    job: _Job,
    on_event: Event | None,
    grace_s: float,
    timeout_s: float | None,
) -> Outcomes:
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is not None and not os.path.exists(main):
        raise ConfigError(
            explain(
                "processes can't import the main program",
                where="launch",
                got=main,
                fix="save it to a file, or use transport='threads'",
            )
        )
    context = _context()
    store = _store()
    pipes: dict[Connection, int] = {}
    processes = []
    try:
        for rank in range(job.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(job, rank, store.port, theirs),
                name=f"evenep-rank-{rank}",
                daemon=True,
            )
            pipes[ours] = rank
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    explain(
                        f"fn and args can't be sent to a process: {error}",
                        where="launch",
                        fix="use a module-level function, or transport='threads'",
                    )
                ) from error
            finally:
                theirs.close()
            processes.append(process)
        return _collect(pipes, on_event, grace_s, timeout_s)
    finally:
        for process in processes:
            _end(process)
        for pipe in pipes:
            pipe.close()


def _store() -> dist.TCPStore:
    """The ranks' meeting place, on loopback only.

    The server names each caller by reverse lookup, inside its only thread. An IPv4 socket of our
    own makes callers 127.0.0.1, which hosts files know; by default they are ::ffff:127.0.0.1, and
    a slow name server then stalls every rank for seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _context() -> Any:
    """Fork servers start ranks in milliseconds: torch is imported once, before any thread."""
    if "forkserver" in mp.get_all_start_methods():
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["evenep.launch"])
        return context
    return mp.get_context("spawn")


def _threads_per_rank(ranks: int) -> int:
    return max(1, (os.cpu_count() or 1) // ranks)


def _rank_main(job: _Job, rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(_threads_per_rank(job.ranks))
    lock = threading.Lock()

    def send(packet: bytes) -> None:
        with lock:
            pipe.send_bytes(packet)

    # What a rank reports must pickle: an error there is the rank's own, where it can be seen.
    _reporters.send = lambda message: send(pickle.dumps(("event", message)))
    ok, value = _join_and_call(job, rank, port)
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone: nobody to tell
        send(_pickled("result" if ok else "error", value))
    pipe.close()


def _join_and_call(job: _Job, rank: int, port: int) -> tuple[bool, Any]:
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    except Exception as error:  # it must reach the launcher, whatever it was
        return False, error
    return _call(job, store, rank)


def _pickled(kind: str, value: object) -> bytes:
    """Plain pickle: torch's own reducer would hand over file descriptors of a dying process."""
    try:
        made = pickle.dumps((kind, value))
        if kind == "error":
            pickle.loads(made)  # exceptions often can't be rebuilt from their arguments
        return made
    except Exception as error:  # user objects can fail to pickle in any way
        text = f"can't be sent to the launcher ({error}): {_shown(value)}"
        return pickle.dumps(("error", EvenEPError(text)))


def _shown(value: object) -> str:
    try:
        return f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    except Exception:  # whatever a user's __repr__ may do
        return type(value).__name__


def _collect(
    pipes: dict[Connection, int], on_event: Event | None, grace_s: float, timeout_s: float | None
) -> Outcomes:
    """Listen until every rank has ended, or the grace after a first failure is over."""
    outcomes, open_pipes = Outcomes(), dict(pipes)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while open_pipes:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for pipe in wait(list(open_pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                gone = RankExit(f"rank {rank}'s process ended without a result (killed?)")
                kind, value = "error", gone
            except Exception as error:  # user objects can fail to unpickle in any way
                text = f"what rank {rank} sent can't be read: {type(error).__name__}: {error}"
                kind, value = "error", EvenEPError(text)
            if kind == "event":
                if on_event is not None:
                    on_event(rank, value)
                continue
            outcomes[rank] = (kind == "result", value)
            del open_pipes[pipe]
            if kind == "error":
                grace_end = time.monotonic() + grace_s
                deadline = grace_end if deadline is None else min(deadline, grace_end)
    for rank in open_pipes.values():
        outcomes[rank] = (False, RankExit(f"rank {rank} did not finish in time and was ended"))
    return outcomes


def _end(process: Any) -> None:
    """End a rank for certain; a stopped process only obeys SIGKILL."""
    process.join(timeout=0.5 if process.is_alive() else None)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    process.close()
