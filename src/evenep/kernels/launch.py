"""Sizes of launches: programs walk their work in strides, so sizes stay the device's secret."""

from __future__ import annotations

import functools

import torch

INTERPRETER_SMS = 2  # enough that strides are walked


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a GPU."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory one program may use."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 99 << 10))


@functools.cache
def capability_major(device: torch.device) -> int:
    """9 for SM90; 0 in the interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def grid_for(device: torch.device, work: int, *, per_sm: int, sms: int | None) -> tuple[int]:
    """Programs for at most ``work`` pieces on ``sms`` SMs (None: all), ``per_sm`` on each."""
    limit = sm_count(device) if sms is None else max(1, min(sms, sm_count(device)))
    return (max(1, min(work, limit * per_sm)),)
