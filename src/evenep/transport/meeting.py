"""How ranks meet: small byte strings exchanged through a torch.distributed store, by name.

The store is whatever bootstrapped the job (torchrun's TCP store, the launcher's, a hash table for
threads). It is used at construction and to leave word of failures, never inside a step.
"""

from __future__ import annotations

import time

from torch.distributed import Store

from ..errors import PeerFailed, PeerTimeout
from .base import Tag

_NAP_S, _LONGEST_NAP_S = 1e-3, 20e-3


class Meeting:
    """One rank's seat at the table.

    Args:
        store: reachable by all ranks.
        rank, size: this rank and how many.
        prefix: keeps this meeting's keys apart; equal on all ranks, unused before.
        timeout_s: deadline of an exchange.
    """

    def __init__(self, store: Store, rank: int, size: int, prefix: str, timeout_s: float) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.prefix, self.timeout_s = prefix, timeout_s
        self._exchanges = 0

    def exchange(self, payload: str, tag: Tag) -> list[str]:
        """Everyone's payload, by rank. Collective.

        Raises:
            PeerTimeout, PeerFailed: names the rank that never came, or that said it failed.
        """
        name = f"{self.prefix}/{self._exchanges}"
        self._exchanges += 1
        self.store.set(f"{name}/{self.rank}", payload)
        deadline = time.monotonic() + self.timeout_s
        return [self._get(f"{name}/{peer}", peer, tag, deadline) for peer in range(self.size)]

    def _get(self, key: str, peer: int, tag: Tag, deadline: float) -> str:
        nap = _NAP_S
        while not self.store.check([key]):  # polled: a store's own wait can't look for failures
            report = self.report(peer)
            if report is not None:
                raise tag.error(PeerFailed, self.rank, *report)
            if time.monotonic() > deadline:
                detail = f"no word within {self.timeout_s:g} s"
                raise tag.error(PeerTimeout, self.rank, peer, detail)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
        return bytes(self.store.get(key)).decode()

    def leave_word(self, blamed: int, detail: str) -> None:
        """Say that this rank has failed and whom it blames. Never raises."""
        try:
            self.store.set(f"{self.prefix}/fault/{self.rank}", f"{blamed}\n{detail}")
        except RuntimeError:
            return  # the store died with its host; peers learn it from the wire

    def take_back_word(self) -> None:
        """Forget what this rank left, at a reset."""
        self.store.delete_key(f"{self.prefix}/fault/{self.rank}")

    def report(self, peer: int) -> tuple[int, str] | None:
        """``(blamed rank, detail)`` if the peer left word of a failure."""
        key = f"{self.prefix}/fault/{peer}"
        try:
            if not self.store.check([key]):
                return None
            blamed, _, detail = bytes(self.store.get(key)).decode().partition("\n")
        except RuntimeError:
            return None
        return int(blamed), detail
