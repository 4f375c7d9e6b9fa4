"""Triton's interpreter truncates to BF16; kernels are tested with the rounding that GPUs do."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import round_to_nearest


@pytest.fixture(autouse=True, scope="session")
def interpreter_rounds_to_nearest() -> None:
    if not torch.cuda.is_available():
        round_to_nearest()
