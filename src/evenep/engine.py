"""The engine: one rank's end of an expert-parallel layer stack.

R ranks, E experts, T tokens this rank brings this step, K top-k, H row width.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from .config import EPConfig
from .errors import (
    AgreementError,
    ConfigError,
    InputError,
    PlanError,
    PoisonedError,
    StateError,
    explain,
)
from .exchange.buffers import Buffers
from .exchange.routes import count_routes
from .experts import make_runner
from .experts.measure import measure
from .group import EPGroup
from .observe import StepRecord
from .plan import Hardware, Placement, Plan, plan
from .plan.planner import verify
from .plan.policies import POLICIES
from .settings import Settings
from .step import Step
from .support import require
from .transport import Tag
from .weights.lane import FetchLane
from .weights.source import ExpertWeights, Progress
from .weights.store import ExpertStore

# What every rank says before its counts; all but the tokens must agree.
_HEADER = ("layer", "epoch", "lane", "weight version", "policy", "tokens")
_RECORDS = 4096


class Engine:
    """Runs routed experts over the ranks of a group. Construction and ``close`` are collective.

    Args:
        cfg: sizes and choices; equal on every rank.
        group: this rank's membership; its size must be ``cfg.ranks``.
        experts: where weights come from; each rank reads only its own.
        placement: homes; None: contiguous. Equal on every rank.
        hardware: cost constants for ``auto``; None: measured at its first step, agreed by all
            ranks.
        progress: called with bytes loaded.

    Example::

        with Engine(cfg, group, experts) as engine:
            y_TH = engine(x_TH, topk_ids_TK, topk_weights_TK, layer=0)

    Attributes:
        records: the latest steps' ``StepRecord``s, oldest first.

    Raises:
        ConfigError: the config fits neither the group nor the experts.
        AgreementError: ranks came with different configs, placements or layers.
    """

    def __init__(
        self,
        cfg: EPConfig,
        group: EPGroup,
        experts: ExpertWeights,
        *,
        placement: Placement | Sequence[int] | None = None,
        hardware: Hardware | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.cfg, self.group = cfg, group
        self.placement = _placement(cfg, placement)
        _check_fit(cfg, group, experts)
        self.settings = Settings.from_environment()
        self.records: deque[StepRecord] = deque(maxlen=_RECORDS)
        self._epoch, self._closed = 0, False
        self._poison: BaseException | None = None
        self._steps: list[Step | None] = [None] * cfg.in_flight
        words = len(_HEADER) + cfg.num_experts
        self.transport = group.connect(
            timeout_s=cfg.timeout_s, lanes=cfg.in_flight, gather_words=words
        )
        try:
            self.agree(self._identity(experts))
            self.runner = make_runner(cfg)
            self.store = ExpertStore(cfg, self.placement, self.transport, experts, progress)
            self.buffers = Buffers.make(cfg, self.store.home_rows, self.transport)
            if self.settings.poison:
                for buffers in self.buffers:
                    buffers.poison()
            self.transport.barrier(Tag("construct"))  # home rows are loaded everywhere
            self.hardware = hardware
        except BaseException as error:
            self.transport.fail(error)
            self.transport.close(orderly=False)
            raise
        self.fetch_lane = FetchLane()

    # ---- a step

    def __call__(
        self,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        layer: int = 0,
        *,
        policy: str | None = None,
    ) -> Tensor:
        """One step: every rank's tokens through their experts. Collective.

        Args:
            x_TH: BF16 ``[T, H]``; T may differ per rank and may be 0.
            topk_ids_TK: int32 or int64 ``[T, K]``; an id below zero is not routed.
            topk_weights_TK: fp32 ``[T, K]``.
            layer: which layer's experts.
            policy: overrides ``cfg.policy`` for this step; the same on every rank.

        Returns:
            BF16 ``[T, H]``, zero for tokens without a routed expert.

        Raises:
            InputError: an argument is refused; nothing was queued.
            AgreementError: ranks disagree on the layer or policy of this step.
            PeerError: a peer died, stopped or failed; the engine is poisoned until ``reset``.
        """
        self.check_rows(x_TH, topk_ids_TK.shape[0])
        step = self.begin(topk_ids_TK, topk_weights_TK, layer, policy=policy)
        step.dispatch(x_TH)
        step.fetch()
        step.compute()
        return step.combine()

    @torch.no_grad()
    def begin(
        self,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        layer: int = 0,
        *,
        policy: str | None = None,
    ) -> Step:
        """Exchange counts, plan, and lease a lane: the first verb of a step. Collective.

        Up to ``cfg.in_flight`` steps may be open; every rank opens and ends them in one order.
        """
        self.require_usable("begin")
        self.store.require_layer(layer)
        self._check_routing(topk_ids_TK, topk_weights_TK)
        asked = policy or self.cfg.policy
        require("policy", asked, where="Engine.begin")
        lane = self._free_lane()
        start = time.perf_counter()
        try:
            counts_RE = self._exchange_counts(topk_ids_TK, layer, lane, asked)
            if asked == "auto" and self.hardware is None:
                tag = Tag("counts", layer, self._epoch)
                self.hardware = measure(self.runner, self.store, self.transport, lane=lane, tag=tag)
            made = self._plan(counts_RE, layer, lane, asked)
        except PlanError:
            raise  # the same on every rank, and nothing was queued: the engine stays usable
        except BaseException as error:
            self.poison(error)
            raise
        record = self._record(made, layer, topk_ids_TK)
        step = Step(
            self,
            made,
            layer=layer,
            lane=lane,
            epoch=self._epoch,
            ids_TK=topk_ids_TK,
            weights_TK=topk_weights_TK,
            record=record,
        )
        record.stage_s["plan"] = time.perf_counter() - start
        self._steps[lane] = step
        self._epoch += 1
        return step

    # ---- weights

    def update_weights(self, layer: int, experts: ExpertWeights) -> None:
        """Replace a layer's weights; every replica of the old ones is void. Collective."""
        self.require_usable("update_weights")
        self.store.require_layer(layer)
        if any(self._steps):
            raise StateError(explain("a step is in flight", where="Engine.update_weights"))
        try:
            self.transport.barrier(Tag("construct", layer))  # nobody reads the old rows any more
            self.store.load(layer, experts)
            self.store.bump_version(layer)
            self.transport.barrier(Tag("construct", layer))
        except BaseException as error:
            self.poison(error)
            raise

    # ---- life

    def reset(self) -> None:
        """Make a poisoned engine usable again. Collective: every rank must call it.

        Steps in flight are lost, slots count as empty, weights stay.

        Raises:
            PeerError: a peer is gone for good; close the engine.
        """
        if self._closed:
            raise StateError(explain("the engine is closed", where="Engine.reset"))
        self.fetch_lane.close()
        self.transport.reset()
        self.fetch_lane = FetchLane()
        self.store.forget()
        self._steps = [None] * self.cfg.in_flight
        self._poison = None
        self._epoch = int(self._agreed_max(self._epoch))

    def close(self) -> None:
        """Release everything. Collective unless poisoned; calling it twice is fine."""
        self._close(orderly=self._poison is None)

    def _close(self, *, orderly: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.transport.close(orderly=orderly)
        finally:
            self.fetch_lane.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.poison(error)
        self._close(orderly=error is None and self._poison is None)

    def poison(self, error: BaseException) -> None:
        """Refuse further steps and tell the peers why."""
        if self._poison is None and not self._closed:
            self._poison = error
            self.transport.fail(error)

    def require_usable(self, verb: str) -> None:
        """Refuse work on a closed or poisoned engine."""
        if self._closed:
            raise StateError(explain("the engine is closed", where=f"Engine.{verb}"))
        if self._poison is not None:
            raise PoisonedError(
                explain(
                    f"an earlier step failed: {type(self._poison).__name__}: {self._poison}",
                    where=f"Engine.{verb}",
                    fix="call reset() on every rank, or close the engine",
                )
            )

    def end_step(self, step: Step, lane: int, rows: int) -> None:
        """Take a lane's lease back."""
        if self.settings.poison:
            # Peers may still be pulling: only this debug mode needs to know when they are done.
            nothing = torch.zeros(0, dtype=torch.int64)
            self.transport.all_gather(nothing, Tag("combine", epoch=self._epoch), lane)
            self.buffers[lane].poison(rows)
        self._steps[lane] = None
        self.records.append(step.record)

    # ---- agreement

    def agree(self, identity: str) -> None:
        """Refuse ranks that came with a different identity.

        Raises:
            AgreementError: names the ranks that differ from rank 0.
        """
        digest = [int(identity[i : i + 12], 16) for i in range(0, 48, 12)]
        said_R = self.transport.all_gather(torch.tensor(digest), Tag("construct"), 0)
        other = [r for r in range(self.cfg.ranks) if not torch.equal(said_R[r], said_R[0])]
        if other:
            raise AgreementError(
                explain(
                    f"ranks {other} came with another config, placement or layers than rank 0",
                    where="Engine",
                    fix="build EPConfig, placement and ExpertWeights from the same values",
                )
            )

    def _identity(self, experts: ExpertWeights) -> str:
        poison = self.settings.poison  # it adds a wait to every step
        parts = [self.cfg.digest(), self.placement.home_E.tolist(), list(experts.layers), poison]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _agreed_max(self, value: int) -> int:
        said = self.transport.all_gather(torch.tensor([value]), Tag("reset"), 0)
        return int(said.max())

    def _exchange_counts(self, ids_TK: Tensor, layer: int, lane: int, policy: str) -> Tensor:
        header = [
            layer,
            self._epoch,
            lane,
            self.store.version(layer),
            list(POLICIES).index(policy),
            ids_TK.shape[0],
        ]
        counts_E = count_routes(ids_TK, self.cfg.num_experts)
        words = torch.cat([torch.tensor(header, dtype=torch.int64), counts_E])
        said_RN = self.transport.all_gather(words, Tag("counts", layer, self._epoch), lane)
        for i, name in enumerate(_HEADER[:-1]):
            said_R = said_RN[:, i]
            if not (said_R == said_R[0]).all():
                raise AgreementError(
                    explain(
                        f"ranks disagree on the {name} of this step",
                        where=f"layer {layer}, epoch {self._epoch}",
                        got=f"by rank: {said_R.tolist()}",
                        fix="make the same calls in the same order on every rank",
                    )
                )
        return said_RN[:, len(_HEADER) :]

    def _plan(self, counts_RE: Tensor, layer: int, lane: int, policy: str) -> Plan:
        made = plan(
            counts_RE.numpy(),
            self.cfg,
            self.placement,
            self.store.residency(layer, lane),
            policy,
            self.hardware,
        )
        if self.settings.debug:
            verify(made, self.cfg, self.placement)
        return made

    def _record(self, made: Plan, layer: int, ids_TK: Tensor) -> StepRecord:
        stats, rank = made.stats, self.group.rank
        return StepRecord(
            layer=layer,
            epoch=self._epoch,
            tokens=ids_TK.shape[0],
            routes=int(made.counts[rank].sum()),
            computed=int(made.loads[rank]),
            policy=stats.policy,
            chosen=stats.chosen,
            imbalance_before=stats.imbalance_before,
            imbalance_after=stats.imbalance_after,
            replicas=stats.replicas,
            fetches=stats.fetches,
            fetch_bytes=stats.fetch_bytes,
            saved_bytes=stats.saved_bytes,
        )

    def _free_lane(self) -> int:
        for lane, step in enumerate(self._steps):
            if step is None:
                return lane
        raise StateError(
            explain(
                "every step slot is in flight",
                where="Engine.begin",
                expected=f"at most in_flight={self.cfg.in_flight} open steps",
                fix="combine() an open step first, or raise in_flight",
            )
        )

    # ---- checks of arguments; nothing is queued before they pass

    def check_rows(self, x_TH: Tensor, tokens: int) -> None:
        """Refuse rows of the wrong device, dtype or shape."""
        require("device", x_TH.device.type, where="Engine: x_TH")
        require("dtype", str(x_TH.dtype).removeprefix("torch."), where="Engine: x_TH")
        expected = (tokens, self.cfg.hidden_size)
        if tuple(x_TH.shape) != expected:
            raise InputError(
                explain("wrong shape", where="x_TH", expected=expected, got=tuple(x_TH.shape))
            )
        if x_TH.requires_grad and torch.is_grad_enabled():
            raise InputError(
                explain(
                    "the engine has no backward pass",
                    where="x_TH",
                    expected="no gradient",
                    got="requires_grad=True",
                    fix="call it under torch.no_grad(), or detach x",
                )
            )

    def _check_routing(self, ids_TK: Tensor, weights_TK: Tensor) -> None:
        T, K, E = ids_TK.shape[0] if ids_TK.ndim else 0, self.cfg.top_k, self.cfg.num_experts
        for name, tensor, dtypes in (
            ("topk_ids_TK", ids_TK, (torch.int32, torch.int64)),
            ("topk_weights_TK", weights_TK, (torch.float32,)),
        ):
            require("device", tensor.device.type, where=f"Engine: {name}")
            if tensor.dtype not in dtypes:
                raise InputError(
                    explain(
                        "wrong dtype", where=name, expected=f"one of {dtypes}", got=tensor.dtype
                    )
                )
            if tuple(tensor.shape) != (T, K):
                raise InputError(
                    explain(
                        "wrong shape", where=name, expected=f"(T, {K})", got=tuple(tensor.shape)
                    )
                )
        if self.cfg.max_tokens_per_rank < T:
            raise InputError(
                explain(
                    "more tokens than the buffers were built for",
                    where="topk_ids_TK",
                    expected=f"T <= max_tokens_per_rank = {self.cfg.max_tokens_per_rank}",
                    got=T,
                    fix="raise max_tokens_per_rank or split the batch",
                )
            )
        if T and int(ids_TK.max()) >= E:
            raise InputError(
                explain(
                    "expert id out of range",
                    where="topk_ids_TK",
                    expected=f"ids < {E} (below zero: not routed)",
                    got=int(ids_TK.max()),
                )
            )
        if not torch.isfinite(weights_TK[ids_TK >= 0]).all():
            raise InputError(explain("a routed weight isn't finite", where="topk_weights_TK"))


def _placement(cfg: EPConfig, placement: Placement | Sequence[int] | None) -> Placement:
    if placement is None:
        return Placement.contiguous(cfg.num_experts, cfg.ranks)
    if not isinstance(placement, Placement):
        placement = Placement.from_homes(placement, cfg.ranks)
    if (placement.num_experts, placement.ranks) != (cfg.num_experts, cfg.ranks):
        raise ConfigError(
            explain(
                "placement doesn't fit the config",
                where="Engine",
                expected=f"{cfg.num_experts} experts on {cfg.ranks} ranks",
                got=f"{placement.num_experts} experts on {placement.ranks} ranks",
            )
        )
    return placement


def _check_fit(cfg: EPConfig, group: EPGroup, experts: ExpertWeights) -> None:
    if group.size != cfg.ranks:
        raise ConfigError(
            explain("wrong group size", where="Engine", expected=cfg.ranks, got=group.size)
        )
    theirs = experts.cfg
    for name in (
        "num_experts",
        "hidden_size",
        "intermediate_size",
        "weight_format",
        "expert_bias",
        "w13_rows",
    ):
        if getattr(theirs, name) != getattr(cfg, name):
            raise ConfigError(
                explain(
                    f"the experts' {name} isn't the config's",
                    where="Engine",
                    expected=getattr(cfg, name),
                    got=getattr(theirs, name),
                )
            )
