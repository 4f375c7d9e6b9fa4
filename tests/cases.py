"""Small engine problems shared by the engine's tests: inputs of all ranks, and a rank's run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights, Hardware, launch

# Rows dear, launches and fetches nearly free: `auto` moves work even in tiny problems.
EAGER = Hardware(row_ps=1000, read_ps=10, launch_ps=10, fetch_ps=1)


def config(**changes: object) -> EPConfig:
    """A small config; slots for a whole home group, so that every policy has a plan."""
    sizes: dict[str, object] = {
        "num_experts": 13,
        "top_k": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_tokens_per_rank": 24,
        "ranks": 3,
        "timeout_s": 20.0,
    } | changes
    if "slots_per_rank" not in sizes:
        sizes["slots_per_rank"] = -(-int(str(sizes["num_experts"])) // int(str(sizes["ranks"])))
    return EPConfig(**sizes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Inputs:
    """Tokens of all ranks; rank r brings rows ``spans[r]``."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    spans: tuple[slice, ...]

    @staticmethod
    def skewed(cfg: EPConfig, tokens: Sequence[int], seed: int = 0, skew: float = 3.0) -> Inputs:
        """Ragged tokens whose router prefers low expert ids; about one id in ten is -1."""
        g = torch.Generator().manual_seed(seed)
        total = sum(tokens)
        scores = torch.randn(total, cfg.num_experts, generator=g)
        scores += torch.linspace(skew, 0, cfg.num_experts)
        ids = scores.topk(cfg.top_k, dim=1).indices
        ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
        weights = torch.rand(ids.shape, generator=g)
        x = torch.randn(total, cfg.hidden_size, generator=g).bfloat16()
        return Inputs(x, ids, weights, spans(tokens))

    def of(self, rank: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """What one rank brings."""
        s = self.spans[rank]
        return self.x[s].to(device), self.ids[s].to(device), self.weights[s].to(device)


def spans(tokens: Sequence[int]) -> tuple[slice, ...]:
    """Consecutive slices of the given lengths."""
    ends = torch.tensor([0, *tokens]).cumsum(0).tolist()
    return tuple(slice(a, b) for a, b in itertools.pairwise(ends))


def run_policies(
    group: EPGroup,
    cfg: EPConfig,
    source: ExpertWeights,
    inputs: Inputs,
    policies: Sequence[str],
    placement: Sequence[int] | None = None,
) -> dict[str, tuple[Tensor, float, int]]:
    """Per policy: this rank's output, imbalance reached, replicas used."""
    out = {}
    with Engine(cfg, group, source, hardware=EAGER, placement=placement) as engine:
        for policy in policies:
            mine = inputs.of(group.rank, group.device)
            y = engine(*mine, layer=source.layers[-1], policy=policy)
            engine.synchronize()
            record = engine.records[-1]
            out[policy] = (y.cpu(), record.imbalance_after, record.replicas)
    return out


def launch_at(
    fn: Callable[..., Any], ranks: int, transport: str, args: Sequence[object] = ()
) -> list[Any]:
    """``launch``; ``threads@cuda`` means transport ``threads`` on a GPU."""
    name, _, device = transport.partition("@")
    return launch(fn, ranks, name, args, device=device or "cpu")


def whole(outcomes: Sequence[dict[str, tuple[Tensor, float, int]]], policy: str) -> Tensor:
    """All ranks' outputs, in token order."""
    return torch.cat([o[policy][0] for o in outcomes])
