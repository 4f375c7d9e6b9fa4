"""Compiles launches of the MXFP4 kernel for SM90 without a GPU and reads the machine code.

Run as a program it takes JSON on stdin, a list of ``{"tile": {...}, **fields of Gemm}``, and
prints one JSON report per launch. Tests run it in a process of its own, because Triton decides at
import whether it interprets or compiles.

What to look for. An asynchronous HGMMA reads its A registers until a WARPGROUP.DEPBAR that leaves
fewer batches in flight; the compiler doesn't know, so a write to them before is a wrong result.
And where ptxas runs out of registers it waits after every HGMMA, which shows as many more
WARPGROUP instructions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WRITES_NO_REGISTER = ("ST", "BAR", "BRA", "SYNCS", "HGMMA", "WARP", "UTMA", "NOP", "RED")


@dataclass
class Report:
    """Of the main loop: ``hazards`` writes to A registers in flight, ``warpgroup`` instructions,
    ``spills`` loads and stores of local memory, ``per_weight`` instructions a decoded weight."""

    hazards: int
    warpgroup: int
    hgmma: int
    spills: int
    per_weight: float
    shared: int
    seconds: float


def main_loop(sass: str) -> list[str]:
    """Instructions, predicates cut off, of the shortest loop that holds every HGMMA."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if found := re.match(r"^(\.L_\S+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(re.sub(r"^@!?U?P\w+ ", "", found[1]))
    products = [i for i, text in enumerate(code) if text.startswith("HGMMA")]
    loops = []
    for i, text in enumerate(code):
        target = re.search(r"`\((\.L_\S+?)\)", text)
        if text.startswith("BRA") and target:
            start = labels.get(target[1], len(code))
            if start <= products[0] and i >= products[-1]:
                loops.append((i - start, start, i))
    _, start, end = min(loops)
    return code[start : end + 1]


def written(text: str) -> range:
    """Registers an instruction writes."""
    name = text.split()[0]
    target = re.match(r"\S+\s+(R\d+)", text)
    if target is None or name.startswith(WRITES_NO_REGISTER):
        return range(0)
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    first = int(target[1][1:])
    return range(first, first + width)


def hazards(loop: list[str]) -> list[str]:
    """Instructions that write an A register of an HGMMA still in flight; twice round the loop.

    ``gsb0`` ends a batch of HGMMAs, and ``WARPGROUP.DEPBAR.LE gsb0, n`` leaves n batches in flight.
    """
    in_flight: list[set[int]] = [set()]  # batches, the last one still open
    found = []
    for text in loop * 2:
        if text.startswith("HGMMA"):
            a = int(re.findall(r"\bR(\d+)", text)[1])
            in_flight[-1] |= set(range(a, a + 4))
            if "gsb0" in text:
                in_flight.append(set())
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", text):
            closed, left = in_flight[:-1], int(wait[1], 16)
            in_flight = closed[max(0, len(closed) - left) :] + in_flight[-1:]
        elif any(r in batch for batch in in_flight for r in written(text)):
            found.append(text)
    return found


def compiled(fields: dict[str, Any]) -> tuple[Any, Any]:
    """``(gemm, compiled kernel)``: the launch as the product makes it, for an SM90 target."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import compile as compile_source
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    from evenep.kernels import mxfp4_mlp
    from evenep.kernels.mxfp4_gluon import mxfp4_grouped_gemm as kernel
    from evenep.kernels.mxfp4_tiles import Gemm, Tile

    gemm = Gemm(**fields | {"tile": Tile(**fields["tile"])})
    blocks = gemm.NP // 128 * gemm.KP // 64
    words = torch.zeros(1, blocks, 1024, dtype=torch.int32)
    scales = torch.zeros(1, blocks, 64, dtype=torch.int32)
    x = torch.zeros(512, gemm.KP, dtype=torch.bfloat16)
    out = torch.zeros(512, gemm.C, dtype=torch.bfloat16)
    some_G = torch.zeros(gemm.GB, dtype=torch.int32)
    args = (
        *mxfp4_mlp.weight_descriptors(words, scales, gemm.tile),
        *mxfp4_mlp.row_descriptors(x, gemm.tile),
        some_G,
        some_G,
        gemm.GB - 1,
        torch.zeros(512) if gemm.weighted else None,
        torch.zeros(gemm.NP, dtype=torch.bfloat16) if gemm.bias else None,
        some_G[:1],
        16,
        out,
        gemm,
    )
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = mxfp4_mlp.launch_options(gemm)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, rest
    )
    source = GluonASTSource(kernel, signature, constants, attributes)
    return gemm, compile_source(source, target=target, options=parsed.__dict__)


def report(fields: dict[str, Any]) -> Report:
    """Compile one launch and read its main loop."""
    from triton.knobs import nvidia

    began = time.perf_counter()
    gemm, kernel = compiled(fields)
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [nvidia.nvdisasm.path, "-c", str(cubin)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loop = main_loop(sass)
    tile = gemm.tile
    stages = 2 if tile.pipelined else 1
    weights = stages * tile.bn * tile.bk / (32 * tile.warps)
    return Report(
        hazards=len(hazards(loop)),
        warpgroup=sum("WARPGROUP" in text for text in loop),
        hgmma=sum(text.startswith("HGMMA") for text in loop),
        spills=sum(text.startswith(("LDL", "STL")) for text in loop),
        per_weight=len(loop) / weights,
        shared=kernel.metadata.shared,
        seconds=seconds,
    )


if __name__ == "__main__":
    for item in json.load(sys.stdin):
        print(json.dumps(asdict(report(item))), flush=True)  # noqa: T201
