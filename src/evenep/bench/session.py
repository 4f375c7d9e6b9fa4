"""A serving-like session over the MoE layers of a checkpoint: prefill, then decode steps.

Each rank brings its own tokens. Attention is left out: between layers the residual stream is
normalised by the checkpoint's own ``post_attention_layernorm`` and fed to the MoE block. Every
step runs twice on the same input, once under ``static`` and once under the asked policy, in
alternating order, so that both are measured side by side in one run.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine
from ..errors import ConfigError, explain
from ..group import EPGroup
from ..launch import launch, report
from ..models.kimi_k3 import (
    BlockWeights,
    CheckpointIndex,
    KimiK3MoE,
    checkpoint_weights,
    load_block_weights,
)
from ..models.kimi_k3.block import rms_norm
from ..models.kimi_k3.reference import Oracle, relative_l2
from ..observe import STAGES, StepRecord
from .workloads import Workload

PARITY_LIMIT = 0.006  # relative L2 of the routed sum before the norm: the 0.5 % class, rounded up
PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What to run. Tokens are per rank.

    Attributes:
        checkpoint: directory in Kimi-K3's format.
        layers: decoder layer numbers, None for every MoE layer.
        workload: ``router`` or a name of ``evenep.bench.workloads``.
        prefill: tokens of one prefill pass; prefills: measured passes, after one warm-up.
        decode: steps of ``batch`` tokens each.
        parity_tokens: tokens per rank, layer and phase checked against the oracle.
        choices: ``EPConfig`` fields.
    """

    checkpoint: str
    ranks: int
    transport: str
    layers: tuple[int, ...] | None = None
    workload: str = "router"
    prefill: int = 512
    prefills: int = 3
    decode: int = 32
    batch: int = 8
    parity_tokens: int = 16
    seed: int = 0
    choices: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Timed:
    """One block run: the engine's record and the seconds of the whole block."""

    record: StepRecord
    block_s: float


