"""Every test runs with poisoned buffers and checked plans; rank processes inherit both."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before anything does
os.environ["EVENEP_POISON"] = "1"
os.environ["EVENEP_DEBUG"] = "1"

OWN_TARGET = {"slow": "make test-slow", "bench": "make test-slow"}
NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="gpu: needs an NVIDIA GPU; run it with `make test-gpu`"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the command that runs them, tests that the default run has no time for."""
    asked = str(config.getoption("markexpr"))
    for item in items:
        for marker, command in OWN_TARGET.items():
            if item.get_closest_marker(marker) and marker not in asked:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: run it with `{command}`"))
        if item.get_closest_marker("gpu"):
            item.add_marker(NEEDS_GPU)
