"""Captured steps of one layer for a few numbers of tokens, so that serving never runs one eagerly.

T tokens of a step, S tokens of a bucket, K top-k, H row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError, StateError, explain

if TYPE_CHECKING:
    from ..engine import Engine
    from .capture import Captured


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """A captured step and the tensors it reads and writes."""

    x_SH: Tensor
    ids_SK: Tensor
    weights_SK: Tensor
    y_SH: Tensor
    graph: Captured[Tensor]


class Buckets:
    """Made by ``Engine.capture_buckets``. A step replays the smallest bucket that holds it.

    Tokens that a bucket has beyond the step's get ids of -1: they are not routed, sent or computed.

    Attributes:
        sizes: tokens of each bucket, ascending.
    """

    def __init__(
        self, engine: Engine, sizes: Sequence[int], layer: int, policy: str | None
    ) -> None:
        limit = engine.cfg.max_tokens_per_rank
        wrong = [s for s in sizes if not isinstance(s, int) or not 0 < s <= limit]
        if wrong or not sizes:
            raise InputError(
                explain(
                    "bad bucket sizes",
                    where="Engine.capture_buckets",
                    expected=f"some of 1 … max_tokens_per_rank = {limit}",
                    got=list(sizes),
                )
            )
        self.sizes = tuple(sorted(set(sizes)))
        self._device = engine.transport.device
        # The largest first: what it allocates serves the others too.
        self._buckets = {s: self._make(engine, s, layer, policy) for s in reversed(self.sizes)}

    def size_for(self, tokens: int) -> int:
        """The smallest bucket for so many tokens.

        Raises:
            InputError: none is large enough.
        """
        for size in self.sizes:
            if size >= tokens:
                return size
        raise InputError(
            explain(
                "more tokens than the largest bucket",
                where="Buckets",
                expected=f"at most {self.sizes[-1]}",
                got=tokens,
                fix="capture a larger bucket, or split the batch",
            )
        )

    def __call__(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, tokens: int | None = None
    ) -> Tensor:
        """One step, replayed. Collective.

        Args:
            x_TH, ids_TK, weights_TK: as for the engine.
            tokens: the most tokens that any rank brings to this step; None: as many as this rank
                does. Ranks must choose the same bucket, so it must be the same on every rank.

        Returns:
            BF16 ``[T, H]``, a view that the bucket's next replay overwrites.

        Raises:
            InputError: no bucket is large enough, or the inputs don't go with each other.
            StateError: inside a capture: call the engine itself there.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise StateError(
                explain(
                    "a captured step can't be captured again",
                    where="Buckets",
                    fix="call the engine itself inside a capture",
                )
            )
        T = x_TH.shape[0]
        most = T if tokens is None else tokens
        if most < T or not T == ids_TK.shape[0] == weights_TK.shape[0]:
            raise InputError(
                explain(
                    "inputs of different lengths, or more than announced",
                    where="Buckets",
                    expected=f"at most {most} tokens",
                    got=f"{T} rows, {ids_TK.shape[0]} ids, {weights_TK.shape[0]} weights",
                )
            )
        bucket = self._buckets[self.size_for(most)]
        bucket.x_SH[:T].copy_(x_TH)
        bucket.ids_SK[:T].copy_(ids_TK)
        bucket.ids_SK[T:].fill_(-1)
        bucket.weights_SK[:T].copy_(weights_TK)
        bucket.graph.replay()
        return bucket.y_SH[:T]

    def _make(self, engine: Engine, size: int, layer: int, policy: str | None) -> _Bucket:
        H, K, device = engine.cfg.hidden_size, engine.cfg.top_k, self._device
        x_SH = torch.zeros(size, H, dtype=torch.bfloat16, device=device)
        ids_SK = torch.full((size, K), -1, dtype=torch.int32, device=device)
        weights_SK = torch.zeros(size, K, device=device)
        y_SH = torch.zeros_like(x_SH)
        graph = engine.capture(
            lambda: engine(x_SH, ids_SK, weights_SK, layer, policy=policy, out=y_SH)
        )
        return _Bucket(x_SH, ids_SK, weights_SK, y_SH, graph)
