"""The support matrix as data: the constructor's checks, the docs and the CLI read this one table.

A ``Choice`` is one value of one axis (a format, a runner, a transport …), supported or refused
with the reason and the nearest supported choice. A ``Rule`` refuses a combination of values.
Adding a format, runner, transport or policy adds one ``Choice`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .activation import KINDS
from .errors import UnsupportedError, explain

if TYPE_CHECKING:
    from .config import EPConfig


@dataclass(frozen=True, slots=True)
class Choice:
    """One value of one axis. ``refused`` is the reason, empty when supported."""

    axis: str
    name: str
    note: str
    refused: str = ""
    nearest: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A refused combination: ``broken(config)`` returns what was got, or None when fine."""

    name: str
    reason: str
    nearest: str
    broken: Callable[[EPConfig], str | None]


_LATER = "not part of this version"

CHOICES: tuple[Choice, ...] = (
    Choice("policy", "static", "every route runs on its expert's home rank"),
    Choice("policy", "exact", "MoonEP's greedy, bit for bit: every rank gets the mean"),
    Choice("policy", "bounded", "every rank within (1 + epsilon) of the mean, fewest replicas"),
    Choice("policy", "auto", "candidates of all policies scored by the cost model"),
    Choice("weight_format", "bf16", "plain BF16 matrices"),
    Choice("weight_format", "mxfp4", "E2M1 pairs, one E8M0 scale per 32 columns (Kimi-K3)"),
    Choice("weight_format", "fp8", "E4M3 with an FP32 scale per 128 x 128 block"),
    Choice("weight_format", "nvfp4", "", f"NVFP4 experts are {_LATER}", "mxfp4"),
    Choice("weight_format", "int4", "", f"INT4 experts are {_LATER}", "mxfp4"),
    Choice("runner", "auto", "the fastest supported runner of the device"),
    Choice(
        "runner", "torch", "torch GEMMs; CPU: quantised experts decoded on first touch; GPU: BF16"
    ),
    Choice("runner", "reference", "CPU: one row at a time, fp32: slow, obvious, batch-invariant"),
    Choice("runner", "triton", "GPU: every format, decoded in registers; any GPU, batch-invariant"),
    Choice("runner", "gluon", "GPU: MXFP4 on SM90, decoded beside the tensor cores"),
    Choice("runner", "deepgemm", "GPU: DeepGEMM on SM90: BF16, or FP8 with FP8 activations"),
    Choice(
        "runner",
        "humming",
        "",
        "its last group takes every row to the end of the buffer, so the host must know how many",
        "gluon",
    ),
    Choice("transport", "threads", "ranks are threads of one process"),
    Choice("transport", "shm", "ranks are processes of one host with shared memory"),
    Choice("transport", "collective", "gloo sockets of its own beside any torch.distributed job"),
    Choice("transport", "symm", "GPUs that map each other's memory (torch symmetric memory)"),
    *(Choice("activation", kind, formula) for kind, (formula, _, _) in KINDS.items()),
    Choice("reduction", "compact", "routes of a token on one rank are summed there first"),
    Choice("reduction", "exact", "fp32 sum over k ascending, one rounding, at the token's rank"),
    Choice("route_weight", "output", "weight multiplies the expert's output (Kimi-K3)"),
    Choice("route_weight", "activation", "weight multiplies before the down GEMM"),
    Choice("route_weight", "input", "weight multiplies the expert's input (Llama-4)"),
    Choice("device", "cpu", "first-class: transports threads, shm, collective"),
    Choice("device", "cuda", "NVIDIA GPUs: transports threads (one GPU), symm"),
    Choice("dtype", "bfloat16", "rows are BF16 on the wire and in the receive buffer"),
    Choice("dtype", "float16", "", f"FP16 rows are {_LATER}", "bfloat16"),
    Choice("dtype", "float32", "", f"FP32 rows are {_LATER}", "bfloat16"),
)

_GRANULES = (0, 1, 8)

RUNNER_FORMATS: dict[str, tuple[str, ...]] = {
    "auto": ("bf16", "mxfp4", "fp8"),
    "torch": ("bf16", "mxfp4", "fp8"),  # on a GPU BF16 only, which its constructor says
    "reference": ("bf16", "mxfp4", "fp8"),
    "triton": ("bf16", "mxfp4", "fp8"),
    "gluon": ("mxfp4",),
    "deepgemm": ("bf16", "fp8"),
}
"""The formats that a runner computes."""


def _runner_format(runner: str, *, among: tuple[str, ...]) -> Callable[[EPConfig], str | None]:
    def broken(cfg: EPConfig) -> str | None:
        wrong = cfg.weight_format in among and cfg.weight_format not in RUNNER_FORMATS[runner]
        return f"weight_format='{cfg.weight_format}'" if cfg.runner == runner and wrong else None

    return broken


