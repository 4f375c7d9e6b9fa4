"""The fetch lane: replicas travel on a thread of their own while home segments compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class FetchLane:
    """Runs one fetch after another, in the order they were queued."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evenep-fetch")

    def submit(self, fetch: Callable[[], None]) -> Future[float]:
        """Queue a fetch; the future holds the seconds it took, or raises what it raised."""

        def timed() -> float:
            start = time.perf_counter()
            fetch()
            return time.perf_counter() - start

        return self._pool.submit(timed)

    def close(self) -> None:
        """Let the running fetch end and stop the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
