"""Which runners there are: on a CPU, and on a GPU.

GPU runners are named here and imported when one is made: importing this room needs no Triton.
"""

from __future__ import annotations

import functools
import importlib

import torch

from ..config import EPConfig
from ..errors import UnsupportedError, explain
from .auto_runner import AutoRunner
from .device import DeviceRunner
from .reference import ReferenceRunner
from .runner import Runner
from .torch_runner import TorchRunner

RUNNERS: dict[str, type[Runner]] = {"torch": TorchRunner, "reference": ReferenceRunner}

DEVICE_RUNNERS: dict[str, str] = {
    "torch": "grouped_runner:GroupedRunner",
    "triton": "triton_runner:TritonRunner",
    "gluon": "gluon_runner:GluonRunner",
    "deepgemm": "deepgemm_runner:DeepGemmRunner",
}
"""Runners on a GPU: name to ``module:class`` of this room."""


def make_runner(cfg: EPConfig) -> Runner:
    """The runner a config asks for on a CPU; ``auto`` is ``torch``."""
    name = "torch" if cfg.runner == "auto" else cfg.runner
    if name not in RUNNERS:
        raise UnsupportedError(
            explain(f"runner '{name}' needs a GPU", where="cpu", fix="use runner 'torch'")
        )
    return RUNNERS[name](cfg)


def device_runner(name: str) -> type[DeviceRunner]:
    """The class of a GPU runner.

    Raises:
        UnsupportedError: the name runs on CPUs only, or what it needs can't be imported here.
    """
    if name not in DEVICE_RUNNERS:
        raise UnsupportedError(
            explain(f"runner '{name}' runs on a CPU only", fix="use runner 'auto' or 'triton'")
        )
    module, _, cls = DEVICE_RUNNERS[name].partition(":")
    try:
        found: type[DeviceRunner] = getattr(importlib.import_module(f".{module}", __package__), cls)
    except ImportError as error:
        raise UnsupportedError(
            explain(f"runner '{name}' can't be imported: {error}", fix="use runner 'auto'")
        ) from error
    return found


AUTO: dict[str, tuple[str, ...]] = {
    "mxfp4": ("gluon", "triton"),
    "bf16": ("torch", "deepgemm", "triton"),
    "fp8": ("triton",),
}
"""What ``auto`` may be on a GPU, the preferred one first. DeepGEMM's FP8 rounds rows to FP8 too, so
it is only taken when asked for by name."""

_MEASURED = ("bf16",)  # candidates that keep experts in one layout are timed, others aren't
_WHY = {
    "gluon": "decodes MXFP4 beside Hopper's tensor cores",
    "triton": "runs every format on every GPU that Triton compiles for",
}


def make_device_runner(cfg: EPConfig, device: torch.device) -> DeviceRunner:
    """The runner a config asks for on a GPU. ``auto`` on BF16 has candidates yet to be timed.

    Raises:
        UnsupportedError: it can't run this config here; the text has the reason.
    """
    if cfg.runner != "auto":
        return device_runner(cfg.runner)(cfg, device)
    if cfg.weight_format in _MEASURED:
        makers = {
            name: functools.partial(_make, name, cfg, device) for name in AUTO[cfg.weight_format]
        }
        return AutoRunner(cfg, device, makers)
    return _preferred(cfg, device)


def _make(name: str, cfg: EPConfig, device: torch.device) -> DeviceRunner:
    return device_runner(name)(cfg, device)


def _preferred(cfg: EPConfig, device: torch.device) -> DeviceRunner:
    """The first that works; why it is that one stays with it."""
    refused = ""
    *others, last = AUTO[cfg.weight_format]
    for name in others:
        try:
            made = _make(name, cfg, device)
        except UnsupportedError as error:
            refused += f"; not '{name}': {error}"
        else:
            made.why = _WHY[name] + refused
            return made
    made = _make(last, cfg, device)
    made.why = _WHY[last] + refused
    return made