def run_session(
    spec: SessionSpec, on_event: Callable[[int, Any], None] | None = None
) -> dict[str, Any]:
    """Run it on ``spec.ranks`` ranks; the result is what ``evenep run --json`` writes.

    ``on_event`` receives ``(rank, ("load", bytes) | ("step", phase, done, total))``.

    Raises:
        LaunchError, CheckpointError, ConfigError: nothing was measured.
    """
    if spec.prefill * spec.prefills + spec.batch * spec.decode == 0:
        raise ConfigError(explain("nothing to run", where="session", fix="ask for some tokens"))
    cfg = checkpoint_weights(Path(spec.checkpoint), layers=spec.layers, **_choices(spec)).cfg
    outcomes = launch(_rank_session, spec.ranks, spec.transport, (spec,), on_event=on_event)
    worst = max(o["worst"] for o in outcomes)
    same_experts = all(o["same_experts"] for o in outcomes)
    return {
        "parity": {
            "max_rel_l2": worst if math.isfinite(worst) else None,
            "limit": PARITY_LIMIT,
            "expert_sets_equal": same_experts,
            "ok": worst <= PARITY_LIMIT and same_experts,
        },
        "phases": {
            phase: _summary(outcomes, phase, "asked")
            | {"static": _summary(outcomes, phase, "static")}
            for phase in PHASES
            if outcomes[0]["timed"][phase]["asked"]
        },
        "config": {"session": asdict(spec), "engine": cfg.to_dict()},
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """What a figure was measured on."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def _choices(spec: SessionSpec) -> dict[str, Any]:
    sizes = {"ranks": spec.ranks, "max_tokens_per_rank": max(spec.prefill, spec.batch, 1)}
    return {**sizes, **spec.choices}


def _rank_session(group: EPGroup, spec: SessionSpec) -> dict[str, Any]:
    """One rank's part; runs in the rank's process."""
    weights = checkpoint_weights(Path(spec.checkpoint), layers=spec.layers, **_choices(spec))
    # Every step also runs under static: buffers must hold what any policy may put on a rank.
    cfg = weights.cfg.replace(policy="auto")
    with Engine(cfg, group, weights, progress=lambda n: report(("load", n))) as engine:
        return _Session(engine, group, spec, weights.index, weights.cfg.policy).run()


class _Session:
    def __init__(
        self,
        engine: Engine,
        group: EPGroup,
        spec: SessionSpec,
        index: CheckpointIndex,
        policy: str,
    ) -> None:
        self.engine, self.rank, self.spec = engine, group.rank, spec
        self.policies = {"asked": policy, "static": "static"}
        self.blocks = {layer: load_block_weights(index, layer) for layer in engine.store.layers}
        self.oracles = {layer: Oracle(spec.checkpoint, layer) for layer in self.blocks}
        cfg = engine.cfg
        self.workload = (
            None
            if spec.workload == "router"
            else Workload(spec.workload, cfg.num_experts, cfg.top_k, cfg.ranks, spec.seed)
        )
        self.worst, self.same_experts = 0.0, True
        self.timed: dict[str, dict[str, list[_Timed]]] = {
            phase: {"asked": [], "static": []} for phase in PHASES
        }

    def run(self) -> dict[str, Any]:
        spec = self.spec
        plans = [("prefill", spec.prefill, spec.prefills), ("decode", spec.batch, spec.decode)]
        for phase, tokens, steps in plans:
            for step in range(-1 if steps and tokens else 0, steps if tokens else 0):
                self._step(phase, tokens, step, check=step in (0, steps - 1))
                report(("step", phase, step + 1, steps))
        return {"timed": self.timed, "worst": self.worst, "same_experts": self.same_experts}

    def _step(self, phase: str, capacity: int, step: int, *, check: bool) -> None:
        """All layers once; step -1 warms up and isn't kept."""
        number = step + 1 if phase == "prefill" else step + 1 + 1000  # a stream of its own
        tokens = self.workload.tokens(self.rank, capacity) if self.workload else capacity
        any_block = next(iter(self.blocks.values()))
        seed = (self.spec.seed * 4096 + number) * 4096 + self.rank
        generator = torch.Generator().manual_seed(seed)
        h_TH = torch.randn(tokens, any_block.config.hidden_size, generator=generator).bfloat16()
        for weights in self.blocks.values():
            x_TH = rms_norm(h_TH, _norm_weight(weights), weights.config.rms_norm_eps)
            ids_TK = self.workload.ids(number, self.rank, tokens) if self.workload else None
            variants = ["static", "asked"] if step % 2 else ["asked", "static"]
            for variant in variants:
                y_TH, timed = self._block(weights, x_TH, ids_TK, variant, check=check)
                if step >= 0:
                    self.timed[phase][variant].append(timed)
                if variant == "asked":
                    next_TH = h_TH + y_TH
            h_TH = next_TH

    def _block(
        self,
        weights: BlockWeights,
        x_TH: Tensor,
        ids_TK: Tensor | None,
        variant: str,
        *,
        check: bool,
    ) -> tuple[Tensor, _Timed]:
        policy = self.policies[variant]
        layer = weights.layer

        def experts(z_TD: Tensor, ids: Tensor, route_weights: Tensor) -> Tensor:
            return self.engine(z_TD, ids, route_weights, layer, policy=policy)

        block = KimiK3MoE(weights, experts)
        start = time.perf_counter()
        out = block(x_TH, ids_TK)
        timed = _Timed(self.engine.records[-1], time.perf_counter() - start)
        if check:
            self._check(layer, x_TH, ids_TK, out.routed_TD, out.ids_TK)
        return out.y_TH, timed

    def _check(
        self, layer: int, x_TH: Tensor, forced: Tensor | None, routed_TD: Tensor, ids_TK: Tensor
    ) -> None:
        """Compare a few tokens with the oracle: expert sets equal, routed sum in class."""
        n = min(self.spec.parity_tokens, x_TH.shape[0])
        if n == 0:
            return
        oracle, x_nH = self.oracles[layer], x_TH[:n].float()
        if forced is None:
            want_ids, weights_nK = oracle.router(x_nH)
        else:
            want_ids, weights_nK = forced[:n], oracle.weigh(x_nH, forced[:n])
        same = want_ids.long().sort(1).values.equal(ids_TK[:n].long().sort(1).values)
        self.same_experts = self.same_experts and same
        want_nD = oracle.routed(oracle.latent(x_nH), want_ids, weights_nK)
        distance = relative_l2(routed_TD[:n].float(), want_nD)
        # Nothing compares with NaN, so that max() would forget it.
        self.worst = max(self.worst, math.inf if math.isnan(distance) else distance)


def _norm_weight(weights: BlockWeights) -> Tensor:
    """The layer's own norm; a checkpoint of MoE blocks only has none, and gets plain RMS."""
    if weights.post_attention_norm_H is not None:
        return weights.post_attention_norm_H
    return torch.ones(weights.config.hidden_size, dtype=torch.bfloat16)


def _summary(outcomes: list[dict[str, Any]], phase: str, variant: str) -> dict[str, Any]:
    """Figures of one phase under one policy, over all ranks and steps."""
    by_rank: list[list[_Timed]] = [o["timed"][phase][variant] for o in outcomes]
    steps = list(zip(*by_rank, strict=True))
    records = [timed.record for timed in by_rank[0]]  # plan figures are equal on all ranks
    slowest_s = [max(t.block_s for t in step) for step in steps]
    layer_s = [max(t.record.total_s for t in step) for step in steps]
    tokens = [sum(t.record.tokens for t in step) for step in steps]
    layers = len({record.layer for record in records})  # a token passes all of them
    mean = statistics.fmean
    return {
        "tokens_per_s": sum(tokens) / layers / sum(slowest_s),
        "layer_ms": statistics.median(layer_s) * 1e3,
        "imbalance_before": mean(r.imbalance_before for r in records),
        "imbalance_after": mean(r.imbalance_after for r in records),
        "replicas_per_step": mean(r.replicas for r in records),
        "fetch_bytes_per_step": mean(r.fetch_bytes for r in records),
        "saved_bytes_per_step": mean(r.saved_bytes for r in records),
        "stage_ms": {
            stage: mean(t.record.stage_s[stage] for step in steps for t in step) * 1e3
            for stage in STAGES
        },
        "fetch_hidden_ms": mean(
            max(t.record.fetch_busy_s - t.record.stage_s["fetch"], 0.0) for s in steps for t in s
        )
        * 1e3,
        "chosen": _most_common([r.chosen for r in records]),
        "steps": len(steps) // layers,
    }


def _most_common(names: list[str]) -> str:
    return statistics.mode(names) if names else ""
