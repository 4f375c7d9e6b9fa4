"""A few small steps with every kernel, for ``compute-sanitizer --tool memcheck|racecheck``.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.sanitize

Tensors are allocated one by one (no caching allocator), so that an access past one is seen.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from evenep import ExpertWeights
from tests import oracle
from tests.cases import Inputs, config, launch_at, run_policies, whole
from tests.test_engine import IN_CLASS, POLICIES


def main() -> None:
    """Run, and check what came out."""
    for weight_format, runner, reduction, align in (
        ("mxfp4", "auto", "exact", 1),
        ("bf16", "triton", "compact", 4),
    ):
        cfg = config(
            ranks=2,
            weight_format=weight_format,
            runner=runner,
            reduction=reduction,
            row_alignment=align,
            intermediate_size=128,
            timeout_s=120.0,
        )
        inputs = Inputs.skewed(cfg, [17, 9])
        source = ExpertWeights.random(cfg, seed=1)
        args = (cfg, source, inputs, POLICIES)
        outcomes = launch_at(run_policies, 2, "threads@cuda", args)
        want = oracle.moe(cfg, source, 0, inputs.x, inputs.ids, inputs.weights)
        for policy in POLICIES:
            assert oracle.rel_l2(whole(outcomes, policy), want) < IN_CLASS
        torch.cuda.synchronize()
        print(f"{weight_format} {runner} {reduction}: right")  # noqa: T201


if __name__ == "__main__":
    main()
