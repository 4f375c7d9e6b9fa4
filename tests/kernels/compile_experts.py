"""Compile the expert kernels for GPUs that need not be here: ``python compile_experts.py 90``.

Prints a line per kernel: what it was compiled for, registers, spills, shared bytes, instructions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evenep import Activation
from evenep.kernels.activation import _activate, act_constants
from evenep.kernels.group_rows import _copy_rows
from evenep.kernels.group_tiles import _group_tiles
from evenep.kernels.grouped_gemm import _down, _gate_up, config_for, stages_for
from evenep.kernels.quantize import _quantize_rows

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a program may use
TYPES = {
    "rows_NH": "*bf16", "x_MH": "*bf16", "a_MI": "*bf16", "h_MW": "*bf16", "bias_GW": "*bf16",
    "bias_GH": "*bf16", "weight_N": "*fp32", "table_T4": "*i32", "total_1": "*i32",
    "start_G": "*i32", "count_G": "*i32", "ends_G": "*i32",
}  # fmt: skip

# Name, kernel, constants, types, warps, stages.
Launch = tuple[str, Any, Mapping[str, object], Mapping[str, str], int, int]


def compile_one(
    kernel: Any,
    arch: int,
    constants: Mapping[str, object],
    types: Mapping[str, str],
    warps: int = 4,
    stages: int = 3,
) -> Any:
    types = {**TYPES, **types}
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, "i32")
        if name not in ("table_T4", "total_1", "ends_G", "G", "T"):  # as launches specialise them
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(compiled: Any) -> str:
    """Registers and spills, as cuobjdump reads them from the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout)
    regs, stack = found.groups() if found else ("?", "?")
    ptx = compiled.asm["ptx"]
    dots = {
        name: len(re.findall(rf"\b{name}", ptx))
        for name in ("wgmma.mma", "mma.sync", "tcgen05.mma")
    }
    return f"regs={regs} stack={stack} shared={compiled.metadata.shared} " + " ".join(
        f"{name}={n}" for name, n in dots.items() if n
    )


def gemms(arch: int) -> Iterator[Launch]:
    for fmt in ("bf16", "mxfp4", "fp8"):
        types = {"w_GWK": "*u8", "w_GHK": "*u8", "s_G": "*fp32" if fmt == "fp8" else "*u8"}
        if fmt == "bf16":
            types |= {"w_GWK": "*bf16", "w_GHK": "*bf16"}
        for likely in (1, 32, 64, 1024):
            config = config_for(fmt, likely)
            stages = stages_for(config, fmt, SHARED[arch])
            common = {
                "FORMAT": fmt, "HAS_BIAS": False, "K_TAIL": False, "BM": config.block_m,
                "BK": config.block_k, "SWIZZLE": 8,
            }  # fmt: skip
            absent = {"bias_GW": None, "weight_N": None} | ({"s_G": None} if fmt == "bf16" else {})
            act = act_constants(Activation.situ(), "gate_first", 0)
            sizes = {"H": 3584, "I": 3072, "W": 6144, "WEIGH": "output", "BN": config.block_n // 2}
            yield (f"gate_up {fmt} m={config.block_m}", _gate_up, common | absent | act | sizes,
                   types, config.warps, stages)  # fmt: skip
            absent = {"bias_GH": None} | ({"s_G": None} if fmt == "bf16" else {})
            sizes = {"H": 3584, "I": 3072, "BN": config.block_n}
            yield (f"down {fmt} m={config.block_m}", _down, common | absent | sizes,
                   types, config.warps, stages)  # fmt: skip
        # Everything optional at once, sizes that divide by nothing.
        odd = {
            "FORMAT": fmt, "HAS_BIAS": True, "K_TAIL": True, "BM": 16, "BK": config.block_k,
            "SWIZZLE": 8, "H": 160, "I": 96, "W": 192, "WEIGH": "input", "BN": 64,
        } | act_constants(Activation("swigluoai", alpha=1.7, limit=7.0), "up_first", 8)  # fmt: skip
        yield f"gate_up {fmt} odd", _gate_up, odd, types, 4, 1 if arch >= 100 else 3


def others(arch: int) -> Iterator[Launch]:
    sizes = {"BLOCK": 16, "ALIGN": 1, "BLOCK_G": 128, "BLOCK_T": 32}
    yield "tiles", _group_tiles, sizes, {}, 4, 3
    for gather in (True, False):
        copy = {"GATHER": gather, "HAS_EXTRA": True, "BLOCK": 16, "BLOCK_H": 512}
        types = {"extra": "*fp32" if gather else "*bf16"}
        yield f"rows gather={gather}", _copy_rows, copy, types, 4, 3
    constants: dict[str, object] = {"BLOCK": 16, "GROUP": 128, "LARGEST": 448.0, "SMALLEST": 1e-4}
    types = {"x_MK": "*bf16", "q_MK": "*fp8e4nv", "scale_MQ": "*fp32"}
    if arch >= 90:
        yield "quantize", _quantize_rows, constants, types, 4, 3
    for act in (
        Activation("swiglu"),
        Activation("swiglu_clamp_before", limit=7.0),
        Activation("swiglu_clamp_after", limit=7.0),
        Activation("swigluoai", alpha=1.702, limit=7.0),
        Activation.situ(),
        Activation("relu2"),
    ):
        constants = act_constants(act, "gate_first", 0 if act.kind == "relu2" else 8)
        constants |= {"HAS_WEIGHT": True, "HAS_BIAS": True, "BLOCK": 16, "BLOCK_I": 128}
        yield f"activate {act.kind}", _activate, constants, {}, 4, 3


def main(arch: int, only: str = "") -> None:
    for name, kernel, constants, types, warps, stages in (*gemms(arch), *others(arch)):
        if only not in name:
            continue
        names = set(kernel.arg_names)
        constants = {key: value for key, value in constants.items() if key in names}
        compiled = compile_one(kernel, arch, constants, types, warps, stages)
        assert compiled.metadata.shared <= SHARED[arch], f"{name}: {compiled.metadata.shared} bytes"
        print(f"sm_{arch} {name}: stages={stages} {resources(compiled)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:3])
