"""The engine: one rank's end of an expert-parallel layer stack.

R ranks, E experts, T tokens this rank brings this step, K top-k, H row width.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .agreement import agreed_max, gather_words
from .checks import check_fit, check_out, check_routing, check_rows
from .config import EPConfig
from .errors import (
    InputError,
    PlanError,
    PoisonedError,
    StateError,
    UnsupportedError,
    explain,
)
from .experts.choice import RunnerChoice
from .group import EPGroup
from .host import HostMachine
from .machine import RECORDS, Machine, Opening, Setup
from .observe import StepRecord
from .plan import Hardware, Placement
from .settings import Settings
from .step import Step
from .support import require
from .transport import DeviceTransport, Tag, Transport
from .weights.source import ExpertWeights, Progress
from .weights.store import ExpertStore

if TYPE_CHECKING:
    from .device.buckets import Buckets
    from .device.capture import Captured

Result = TypeVar("Result")


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
        self.placement = Placement.resolve(placement, cfg.num_experts, cfg.ranks)
        check_fit(cfg, group.size, experts.cfg)
        self.settings = Settings.from_environment()
        self._records: deque[Callable[[], StepRecord]] = deque(maxlen=RECORDS)
        self._epoch, self._closed = 0, False
        self._poison: BaseException | None = None
        self._steps: list[Step | None] = [None] * cfg.in_flight
        self.transport = group.connect(
            timeout_s=cfg.timeout_s,
            lanes=cfg.in_flight,
            gather_words=gather_words(cfg.num_experts),
            identity=self._identity(experts, hardware),
        )
        try:
            self._machine: Machine = _machine_of(self.transport)(
                Setup(
                    cfg=cfg,
                    placement=self.placement,
                    transport=self.transport,
                    experts=experts,
                    hardware=hardware,
                    settings=self.settings,
                    progress=progress,
                )
            )
            self.transport.barrier(Tag("construct"), cfg.load_timeout_s)
        except BaseException as error:
            self.transport.fail(error)
            self.transport.close(orderly=False)
            raise

    # ---- a step

    def __call__(
        self,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        layer: int = 0,
        *,
        policy: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """One step: every rank's tokens through their experts. Collective.

        Args:
            x_TH: BF16 ``[T, H]``; T may differ per rank and may be 0.
            topk_ids_TK: int32 or int64 ``[T, K]``; an id below zero is not routed.
            topk_weights_TK: fp32 ``[T, K]``.
            layer: which layer's experts.
            policy: overrides ``cfg.policy`` for this step; the same on every rank.
            out: BF16 ``[T, H]`` to write into instead of a new tensor.

        Returns:
            BF16 ``[T, H]``, zero for tokens without a routed expert.

        Raises:
            InputError: an argument is refused; nothing was queued.
            AgreementError: ranks disagree on the layer or policy of this step.
            PeerError: a peer died, stopped or failed; the engine is poisoned until ``reset``.
        """
        self._check(topk_ids_TK, topk_weights_TK)
        check_rows(self.cfg, self.transport.device, x_TH, topk_ids_TK.shape[0])
        if out is not None:
            check_out(self.cfg, out, self.transport.device, topk_ids_TK)
        self.require_usable("begin")
        step = self._begin(topk_ids_TK, topk_weights_TK, layer, policy)
        step.dispatch(x_TH)
        step.fetch()
        step.compute()
        return step.combine(out)

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
        self._check(topk_ids_TK, topk_weights_TK)
        return self._begin(topk_ids_TK, topk_weights_TK, layer, policy)

    def _begin(
        self, topk_ids_TK: Tensor, topk_weights_TK: Tensor, layer: int, policy: str | None
    ) -> Step:
        self.store.require_layer(layer)
        asked = policy or self.cfg.policy
        require("policy", asked, where="Engine.begin")
        lane = self._free_lane()
        opening = Opening(
            layer=layer,
            lane=lane,
            epoch=self._epoch,
            policy=asked,
            ids_TK=topk_ids_TK,
            weights_TK=topk_weights_TK,
        )
        start = time.perf_counter()
        try:
            with torch.no_grad():
                work = self._machine.open(opening)
        except PlanError:
            raise  # the same on every rank, and nothing was queued: the engine stays usable
        except BaseException as error:
            self.poison(error)
            raise
        work.planned(time.perf_counter() - start)
        step = Step(self, opening, work)
        self._steps[lane] = step
        self._epoch += 1
        return step

    def capture(self, fn: Callable[[], Result]) -> Captured[Result]:
        """Record the steps that ``fn`` makes as a CUDA graph; ``.replay()`` makes them again.

        ``fn`` runs twice: once to warm up, once to be recorded. It may call the engine any number
        of times, and other work between. A replay reads the same tensors, so write the next
        step's inputs into them first; tokens that aren't there get ids of -1. Collective: every
        rank records the same calls, and replays them in one order.

        Example::

            graph = engine.capture(lambda: engine(x_TH, ids_TK, weights_TK, layer=3))
            ids_TK.copy_(next_ids_TK)
            y_TH = graph.replay()

        Raises:
            UnsupportedError: the engine isn't on a GPU.
            StateError: on the default stream, which can't be captured.
        """
        self.require_usable("capture")
        self.require_idle("capture")
        if self.group.device != "cuda":
            raise UnsupportedError(
                explain("graphs are captured on GPUs", where="Engine.capture", got="device 'cpu'")
            )
        from .device.capture import Captured  # needs CUDA

        return Captured(self, fn)

    def capture_buckets(
        self, sizes: Sequence[int], layer: int = 0, *, policy: str | None = None
    ) -> Buckets:
        """Record a layer's step for several numbers of tokens. Collective.

        Example::

            step = engine.capture_buckets([1, 8, 64], layer=3)
            y_TH = step(x_TH, ids_TK, weights_TK, tokens=most_of_any_rank)

        Raises:
            InputError: a size is not in 1 … ``max_tokens_per_rank``.
            UnsupportedError, StateError: as ``capture``.
        """
        from .device.buckets import Buckets  # needs CUDA

        return Buckets(self, sizes, layer, policy)

    def synchronize(self) -> None:
        """Wait until every step so far is done, well or not.

        On a GPU, where steps are only queued, this is where a failure shows at the latest.

        Raises:
            PeerError: a peer died, stopped or failed; the engine is poisoned until ``reset``.
        """
        if not self._closed:
            self._machine.synchronize()
        self.require_usable("synchronize")

    @property
    def hardware(self) -> Hardware | None:
        """Cost constants in use; None until the first ``auto`` step has measured them."""
        return self._machine.hardware

    @property
    def runner_choice(self) -> RunnerChoice:
        """Name of the runner that computes the experts, and why it is that one.

        With ``runner="auto"`` on a GPU, BF16 candidates are timed when the first engine is made,
        and the times kept in ``EVENEP_CACHE_DIR``.
        """
        return self._machine.runner_choice

    @property
    def records(self) -> list[StepRecord]:
        """The latest steps' records, oldest first. On a GPU this waits for them."""
        return [record() for record in self._records]

    # ---- weights

    @property
    def store(self) -> ExpertStore:
        """This rank's experts and slots."""
        return self._machine.store

    def update_weights(self, layer: int, experts: ExpertWeights) -> None:
        """Replace a layer's weights; every replica of the old ones is void. Collective."""
        self.require_usable("update_weights")
        self.store.require_layer(layer)
        check_fit(self.cfg, self.group.size, experts.cfg)
        if layer not in experts.layers:
            raise InputError(
                explain(
                    "the new weights don't hold the layer",
                    where="Engine.update_weights",
                    expected=layer,
                    got=list(experts.layers),
                )
            )
        self.require_idle("update_weights")
        try:
            tag, patience_s = Tag("construct", layer), self.cfg.load_timeout_s
            self._machine.synchronize()
            self.transport.barrier(tag, patience_s)  # nobody reads the old rows any more
            self.store.load(layer, experts)
            self.store.bump_version(layer)
            self._machine.forget(layer)
            self._machine.synchronize()
            self.transport.barrier(tag, patience_s)
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
        self.poison(StateError("reset() was called"))  # unless poisoned: peers hear of it
        for step in self._steps:
            if step is not None:
                step.abandon()
        self._machine.halt()
        self.transport.reset()
        try:
            self._machine.restart()
            self._steps = [None] * self.cfg.in_flight
            self._epoch = agreed_max(self.transport, self._epoch, Tag("reset"))
        except BaseException as error:
            self.transport.fail(error)
            raise
        self._poison = None

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
            self._machine.close()  # whoever keeps a closed engine doesn't keep its experts

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
        if self._poison is None and (trouble := self._machine.trouble()) is not None:
            self.poison(trouble)
            raise trouble
        if self._poison is not None:
            raise PoisonedError(
                explain(
                    f"an earlier step failed: {type(self._poison).__name__}: {self._poison}",
                    where=f"Engine.{verb}",
                    fix="call reset() on every rank, or close the engine",
                )
            )

    def require_idle(self, verb: str) -> None:
        """Refuse while a step is open."""
        if any(self._steps):
            raise StateError(explain("a step is in flight", where=f"Engine.{verb}"))

    def end_step(self, lane: int, record: Callable[[], StepRecord]) -> None:
        """Take a lane's lease back."""
        self._steps[lane] = None
        self._records.append(record)

    # ---- inside

    def _identity(self, experts: ExpertWeights, hardware: Hardware | None) -> str:
        """Equal on ranks that may work together."""
        poison = self.settings.poison  # it adds a wait to every step
        homes, layers = self.placement.home_E.tolist(), list(experts.layers)
        return repr([self.cfg.digest(), homes, layers, hardware, poison])

    def replaying(self) -> contextlib.AbstractContextManager[None]:
        """Around a replay of captured steps."""
        return self._machine.replaying()

    @contextlib.contextmanager
    def collect_records(self) -> Iterator[list[Callable[[], StepRecord]]]:
        """Steps inside the block leave their records in the list, not with the engine's."""
        kept, collected = self._records, deque[Callable[[], StepRecord]]()
        self._records = collected
        found: list[Callable[[], StepRecord]] = []
        try:
            yield found
        finally:
            self._records = kept
            found.extend(collected)

    def _check(self, ids_TK: Tensor, weights_TK: Tensor) -> None:
        values = self._machine.may_look()
        check_routing(self.cfg, self.transport.device, ids_TK, weights_TK, values=values)

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


def _machine_of(transport: Transport) -> Callable[[Setup], Machine]:
    if not isinstance(transport, DeviceTransport):
        return HostMachine
    from .device.machine import DeviceMachine  # needs Triton, which a CPU build of torch lacks

    return DeviceMachine
