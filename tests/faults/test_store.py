"""Patience where it belongs: slow loading is no fault, and a lost store stalls nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from evenep import Engine, EPGroup, ExpertWeights, launch
from evenep.errors import StoreLostError
from evenep.transport.jobstore import JobStore
from evenep.weights.source import Progress

from ..cases import EAGER, Inputs, config


class SlowWeights(ExpertWeights):
    """Random weights that take their time on one rank."""

    def __init__(self, inner: ExpertWeights, pause_s: float) -> None:
        self.cfg, self.layers, self._inner, self._pause_s = (
            inner.cfg, inner.layers, inner, pause_s,
        )  # fmt: skip

    def load(
        self,
        layer: int,
        experts: Sequence[int],
        rows: Sequence[Mapping[str, Tensor]],
        progress: Progress | None = None,
    ) -> None:
        time.sleep(self._pause_s)
        self._inner.load(layer, experts, rows, progress)


def _load_slowly(group: EPGroup) -> int:
    cfg = config(timeout_s=0.5, load_timeout_s=30.0)
    source = SlowWeights(ExpertWeights.random(cfg), 1.5 if group.rank == 1 else 0.0)
    with Engine(cfg, group, source, hardware=EAGER) as engine:
        engine(*Inputs.skewed(cfg, [2, 2, 2]).of(group.rank))
        return len(engine.records)


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_a_rank_that_loads_longer_than_a_steps_deadline_is_waited_for(transport: str) -> None:
    assert launch(_load_slowly, 3, transport) == [1, 1, 1]


HOST = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_whose_host_is_gone_is_a_typed_error_in_time(fate: signal.Signals) -> None:
    import torch.distributed as dist

    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())
            store = JobStore(dist.TCPStore("127.0.0.1", port, is_master=False), patience_s=0.5)
            store.set("here", "1")
            assert store.check("here")
            assert store.get("here") == "1"
            assert store.compare_set("new", "", "a") == "a"
            assert store.compare_set("new", "", "b") == "a"
            os.kill(host.pid, fate)
            start = time.monotonic()
            for _ in range(5):  # only the first call waits
                with pytest.raises(StoreLostError, match="store is gone"):
                    while True:
                        store.check("here")
            assert time.monotonic() - start < 2.0
        finally:
            host.kill()


HAND_MADE = """
import os, signal, sys, time
import torch.distributed as dist
from datetime import timedelta
from evenep import Engine, ExpertWeights
from evenep.errors import PeerError, TransportError
from evenep.group import EPGroup
from tests.cases import EAGER, Inputs, config

rank, port, transport = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=20))
cfg = config(ranks=2, timeout_s=2.0)
inputs = Inputs.skewed(cfg, [3, 3])
engine = Engine(
    cfg, EPGroup(store, rank, 2, transport=transport), ExpertWeights.random(cfg), hardware=EAGER
)
engine(*inputs.of(rank))
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
start = time.monotonic()
try:
    engine(*inputs.of(rank))
except PeerError as error:
    assert error.peer == 0, error
    print("named", type(error).__name__, time.monotonic() - start, flush=True)
try:
    engine.reset()
except TransportError as error:
    print("refused", time.monotonic() - start, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_a_stopped_rank_that_hosts_the_store_is_named_and_nobody_hangs(
    transport: str, tmp_path: Path
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tmp_path / "rank.py"
    script.write_text(HAND_MADE)
    root = Path(__file__).parent.parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(r), str(port), transport],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for r in range(2)
    ]  # fmt: skip
    try:
        out, err = ranks[1].communicate(timeout=40)
        assert "named PeerTimeout" in out, err
        assert "refused" in out, err
        assert float(out.split()[2]) < 4.0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
