"""EPGroup under torchrun: real torch process groups, also of a part of the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evenep import EPGroup
from evenep.errors import BootstrapError, ConfigError, UnsupportedError

SCRIPT = """
import torch, torch.distributed as dist, evenep
from tests.cases import EAGER, Inputs, config
from evenep import Engine, EPGroup, ExpertWeights

def step(group):
    cfg = config(ranks=group.size, reduction="exact", runner="reference")
    inputs = Inputs.skewed(cfg, [6] * group.size)
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        y = engine(*inputs.of(group.rank))
        assert engine.records[-1].imbalance_after < 1.2
    return y

dist.init_process_group("gloo")
rank = dist.get_rank()
auto = EPGroup.from_torch()
assert auto.transport == "shm", auto.transport
assert torch.equal(step(auto), step(EPGroup.from_torch(transport="collective")))
part = dist.new_group([0, 2])
if rank in (0, 2):
    group = EPGroup.from_torch(part)
    assert (group.rank, group.size) == (rank // 2, 2)
    step(group)
else:
    try:
        EPGroup.from_torch(part)
    except evenep.errors.BootstrapError as error:
        assert "isn't in the group" in str(error)
    else:
        raise AssertionError("rank 1 is not a member")
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} done")
"""


def test_from_torch_works_under_torchrun_for_all_and_for_some_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", str(script)]
    done = subprocess.run(
        ["env", f"PYTHONPATH={Path(__file__).parent.parent}", "OMP_NUM_THREADS=1", *command],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(f"rank {r} done" in done.stdout for r in range(3))


def test_from_torch_without_a_process_group_says_what_to_do() -> None:
    with pytest.raises(BootstrapError, match="init_process_group"):
        EPGroup.from_torch()


def test_a_group_refuses_ranks_and_transports_that_do_not_exist() -> None:
    from torch.distributed import HashStore

    with pytest.raises(ConfigError, match="bad rank"):
        EPGroup(HashStore(), 3, 3, transport="threads")
    with pytest.raises(UnsupportedError, match="unknown transport"):
        EPGroup(HashStore(), 0, 1, transport="carrier pigeon")
    with pytest.raises(UnsupportedError, match="symm"):
        EPGroup(HashStore(), 0, 1, transport="symm")
