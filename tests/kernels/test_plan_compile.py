"""Every planner kernel compiles for sm_90, at every size class and mode a config can ask for.

The interpreter accepts what the compiler refuses, so this runs without the interpreter, in a
process of its own; no GPU is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The planner itself says which kernels it launches with which arguments; only the launch is caught.
SCRIPT = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from evenep.device import planner as P
from evenep.plan import Hardware, Placement
from tests.plan.plan_cases import config
import numpy as np

TYPES = {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}

class Catch:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, num_warps):
            names, signature, constants = self.kernel.arg_names, {}, {}
            attrs = {}
            for i, (name, value) in enumerate(zip(names, args, strict=True)):
                if isinstance(value, torch.Tensor):
                    signature[name] = TYPES[value.dtype]
                    attrs[(i,)] = [["tt.divisibility", 16]]
                elif name == "counts_stride":
                    signature[name] = "i32"
                else:
                    signature[name], constants[name] = "constexpr", value
            source = ASTSource(self.kernel, signature, constants, attrs)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                                  options={"num_warps": num_warps})
            text = made.asm["ptx"]
            sys.stdout.write(f"{self.kernel.__name__} {len(text)} {made.metadata.shared}\\n")
        return launch

for name in [n for n in dir(P) if n.endswith("_kernel")]:
    setattr(P, name, Catch(getattr(P, name)))
for R, E, B, policies in eval(sys.argv[1]):
    counts = np.ones((R, E), dtype=np.int64)
    cfg = config(counts, slots=B, align=128)
    planner = P.DevicePlanner(cfg, Placement.contiguous(E, R), 0, Hardware(1, 1, 1, 1),
                              torch.device("cpu"))
    for policy in policies:
        planner.plan(torch.ones(R, E, dtype=torch.int32), planner.residency(), policy,
                     planner.buffers())
"""

EVERY = ["static", "bounded", "exact", "auto"]


def compile_at(sizes: list[tuple[int, int, int, list[str]]]) -> str:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(sizes)],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "sizes",
    [
        [(8, 896, 14, EVERY)],
        [(64, 896, 14, ["auto"]), (5, 7, 0, EVERY)],
        [(3, 7, 2, ["auto"]), (1, 40, 0, ["auto"])],
    ],
    ids=["R8", "R64", "small"],
)
def test_kernels_compile_for_hopper(sizes: list[tuple[int, int, int, list[str]]]) -> None:
    pytest.importorskip("triton")
    assert "plan_runs_kernel" in compile_at(sizes)