def _interleave(cfg: EPConfig) -> str | None:
    granule = cfg.gate_up_interleave
    if granule not in _GRANULES:
        return f"gate_up_interleave={granule}"
    if granule and not cfg.act.gated:
        return f"gate_up_interleave={granule} with '{cfg.act.kind}'"
    if granule and cfg.intermediate_size % granule:
        return f"intermediate_size={cfg.intermediate_size} with granule {granule}"
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "exact needs slots",
        "the exact greedy may place one whole home group on a rank, so its guarantee needs "
        "slots_per_rank >= experts_per_rank",
        "slots_per_rank=None with policy='exact', or policy='bounded'",
        lambda c: (
            f"slots_per_rank={c.slots}, experts_per_rank={c.experts_per_rank}"
            if c.policy == "exact" and c.ranks > 1 and c.slots < c.experts_per_rank
            else None
        ),
    ),
    Rule(
        "mxfp4 groups",
        "MXFP4 scales cover 32 input columns, so hidden_size and intermediate_size must be "
        "multiples of 32",
        "bf16",
        lambda c: (
            f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}"
            if c.weight_format == "mxfp4" and (c.hidden_size % 32 or c.intermediate_size % 32)
            else None
        ),
    ),
    Rule(
        "fp8 blocks",
        "a 128 x 128 scale block may not straddle gate and up rows, so intermediate_size must "
        "be a multiple of 128",
        "bf16",
        lambda c: (
            f"intermediate_size={c.intermediate_size}"
            if c.weight_format == "fp8" and c.act.gated and c.intermediate_size % 128
            else None
        ),
    ),
    Rule(
        "gate/up interleave",
        f"gate and up rows are concatenated or interleaved in granules of {_GRANULES[1:]}, "
        "and only gated activations have both",
        "gate_up_interleave=0",
        _interleave,
    ),
    Rule(
        "gluon format",
        "the gluon runner is a decoder of MXFP4 and computes nothing else",
        "runner='auto' or 'triton'",
        _runner_format("gluon", among=("bf16", "fp8")),
    ),
    Rule(
        "deepgemm format",
        "DeepGEMM multiplies FP4 on SM100 only: it asserts so for every grouped GEMM of FP8 rows "
        "and FP4 weights",
        "runner='gluon' or 'triton'",
        _runner_format("deepgemm", among=("mxfp4",)),
    ),
)


_SUPPORTED = frozenset((c.axis, c.name) for c in CHOICES if not c.refused)


def choices(axis: str, *, supported: bool | None = None) -> list[Choice]:
    """The choices of one axis, optionally only the supported or only the refused ones."""
    return [
        c for c in CHOICES if c.axis == axis and (supported is None or supported == (not c.refused))
    ]


def require(axis: str, name: str, *, where: str = "") -> None:
    """Refuse a value that is unknown or refused.

    Raises:
        UnsupportedError: names the axis, the value, the reason and what is supported.
    """
    if (axis, name) in _SUPPORTED:  # asked several times a step
        return
    known = {c.name: c for c in CHOICES if c.axis == axis}
    supported = [c.name for c in known.values() if not c.refused]
    choice = known.get(name)
    if choice is None:
        raise UnsupportedError(
            explain(f"unknown {axis}", where=where, expected=f"one of {supported}", got=name)
        )
    if choice.refused:
        raise UnsupportedError(
            explain(
                f"{axis} '{name}' is refused: {choice.refused}",
                where=where,
                fix=f"use '{choice.nearest}'",
            )
        )


TRANSPORTS_OF = {"cpu": ("threads", "shm", "collective"), "cuda": ("threads", "symm")}
"""Which transports move memory of which device."""


def require_transport(transport: str, device: str, *, where: str) -> None:
    """Refuse an unknown transport or device, or a pair that doesn't go together."""
    require("transport", transport, where=where)
    require("device", device, where=where)
    if transport not in TRANSPORTS_OF[device]:
        raise UnsupportedError(
            explain(
                f"transport '{transport}' doesn't move memory of device '{device}'",
                where=where,
                expected=f"one of {TRANSPORTS_OF[device]}",
                got=transport,
                fix=f"use transport='{TRANSPORTS_OF[device][1]}'",
            )
        )


def check_config(cfg: EPConfig) -> None:
    """Every check of the matrix that a config alone decides; called by its constructor."""
    for axis in ("policy", "weight_format", "runner", "reduction", "route_weight"):
        require(axis, getattr(cfg, axis), where="EPConfig")
    for rule in RULES:
        got = rule.broken(cfg)
        if got is not None:
            raise UnsupportedError(
                explain(rule.reason, where="EPConfig", got=got, fix=f"use {rule.nearest}")
            )


def as_markdown() -> str:
    """The matrix as the docs print it; ``tests/test_support.py`` holds docs/support.md to it."""
    lines = ["| axis | choice | status | note |", "|---|---|---|---|"]
    for c in CHOICES:
        status = f"refused; nearest: `{c.nearest}`" if c.refused else "supported"
        lines.append(f"| {c.axis} | `{c.name}` | {status} | {c.refused or c.note} |")
    lines += ["", "| refused combination | why | nearest supported choice |", "|---|---|---|"]
    lines += [f"| {r.name} | {r.reason} | {r.nearest} |" for r in RULES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")  # noqa: T201
