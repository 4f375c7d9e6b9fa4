"""Compile what launchers launch, for an H200, on a machine without one.

A driver that knows its target and nothing else stands in for CUDA's: launchers run with CPU
tensors, every ``kernel[grid](…)`` compiles with the very sizes it was given, and nothing starts.
To be used in a process of its own, without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class _Target:
    """The part of Triton's driver that compiling asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record() -> list[tuple[str, Any, tuple[Any, ...]]]:
    """From here on launches compile; the list fills with (kernel, compiled, grid)."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Target())
    made: list[tuple[str, Any, tuple[Any, ...]]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        made.append((self.fn.__name__, kernel, grid))
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign, unused-ignore]
    return made


def resources(kernel: Any) -> dict[str, int]:
    """Registers, stack and local bytes of a compiled kernel, by ``cuobjdump``."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def run_alone(module: str, cache: Path) -> str:
    """Run ``python -m module`` without the interpreter; its output."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    env["PYTHONPATH"] = os.pathsep.join([*sys.path, env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
