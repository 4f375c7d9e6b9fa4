"""Triton's interpreter made to agree with GPUs, for tests whose kernels run on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def round_to_nearest() -> None:
    """fp32 → BF16 to nearest even, subnormals included, as ``cvt.rn.bf16.f32`` does.

    Left to itself the interpreter truncates.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            exact = torch.from_numpy(np.array(values, dtype=np.float32))
            return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.left_shift(values.astype(np.uint32), 16)
        return convert(values, source, target, mode)

    interpreter._convert_float = rounded
