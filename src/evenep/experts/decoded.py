"""A bounded cache of decoded expert weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from ..weights.layer import ExpertKey

Decoded = tuple[Tensor, Tensor]


class DecodedCache:
    """Least recently used out first, except what the last two rounds over all layers used.

    A pass goes over all experts of a layer in order. Plain LRU under a working set just above
    the bound would evict every entry right before its next use; keeping what recent passes
    touched lets a part of the set stay.

    Args:
        limit_bytes: bound on the bytes kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.nbytes = limit_bytes, 0
        self._entries: OrderedDict[ExpertKey, tuple[Decoded, int, int]] = OrderedDict()
        self._layers: set[int] = set()
        self._passes = 0

    def begin_pass(self, layer: int) -> None:
        """A new step of a layer starts."""
        self._layers.add(layer)
        self._passes += 1

    def get(self, key: ExpertKey, decode: Callable[[], Decoded]) -> Decoded:
        """The decoded weights of ``key``, kept if they fit."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = (entry[0], entry[1], self._passes)
            return entry[0]
        weights = decode()
        size = sum(t.numel() * t.element_size() for t in weights)
        if self._make_room(size):
            self._entries[key] = (weights, size, self._passes)
            self.nbytes += size
        return weights

    def _make_room(self, size: int) -> bool:
        if size > self.limit_bytes:
            return False
        while self.nbytes + size > self.limit_bytes and self._entries:
            oldest, (_, freed, last) = next(iter(self._entries.items()))
            if self._passes - last < 2 * len(self._layers):
                return False
            del self._entries[oldest]
            self.nbytes -= freed
        return True
