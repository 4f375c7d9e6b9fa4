"""The job's store with a deadline on every call.

Who hosts the store decides who can stall it: torchrun's agent and the launcher outlive their ranks,
but a job that meets by hand has rank 0 host it, and a stopped rank 0 would then hold up everyone
that only wants to ask what happened.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore, Store

from ..errors import StoreLostError, explain


class JobStore:
    """``set``, ``get``, ``check`` and ``compare_set`` of a torch store, each bounded in time.

    Once a call was not answered the store counts as lost, and later calls fail at once.

    Raises (every method):
        StoreLostError: no answer within ``patience_s``, or the connection broke.
    """

    def __init__(self, store: Store, patience_s: float) -> None:
        self.raw, self._patience_s = store, patience_s
        self._lost: StoreLostError | None = None

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(self.raw.set, key, value)

    def get(self, key: str) -> str:
        """Read a value that is there (``check`` first: a store waits for absent keys)."""
        return bytes(self._ask(self.raw.get, key)).decode()

    def check(self, key: str) -> bool:
        """Whether a key is there."""
        return bool(self._ask(self.raw.check, [key]))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write unless somebody was first (``expected`` empty: nobody was); what holds now."""
        return bytes(self._ask(self.raw.compare_set, key, expected, desired)).decode()

    def _ask(self, call: Callable[..., Any], *args: object) -> Any:
        if isinstance(self.raw, HashStore):  # in this process: always answers
            return call(*args)
        if self._lost is not None:
            raise self._lost
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def body() -> None:
            try:
                answer.put((True, call(*args)))
            except RuntimeError as error:  # torch.distributed.DistError and its kin
                answer.put((False, error))

        # A daemon thread a call: one that never returns can't hold up the interpreter's exit.
        threading.Thread(target=body, name="evenep-store", daemon=True).start()
        try:
            ok, value = answer.get(timeout=self._patience_s)
        except queue.Empty:
            ok, value = False, f"no answer within {self._patience_s:g} s"
        if ok:
            return value
        self._lost = StoreLostError(
            explain(
                f"the job's store is gone: {value}",
                where="torch.distributed store",
                fix="its host (torchrun's agent, the launcher, or rank 0) must outlive the ranks",
            )
        )
        raise self._lost
