"""Launches that skip Triton's binding of arguments once a kernel is compiled for their kinds.

Triton looks at every argument of every launch to find the compiled kernel: 17 to 24 µs on a host
that needs 3 µs for the launch itself. What that search depends on is little: a tensor's dtype and
whether it is 16-byte aligned, an integer's range and (unless the kernel says otherwise) whether it
is 1 or divides by 16, and the compile-time constants. Those are the key here.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

_INT32 = 1 << 31


def queue(compiled: Any, programs: int, *args: object) -> None:
    """Launch a compiled kernel on the current stream; tensors are given as addresses."""
    driver = triton.runtime.driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    # As ``compiled[grid](*args)`` does, less the description that it makes for profilers' hooks.
    compiled.run(
        programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args
    )


class FastLaunch:
    """A jitted kernel. Call it with the number of programs, then as the kernel itself.

    Positional arguments are tensors and integers, in the kernel's order; its compile-time
    constants and the launch options come by name.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._known: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
        self._jitted = isinstance(kernel, JITFunction)  # else interpreted
        if self._jitted:
            self._names = [p.name for p in kernel.params]
            self._as_is = [bool(p.do_not_specialize) for p in kernel.params]

    def __call__(self, programs: int, *args: Tensor | int, **named: Any) -> None:
        if not self._jitted:
            self._kernel[(programs,)](*args, **named)
            return
        device = args[0].device.index  # type: ignore[union-attr]
        key: list[object] = [device, *named.values()]
        raw: list[object] = []
        aligned = 1
        for value, as_is in zip(args, self._as_is, strict=False):
            if type(value) is int:
                raw.append(value)
                fits = -_INT32 <= value < _INT32
                key.append(fits if as_is else (fits, value == 1, value % 16 == 0))
            else:
                address = value.data_ptr()  # type: ignore[union-attr]
                raw.append(address)
                aligned = 2 * aligned + (address % 16 == 0)
                key.append(value.dtype)  # type: ignore[union-attr]
        key.append(aligned)
        kind = tuple(key)
        found = self._known.get(kind)
        if found is None:
            compiled = self._kernel[(programs,)](*args, **named)
            if compiled is not None and device is not None:  # else compiled for a GPU elsewhere
                constants = tuple(named[name] for name in self._names[len(args) :])
                self._known[kind] = (compiled, constants)
            return
        queue(found[0], programs, *raw, *found[1])
