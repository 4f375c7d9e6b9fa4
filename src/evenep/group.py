"""EPGroup: the ranks that share one set of experts, and how they reach each other."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch.distributed import Store

from .errors import AgreementError, BootstrapError, ConfigError, explain
from .support import require_transport
from .transport import BY_DEVICE, Meeting, Tag, Transport
from .transport.base import root_cause
from .transport.place import host_identity

_MEET_S = 300.0  # ranks may load for minutes before they meet


class EPGroup:
    """One rank's membership.

    Attributes:
        rank, size: this rank and how many there are.
        transport: ``threads``, ``shm`` or ``collective``; on a GPU ``threads`` or ``symm``.
        device: ``cpu`` or ``cuda``, where weights and rows live. With ``cuda`` a rank uses the GPU
            that is current when its engine is built.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        transport: str,
        device: str = "cpu",
        prefix: str = "evenep",
    ) -> None:
        require_transport(transport, device, where="EPGroup")
        if not 0 <= rank < size:
            raise ConfigError(
                explain("bad rank", where="EPGroup", expected=f"0 <= rank < {size}", got=rank)
            )
        self.rank, self.size, self.transport, self.device = rank, size, transport, device
        self._store, self._prefix = store, prefix
        self._connections = 0
        self._open: list[Transport] = []

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        transport: str = "auto",
        device: str = "cpu",
    ) -> EPGroup:
        """The ranks of a torch process group; its store is where they meet. Collective.

        Args:
            process_group: None: the default group.
            transport: ``auto`` takes ``shm`` when all ranks are on one host, else ``collective``;
                ``symm`` on GPUs.
            device: ``cpu`` or ``cuda``.

        Raises:
            BootstrapError: no process group is initialised, or this process isn't in it.
        """
        if not dist.is_initialized():
            raise BootstrapError(
                explain(
                    "torch.distributed isn't initialised",
                    where="EPGroup.from_torch",
                    fix="call torch.distributed.init_process_group first, or use evenep.launch",
                )
            )
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if rank < 0:
            raise BootstrapError(
                explain("this process isn't in the group", where="EPGroup.from_torch")
            )
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)  # type: ignore[arg-type]
        members = "-".join(map(str, ranks))
        store = dist.distributed_c10d._get_default_store()
        prefix = f"evenep/{members}/{_uses(store, members, rank)}"
        if transport == "auto" and device == "cuda":
            transport = "symm"
        elif transport == "auto":
            transport = _reachable(store, rank, size, prefix)
        return cls(store, rank, size, transport=transport, device=device, prefix=prefix)

    def connect(
        self, *, timeout_s: float, lanes: int, gather_words: int, identity: str = ""
    ) -> Transport:
        """A transport of its own for one engine. Collective, in the same order on every rank.

        Raises:
            AgreementError: ranks came with different identities; says which, before anything
                is shared whose layout could depend on them.
        """
        meeting = self._seat(timeout_s)
        self._connections += 1
        try:
            _agree(meeting, f"{self.device} {identity}")
            kind = BY_DEVICE[self.device][self.transport]
            made = kind(meeting, lanes=lanes, gather_words=gather_words)
        except BaseException as error:
            meeting.leave_word(root_cause(error, self.rank))
            raise
        self._open = [t for t in self._open if not t.closed] + [made]
        return made

    def _seat(self, timeout_s: float) -> Meeting:
        prefix = f"{self._prefix}/{self._connections}"
        return Meeting(self._store, self.rank, self.size, prefix, timeout_s)

    def abort(self, error: BaseException) -> None:
        """Tell every peer that this rank stops here, on whatever is open. Never raises."""
        for transport in self._open:
            transport.fail(error)
        self._seat(0.0).leave_word(root_cause(error, self.rank))  # for those who build the next


def _agree(meeting: Meeting, identity: str) -> None:
    digest = hashlib.sha256(identity.encode()).hexdigest()
    said = meeting.exchange(digest, Tag("construct"))
    other = [rank for rank, theirs in enumerate(said) if theirs != said[0]]
    if other:
        raise AgreementError(
            explain(
                f"ranks {other} came with another config, placement or layers than rank 0",
                where="Engine",
                fix="build EPConfig, placement and ExpertWeights from the same values",
            )
        )


def _uses(store: Store, members: str, rank: int) -> int:
    """How many groups of these members this rank has made before: keeps their keys apart."""
    return int(store.add(f"evenep/{members}/uses/{rank}", 1)) - 1


def _reachable(store: Store, rank: int, size: int, prefix: str) -> str:
    """``shm`` when every rank runs on the same kernel in the same PID namespace.

    Host names aren't enough: containers may share one, and can't map each other's memory.
    """
    seat = Meeting(store, rank, size, f"{prefix}/auto", _MEET_S)
    places = set(seat.exchange(host_identity(), Tag("construct")))
    return "shm" if len(places) == 1 else "collective"
