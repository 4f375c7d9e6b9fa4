"""How ranks meet: small byte strings exchanged through a torch.distributed store, by name.

The store is whatever bootstrapped the job (torchrun's TCP store, the launcher's, a hash table for
threads). It is used at construction, at a reset and to leave word of failures, never inside a step.

A *generation* is the time between two resets. Words and exchanges belong to one, so nothing has to
be taken back. Ranks may give up on a reset at different times and try again, so each attempt has
one verdict, ``go`` or ``void`` (and for whose sake), and the store's compare-and-set lets exactly
one rank write it: one that runs out of patience leaves with the others if their ``go`` came first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch.distributed import Store

from ..errors import PeerDied, PeerError, PeerFailed, PeerTimeout, StoreLostError
from .base import GAVE_UP, KINDS, Tag, Word
from .jobstore import JobStore

_NAP_S, _LONGEST_NAP_S = 0.5e-3, 20e-3
_CHECKUP_S = 0.05  # how often a waiting rank looks for word of a failure


class Meeting:
    """One rank's seat at the table.

    Args:
        store: reachable by all ranks.
        rank, size: this rank and how many.
        prefix: keeps this meeting's keys apart; equal on all ranks, unused before.
        timeout_s: deadline of an exchange.

    Attributes:
        generation: resets so far; equal on all ranks.
        gone: whether a peer is known to have died; transports that can tell replace it.
    """

    def __init__(self, store: Store, rank: int, size: int, prefix: str, timeout_s: float) -> None:
        self.store = JobStore(store, max(0.5, timeout_s / 4))
        self.rank, self.size = rank, size
        self.prefix, self.timeout_s = prefix, timeout_s
        self.generation, self._tried, self._exchanges = 0, 0, 0
        self.gone: Callable[[int], bool] = lambda peer: False

    def exchange(self, payload: str, tag: Tag) -> list[str]:
        """Everyone's payload, by rank. Collective.

        Raises:
            PeerError: names the rank that never came, died, or that said it failed.
        StoreLostError: the store itself doesn't answer.
        """
        name = f"{self.prefix}/{self.generation}/{self._exchanges}"
        self._exchanges += 1
        self.store.set(f"{name}/{self.rank}", payload)
        deadline = time.monotonic() + self.timeout_s
        return [self._get(f"{name}/{peer}", peer, tag, deadline) for peer in range(self.size)]

    def _get(self, key: str, peer: int, tag: Tag, deadline: float) -> str:
        for checkup in _looks():
            # Ask, never wait: a store's timed wait is answered late by a busy server.
            if self.store.check(key):
                return self.store.get(key)
            if not checkup:
                continue
            error = self.trouble(peer, tag)
            if error is None and time.monotonic() > deadline:
                detail = f"no word within {self.timeout_s:g} s"
                error = tag.error(PeerTimeout, self.rank, peer, detail)
            if error is not None and not self.store.check(key):
                raise error
        raise AssertionError("unreachable")

    def trouble(self, peer: int, tag: Tag) -> PeerError | None:
        """Why a peer will not come, if that is known."""
        word = self.report(peer)
        if word is None:
            return tag.error(PeerDied, self.rank, peer, "it is gone") if self.gone(peer) else None
        if word.blamed == self.rank:
            return tag.error(PeerFailed, self.rank, peer, f"{GAVE_UP}: {word.detail}")
        detail = f"reported by rank {peer}: {word.detail}"
        return tag.error(KINDS[word.kind], self.rank, word.blamed, detail)

    # ---- word of failures

    def leave_word(self, word: Word) -> None:
        """Say that this rank has failed and whom it blames. Never raises."""
        try:
            key = f"{self.prefix}/fault/{self.generation}/{self.rank}"
            self.store.set(key, f"{word.blamed} {word.kind}\n{word.detail}")
        except StoreLostError:
            return  # the store died with its host; peers learn it from the wire

    def report(self, peer: int) -> Word | None:
        """What the peer left of a failure in this generation."""
        key = f"{self.prefix}/fault/{self.generation}/{peer}"
        try:
            if not self.store.check(key):
                return None
            head, _, detail = self.store.get(key).partition("\n")
        except StoreLostError:
            return None
        blamed, kind = map(int, head.split())
        return Word(blamed, kind, detail)

    # ---- resets

    def regroup(self, tag: Tag) -> None:
        """Enter a new generation together, or not at all. Collective.

        Raises:
            PeerError: names a rank that died or didn't come; call again to try again.
        """
        deadline = time.monotonic() + self.timeout_s
        attempt, absent = self._join(max(self.generation, self._tried) + 1)
        for checkup in _looks():
            verdict = self._verdict(attempt)
            if verdict.startswith("void"):
                attempt, absent = self._join(attempt)  # the ranks that gave up will try again
                continue
            missing = [] if verdict else self._missing(attempt)
            error = None
            if checkup and missing:
                # Ranks that gave up on another leave too: the one they named comes first.
                suspects = sorted(missing, key=lambda p: p != absent)
                dead = next((p for p in suspects if self.gone(p)), None)
                if dead is not None:
                    error = tag.error(PeerDied, self.rank, dead, "it is gone")
                elif time.monotonic() > deadline:
                    detail = f"it did not call reset() within {self.timeout_s:g} s"
                    peer = absent if absent in missing else missing[0]
                    error = tag.error(PeerTimeout, self.rank, peer, detail)
            if error is not None:
                verdict = self._decide(attempt, f"void {error.peer}")
                if verdict != "go":
                    raise error
            if not missing and not verdict:
                verdict = self._decide(attempt, "go")
            if verdict == "go":
                self.generation, self._exchanges = attempt, 0
                return

    def _join(self, attempt: int) -> tuple[int, int]:
        """Take part in the first attempt from this one on that nobody has given up.

        Returns its number, and for whose sake the one before was given up (-1: none was).
        """
        absent = -1
        while (verdict := self._verdict(attempt)).startswith("void"):
            absent = int(verdict.split()[1])
            attempt += 1
        self._tried = attempt
        self.store.set(f"{self.prefix}/reset/{attempt}/{self.rank}", "here")
        return attempt, absent

    def _missing(self, attempt: int) -> list[int]:
        key = f"{self.prefix}/reset/{attempt}"
        return [r for r in range(self.size) if not self.store.check(f"{key}/{r}")]

    def _verdict(self, attempt: int) -> str:
        key = f"{self.prefix}/reset/{attempt}/verdict"
        return self.store.get(key) if self.store.check(key) else ""

    def _decide(self, attempt: int, verdict: str) -> str:
        """Write the attempt's verdict unless another rank was first; the one that holds."""
        key = f"{self.prefix}/reset/{attempt}/verdict"
        return self.store.compare_set(key, "", verdict)


def _looks() -> Iterator[bool]:
    """Naps between looks, longer and longer; True when it is time to ask after the peers."""
    nap, checkup = _NAP_S, time.monotonic() + _CHECKUP_S
    while True:
        now = time.monotonic()
        yield now >= checkup
        if now >= checkup:
            checkup = now + _CHECKUP_S
        time.sleep(nap)
        nap = min(nap * 1.5, _LONGEST_NAP_S)
