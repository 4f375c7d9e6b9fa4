"""Which runners there are: on a CPU, and on a GPU.

GPU runners are named here and imported when one is made: importing this room needs no Triton.
"""

from __future__ import annotations

import importlib

import torch

from ..config import EPConfig
from ..errors import UnsupportedError, explain
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


def pick_device_runner(cfg: EPConfig, device: torch.device) -> tuple[str, str]:
    """What ``auto`` means on a GPU: a runner's name, and why."""
    made, why = _make_auto(cfg, device)
    return made.name, why


def make_device_runner(cfg: EPConfig, device: torch.device) -> DeviceRunner:
    """The runner a config asks for on a GPU.

    Raises:
        UnsupportedError: it can't run this config here; the text has the reason.
    """
    if cfg.runner == "auto":
        return _make_auto(cfg, device)[0]
    return device_runner(cfg.runner)(cfg, device)


_PREFERRED = {
    "mxfp4": ("gluon", "decodes MXFP4 beside Hopper's tensor cores"),
    "bf16": ("torch", "torch's grouped GEMM is near this GPU's top"),
}


def _make_auto(cfg: EPConfig, device: torch.device) -> tuple[DeviceRunner, str]:
    """The preferred runner where it works, else ``triton``; the second says why."""
    portable = "runs every format on every GPU that Triton compiles for"
    if cfg.weight_format in _PREFERRED:
        name, why = _PREFERRED[cfg.weight_format]
        try:
            return device_runner(name)(cfg, device), why
        except UnsupportedError as error:
            portable = f"{portable}; not '{name}': {error}"
    return device_runner("triton")(cfg, device), portable
