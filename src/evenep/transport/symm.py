"""Ranks as processes whose GPUs reach each other: torch symmetric memory.

Windows are symmetric memory (``torch.distributed._symmetric_memory``; rendezvous through the job's
store, no process group needed), so kernels load and store a peer's rows by address: over NVLink
with one process per GPU, or inside one GPU that several processes share (which torch allows when
``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``). Multicast is never used.

A step's waits run on the streams. *Synchronisation pattern: signal, wait, reset.* Every rank has a
pad of words ``[lanes, phases, R]`` in its own symmetric memory. At gate (lane, phase) rank m writes
1 into word [lane, phase, m] of every pad, waits until its own R words are 1, and resets them to 0.
Values never change, so a graph can replay them. The reset can't destroy a later signal: a peer
signals the same phase again only after two other phases, each of which needs this rank's signal,
which it queues behind its reset.

On the host, ranks meet like ``shm``: at construction, at a reset, and to leave word of failures. A
watch looks after work whose waits don't end: it names the rank whose word is missing, then signals
its own pads so that the stuck streams run dry.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from ..errors import BootstrapError, EvenEPError, PeerError, explain
from .base import Tag, Transfer, root_cause
from .board import FAILED
from .gpu import DeviceTransport, current_stream
from .meeting import Meeting
from .shm import ShmTransport
from .stream_waits import Batch, WaitFor, Write
from .watch import Watch

GATES = ("counts", "dispatch", "combine", "leave", "even", "odd")
"""Phases with pads of their own. ``leave`` ends a step in poison mode; ``even`` and ``odd`` take
turns behind waits of the host, so that none is signalled twice in a row."""

_ALIGN = 256

Made = TypeVar("Made")


class SymmTransport(ShmTransport, DeviceTransport):
    """Peers are processes on this host whose GPUs can map each other's memory."""

    name = "symm"

    def __init__(self, meeting: Meeting, *, lanes: int, gather_words: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._kept: list[object] = []  # handles and stores that torch doesn't keep alive
        self._fetch_stream = torch.cuda.Stream(self.device)
        self._pads: list[Tensor] = []
        self._captures = 0
        self._word, self._ending = threading.Lock(), False
        super().__init__(meeting, lanes=lanes, gather_words=gather_words)
        words = (lanes + 1) * len(GATES) * self.size
        self._pads = [m.view(torch.int32) for m in self._share_windows(4 * words)]
        self._gates = {
            (lane, phase): self._batch(lane, phase)
            for lane in range(lanes + 1)
            for phase in range(len(GATES))
        }
        self._watch = Watch(
            self._pads[self.rank].view(lanes + 1, len(GATES), self.size),
            GATES,
            self.rank,
            self._judge,
            self._tell,
        )

    # ---- memory

    def _share_windows(self, nbytes: int) -> list[Tensor]:
        """Symmetric memory of ``nbytes`` on every rank, zeroed. All succeed or all fail.

        In two steps, because a rank without memory would leave its peers in torch's rendezvous,
        where nobody hears why it doesn't come.
        """
        memory = self._all(lambda: self._allocate(nbytes), nbytes)
        return self._all(lambda: self._rendezvous(memory, nbytes), nbytes)

    def _all(self, make: Callable[[], Made], nbytes: int) -> Made:
        """What ``make`` returns if it does so on every rank."""
        made, failed = None, ""
        try:
            made = make()
        except Exception as error:  # torch raises many kinds; every rank must hear of it
            failed = f"{type(error).__name__}: {error}"
        said = self._meeting.exchange(failed, Tag("construct"))
        for rank, trouble in enumerate(said):
            if trouble:
                raise BootstrapError(
                    explain(
                        f"rank {rank} can't make or map symmetric memory: {trouble}",
                        where="transport 'symm'",
                        expected=f"{nbytes} bytes on every rank, reachable by its peers",
                        fix="check free GPU memory and NVLink (nvidia-smi topo -p2p r); ranks "
                        "that share a GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1",
                    )
                )
        assert made is not None
        return made

    def _allocate(self, nbytes: int) -> Tensor:
        c10d: Any = torch._C._distributed_c10d
        size = -(-nbytes // _ALIGN) * _ALIGN
        memory: Tensor = c10d._SymmetricMemory.empty_strided_p2p(
            (size,), (1,), torch.uint8, self.device
        )
        return memory

    def _rendezvous(self, memory: Tensor, nbytes: int) -> list[Tensor]:
        """torch finds the ranks of a rendezvous under the name of a process group: one of ours,
        which has a store and no backend, so that nothing is asked of the job's groups."""
        c10d: Any = torch._C._distributed_c10d
        name = f"{self._meeting.prefix}/symm/{self._meeting.generation}/{len(self._kept)}"
        size = memory.numel()
        store = PrefixStore(name, self._meeting.store.raw)
        ranks: Any = dist.ProcessGroup(store, self.rank, self.size)
        ranks._set_group_name(name)
        c10d._register_process_group(name, ranks)
        try:
            symmetric = c10d._SymmetricMemory
            symmetric.set_group_info(name, self.rank, self.size, store)
            handle = symmetric.rendezvous(memory, name)
        finally:
            c10d._unregister_process_group(name)
        memory.zero_()
        torch.cuda.current_stream(self.device).synchronize()
        self._kept.append((handle, store))
        peers = [
            memory if r == self.rank else handle.get_buffer(r, (size,), torch.uint8)
            for r in range(self.size)
        ]
        return [p[:nbytes] for p in peers]

    # ---- waits

    def gate(self, tag: Tag, lane: int) -> None:
        self._watch.expect(tag, lane)
        self._gates[lane, GATES.index(tag.phase)].queue(current_stream(self.device))

    def barrier(self, tag: Tag, timeout_s: float | None = None) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        super().barrier(tag, timeout_s)

    def fetch(self, transfers: Sequence[Transfer], tag: Tag, lane: int = 0) -> None:
        with torch.cuda.stream(self._fetch_stream):
            super().fetch(transfers, tag, lane)
        self._fetch_stream.synchronize()

    @contextlib.contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[int]:
        """One graph per rank; its gates are in it."""
        torch.cuda.current_stream(self.device).synchronize()
        self._meet(Tag("construct"), self.lanes)
        # Only this thread is recorded: the watch keeps looking meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        self._captures += 1
        try:
            yield self._captures
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one to tell
                graph.capture_end()
            raise
        graph.capture_end()
        self._meet(Tag("construct"), self.lanes)

    def replay(self, graph: torch.cuda.CUDAGraph, number: int) -> None:
        """Ranks that replay different captures find out by the epochs in their counts' headers."""
        self._watch.expect(Tag("counts"), self.lanes)
        graph.replay()

    def _join(self, lane: int) -> None:
        if self._pads and not self._ending:  # neither while this is being built nor at its end
            turn = GATES.index("odd" if self._counts[lane] % 2 else "even")
            self._gates[lane, turn].queue(torch.cuda.current_stream(self.device))

    def _batch(self, lane: int, phase: int) -> Batch:
        starts = [pad.data_ptr() for pad in self._pads]
        first = (lane * len(GATES) + phase) * self.size
        mine, word = starts[self.rank] + 4 * first, 4 * (first + self.rank)
        own = [mine + 4 * peer for peer in range(self.size)]
        return Batch(
            [Write(start + word, 1) for start in starts]
            + [WaitFor(address, 1) for address in own]
            + [Write(address, 0) for address in own]
        )

    # ---- life and death

    def _judge(self, tag: Tag, missing: Sequence[int], waited_s: float) -> PeerError | None:
        """Why a queued wait doesn't end, if that is known or it has taken too long."""
        late_s = waited_s if waited_s > self.timeout_s else None
        return self._diagnose(missing, tag, late_s)

    def follow(self, counter_1: Tensor) -> None:
        self._watch.follow(counter_1)

    def trouble(self) -> EvenEPError | None:
        """What the watch found first since the last reset."""
        return self._watch.trouble()

    def settled(self) -> None:
        # A peer that gave up lets its streams run dry, and they signal as they go: my gates may
        # have opened on words that mean nothing. It left its own word before the first of them.
        peers = [p for p in self._board.failed(self._meeting.generation) if p != self.rank]
        error = self._diagnose(peers, self._watch.last, None) if peers else None
        if error is not None:
            self._watch.found(error)

    def _tell(self, error: EvenEPError) -> None:
        """Word of a failure on the board only: the store may take its time."""
        with self._word:
            if self.rank not in self._board.failed(self._meeting.generation):
                word = root_cause(error, self.rank)
                self._board.set_fault(self.rank, FAILED, word, self._meeting.generation)

    def fail(self, error: BaseException) -> None:
        with self._word:
            super().fail(error)
        if not self.closed:
            self._watch.release()

    def reset(self) -> None:
        torch.cuda.synchronize(self.device)  # the watch lets stuck streams run dry
        super().reset()
        self._watch.settle()
        self._meeting.exchange("pads are clear", Tag("reset"))

    def close(self, *, orderly: bool = True) -> None:
        if self.closed:
            return
        self._ending = True
        try:
            torch.cuda.synchronize(self.device)
            self._watch.stop()  # nothing waits any more, and the board goes now
        finally:
            try:
                super().close(orderly=orderly)
            finally:
                self._watch.stop()
                self._kept.clear()  # whoever keeps a closed engine doesn't keep its memory
                self._pads, self._gates = [], {}
