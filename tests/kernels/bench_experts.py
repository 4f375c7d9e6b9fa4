"""Time the GPU runners on a layer's experts: ``python bench_experts.py [--runners triton,torch]``.

A line per runner, format and rows per expert: median microseconds of a whole expert layer (both
GEMMs and what lies between), TFLOP/s, and weight bytes read per second. Kimi-K3 sizes by default.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

from evenep import Activation, EPConfig, support
from evenep.errors import UnsupportedError
from evenep.experts.device import DeviceRunner, Groups
from evenep.experts.registry import DEVICE_RUNNERS, make_device_runner
from evenep.formats import format_of

DEV = torch.device("cuda")


def packed_groups(cfg: EPConfig, runner: DeviceRunner, G: int, rows: int) -> Groups:
    """One random expert in every group; bytes are apart, so each is read from memory."""
    form, random = format_of(cfg), torch.Generator().manual_seed(0)
    one = {s.name: torch.zeros(s.shape, dtype=s.dtype) for s in form.specs(cfg)}
    form.fill_random(one, random)
    on_device = {name: t.to(DEV) for name, t in one.items()}
    out = {s.name: torch.zeros(G, *s.shape, dtype=s.dtype, device=DEV) for s in runner.specs()}
    for g in range(G):
        runner.pack(dict(on_device), {name: t[g] for name, t in out.items()})
    count_G = torch.full((G,), rows, dtype=torch.int32, device=DEV)
    start_G = torch.arange(G, dtype=torch.int32, device=DEV) * rows
    return Groups(start_G, count_G, out, G * rows, rows)


def median_us(graph: torch.cuda.CUDAGraph, work: Tensor, fresh: Tensor, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        work.copy_(fresh)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def time_one(cfg: EPConfig, G: int, rows: int, repeats: int) -> str:
    runner = make_device_runner(cfg, DEV)
    groups = packed_groups(cfg, runner, G, rows)
    runner.reserve(groups.rows)
    x = torch.randn(groups.rows, cfg.hidden_size, device=DEV).bfloat16()
    work = x.clone()
    for _ in range(2):
        runner.run(work, None, groups)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.run(work, None, groups)
    us = median_us(graph, work, x, repeats)
    flop = 2 * groups.rows * cfg.hidden_size * (cfg.w13_rows + cfg.intermediate_size)
    read = G * format_of(cfg).expert_bytes(cfg)
    return f"{us:9.1f} us  {flop / us / 1e6:7.1f} TFLOP/s  {read / us / 1e6:5.2f} TB/s of weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runners", default=",".join(DEVICE_RUNNERS))
    parser.add_argument("--formats", default="bf16,mxfp4,fp8")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--experts", type=int, default=56)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    for fmt in args.formats.split(","):
        for name in args.runners.split(","):
            if fmt not in support.RUNNER_FORMATS[name]:
                continue
            for rows in map(int, args.rows.split(",")):
                cfg = EPConfig(
                    num_experts=args.experts, top_k=1, hidden_size=args.hidden,
                    intermediate_size=args.intermediate, max_tokens_per_rank=1,
                    weight_format=fmt, runner=name, activation=Activation.situ(),
                )  # fmt: skip
                try:
                    line = time_one(cfg, args.experts, rows, args.repeats)
                except UnsupportedError as error:
                    print(f"{fmt:6} {name:9} {error}", flush=True)  # noqa: T201
                    break
                print(f"{fmt:6} {name:9} m={rows:<5} {line}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
