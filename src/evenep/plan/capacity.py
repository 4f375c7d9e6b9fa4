"""The one capacity formula (C3), used by host code, kernels, tests and docs."""

from __future__ import annotations

from typing import TypeVar

from ..config import EPConfig
from .placement import Ints

Count = TypeVar("Count", int, Ints)


def ceil_to(value: Count, multiple: int) -> Count:
    """The smallest multiple not below ``value``, a number or an array of them."""
    return -(-value // multiple) * multiple


def receive_rows(cap: int, groups: int, align: int) -> int:
    """Rows a rank needs for up to ``cap`` routes in up to ``groups`` segments.

    A segment exists only if it holds a route, and each is padded to a multiple of ``align``, so
    padding is at most ``(align - 1) * min(groups, cap)``; the bound is tight (every segment
    holding ``1 mod align`` routes reaches it).

    Example: cap 4, 8 groups, align 2 → 4 + 1 * 4 = 8.
    """
    return cap + (align - 1) * min(groups, cap)


def cap_routes(cfg: EPConfig, max_experts_per_rank: int, policy: str | None = None) -> int:
    """The most routes any plan of this config, or of one ``policy``, may put on one rank.

    ``exact`` always reaches the mean when B covers a home group, and the mean is at most S K;
    ``bounded`` then stays within ``(1 + epsilon)`` of it. Every other choice may leave all
    R S K routes at home on one rank.
    """
    policy = policy or cfg.policy
    worst = cfg.ranks * cfg.max_tokens_per_rank * cfg.top_k
    even = cfg.max_tokens_per_rank * cfg.top_k
    if cfg.ranks == 1 or cfg.slots < max_experts_per_rank:
        return worst
    if policy == "exact":
        return even
    if policy == "bounded":
        millionths = 10**6 + round(cfg.epsilon * 10**6)  # as Problem.caps counts
        return min(worst, even * millionths // 10**6)
    return worst
