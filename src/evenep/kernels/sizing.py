"""Sizes of launches: from what the host knows, never from what the device computed."""

from __future__ import annotations

import functools

import torch

INTERPRETED_SMS = 3  # a CPU has none; with few, interpreted programs take several items each


@functools.cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return _sms(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use."""
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
    limit = num_sms(device) if sms is None else max(1, min(sms, num_sms(device)))
    return (max(1, min(work, limit * per_sm)),)


def pow2(n: int) -> int:
    """The smallest power of two not below ``n``, at least 1. Example: 5 → 8."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, by: int) -> int:
    """Example: 7, 2 → 4."""
    return -(-n // by)


def split_width(width: int, items: int, wanted: int, smallest: int, largest: int) -> int:
    """Elements of a row that one program handles: as many as possible while ``wanted`` programs
    are kept busy by ``items`` rows; a power of two in ``[smallest, largest]``.

    Example: 16 rows of 3584, 264 wanted, 512 … 8192 → 512 (7 programs a row); 2048 rows → 4096.
    """
    block = min(max(pow2(width), smallest), largest)
    while block > smallest and items * ceil_div(width, block) < wanted:
        block //= 2
    return block
