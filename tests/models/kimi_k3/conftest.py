"""Checkpoints shared by the tests of this folder; none of them may be changed in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenep.models.kimi_k3 import CheckpointIndex, write_fixture, write_index

PUBLISHED_CONFIG = Path(__file__).parent / "data" / "config.json"


@pytest.fixture(scope="package", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tiny GEMMs on a busy machine: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def f0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("f0"), "F0")


@pytest.fixture(scope="session")
def f1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("f1"), "F1", layers=(1, 2))


@pytest.fixture(scope="session")
def f2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("f2"), "F2")


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published model's config.json with its index, regenerated; no shards."""
    document = json.loads(PUBLISHED_CONFIG.read_text())
    return write_index(tmp_path_factory.mktemp("published"), document)


@pytest.fixture(scope="session")
def published_index(published: Path) -> CheckpointIndex:
    return CheckpointIndex.open(published)
