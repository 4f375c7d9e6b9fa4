"""EPConfig: every size and choice of an engine, frozen and validated at construction.

Letters: R ranks, E experts, K top-k, H row width, I expert FFN width, S max tokens per rank,
B slots per rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field

from .activation import Activation
from .errors import ConfigError, explain

REDUCTIONS = ("compact", "exact")
ROUTE_WEIGHT_PLACES = ("output", "activation", "input")
GATE_UP_ORDERS = ("gate_first", "up_first")
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EPConfig:
    """Sizes and choices of one expert-parallel layer stack; equal on every rank.

    Args:
        num_experts: E, routed experts in the group.
        top_k: K, experts per token.
        hidden_size: H, width of a dispatched row (for Kimi-K3 the latent width, 3584).
        intermediate_size: I, expert FFN width.
        max_tokens_per_rank: S, the most tokens one rank brings to one step.
        ranks: R, size of the EP group. R need not divide E, and may exceed it.
        slots_per_rank: B, replica slots per rank and layer. None: ``experts_per_rank`` under
            ``policy="exact"`` (its guarantee needs that many), else
            ``min(experts_per_rank, max(4, ceil(experts_per_rank / 8)))``; 0 when R = 1.
        policy: ``static``, ``exact``, ``bounded`` or ``auto`` (see ``evenep.plan.policies``).
        epsilon: slack of ``bounded``: each rank computes at most ``(1 + epsilon) * mean`` routes.
        reduction: ``exact`` (fp32 sum over k ascending, one rounding) or ``compact`` (a token's
            routes on one rank are summed there first, so fewer rows come back).
        row_alignment: every non-empty segment of the receive buffer is padded to a multiple.
        in_flight: steps that may be open at once; each has buffers and slots of its own.
        activation: an ``Activation``, or the name of one without constants.
        weight_format: ``bf16``, ``mxfp4`` or ``fp8`` (see ``evenep.formats``).
        timeout_s: deadline in seconds of every wait for a peer in a step.
        load_timeout_s: deadline of waiting for peers that still load weights; a peer that dies or
            fails meanwhile is noticed at once all the same.
        runner: ``auto``, or one that ``evenep.support`` lists (see ``evenep.experts``).
        route_weight: where the route weight multiplies: the expert's ``output``, its
            ``activation`` (before the down GEMM) or its ``input``.
        expert_bias: experts carry ``w13_bias`` and ``w2_bias``.
        gate_up_order: which half of the first GEMM comes first.
        gate_up_interleave: rows per interleaved granule of w13; 0 means two plain halves.
        decode_cache_bytes: bound of the torch runner's cache of decoded expert weights.

    Raises:
        ConfigError: a size is out of range, or a choice is unknown.
        UnsupportedError: a combination that ``evenep.support`` refuses, with the nearest
            supported choice.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_tokens_per_rank: int
    ranks: int = 1
    slots_per_rank: int | None = None
    policy: str = "auto"
    epsilon: float = 0.02
    reduction: str = "compact"
    row_alignment: int = 1
    in_flight: int = 1
    activation: Activation | str = field(default_factory=lambda: Activation("swiglu"))
    weight_format: str = "bf16"
    timeout_s: float = 60.0
    load_timeout_s: float = 1800.0
    runner: str = "auto"
    route_weight: str = "output"
    expert_bias: bool = False
    gate_up_order: str = "gate_first"
    gate_up_interleave: int = 0
    decode_cache_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in (
            "num_experts",
            "top_k",
            "hidden_size",
            "intermediate_size",
            "max_tokens_per_rank",
            "ranks",
            "row_alignment",
            "in_flight",
        ):
            self._require_int(name, at_least=1)
        self._require_int("decode_cache_bytes", at_least=0)
        self._require_int("gate_up_interleave", at_least=0)
        self._require(self.top_k <= self.num_experts, "top_k", f"<= num_experts {self.num_experts}")
        self._require(_is_number(self.epsilon, 0, 1), "epsilon", "a fraction in [0, 1]")
        for name in ("timeout_s", "load_timeout_s"):
            value = getattr(self, name)
            positive = _is_number(value, 0, math.inf) and value > 0
            self._require(positive, name, "a positive number of seconds")
        self._require(self.reduction in REDUCTIONS, "reduction", f"one of {REDUCTIONS}")
        self._require(
            self.route_weight in ROUTE_WEIGHT_PLACES,
            "route_weight",
            f"one of {ROUTE_WEIGHT_PLACES}",
        )
        self._require(
            self.gate_up_order in GATE_UP_ORDERS, "gate_up_order", f"one of {GATE_UP_ORDERS}"
        )
        self._require(
            self.ranks * self.max_tokens_per_rank * self.top_k <= INT32_MAX,
            "max_tokens_per_rank",
            f"ranks * max_tokens_per_rank * top_k <= {INT32_MAX} (rows are int32)",
        )
        groups = 2 * self.experts_per_rank  # homes, and at most as many replicas
        padding = (self.row_alignment - 1) * groups
        padded = self.ranks * self.max_tokens_per_rank * self.top_k + padding
        self._require(padded <= INT32_MAX, "row_alignment", f"<= {INT32_MAX} rows with padding")
        if isinstance(self.activation, str):
            object.__setattr__(self, "activation", Activation(self.activation))
        self._require(
            isinstance(self.activation, Activation), "activation", "an Activation or a kind's name"
        )
        if self.slots_per_rank is None:
            object.__setattr__(self, "slots_per_rank", self._default_slots())
        self._require_int("slots_per_rank", at_least=0)
        from .support import check_config  # the matrix reads configs; configs ask the matrix

        check_config(self)

    def _require(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(
                explain(f"bad {name}", where="EPConfig", expected=expected, got=getattr(self, name))
            )

    def _require_int(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= at_least
        self._require(ok, name, f"an int >= {at_least}")

    def _default_slots(self) -> int:
        if self.ranks == 1:
            return 0
        if self.policy == "exact":
            return self.experts_per_rank
        return min(self.experts_per_rank, max(4, math.ceil(self.experts_per_rank / 8)))

    @property
    def experts_per_rank(self) -> int:
        """Home experts of the fullest rank, ``ceil(E / R)``."""
        return math.ceil(self.num_experts / self.ranks)

    @property
    def slots(self) -> int:
        """B, resolved."""
        assert self.slots_per_rank is not None
        return self.slots_per_rank

    @property
    def act(self) -> Activation:
        """The activation, resolved."""
        assert isinstance(self.activation, Activation)
        return self.activation

    @property
    def w13_rows(self) -> int:
        """Rows of the first GEMM's weight: 2 I when gated, else I."""
        return self.intermediate_size * (2 if self.act.gated else 1)

    def replace(self, **changes: object) -> EPConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON-able values."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """SHA-256 over every field: ranks compare it at start-up (C1)."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and low <= value <= high
