"""One suite for all runners on a GPU: rows in, rows out, and nothing else touched.

Without a GPU those that Triton can interpret run on CPU tensors. N receive rows, G groups.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evenep import Activation, EPConfig, support
from evenep.errors import StateError, UnsupportedError
from evenep.experts.auto_runner import AutoRunner
from evenep.experts.choice import ROWS as TIMED
from evenep.experts.device import DeviceRunner, Groups
from evenep.experts.registry import (
    AUTO,
    DEVICE_RUNNERS,
    device_runner,
    make_device_runner,
    make_runner,
)
from evenep.formats import format_of

from .. import oracle

CUDA = torch.cuda.is_available()
DEV = torch.device("cuda" if CUDA else "cpu")
INTERPRETED = ("triton", "torch")
RUNNERS = [
    name if CUDA or name in INTERPRETED else pytest.param(name, marks=pytest.mark.gpu)
    for name in DEVICE_RUNNERS
]
IN_CLASS = 0.01  # relative L2 of the worst row; one more rounding before a bias makes 0.006
FP8_ROWS = 0.08  # runners that round activations to FP8 too
GROUPS = [(2, 3), (-1, 0), (7, 20), (0, 0), (30, 1)]  # first row, rows
ROWS, BOUND = 34, 27
ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "swiglu_clamp_before": Activation("swiglu_clamp_before", limit=1.0),
    "swiglu_clamp_after": Activation("swiglu_clamp_after", limit=0.7),
    "swigluoai": Activation("swigluoai", alpha=1.702, limit=1.0),
    "situ": Activation.situ(),
    "relu2": Activation("relu2"),
}


def config(runner: str, fmt: str, **changes: object) -> EPConfig:
    """Sizes that divide by as little as the runner's libraries and the format allow."""
    H, I = {"mxfp4": (160, 96), "bf16": (160, 96), "fp8": (160, 128)}[fmt]  # noqa: E741
    if runner in ("deepgemm", "gluon"):
        H, I = 256, 128  # noqa: E741
    sizes: dict[str, object] = {
        "num_experts": 5, "top_k": 2, "hidden_size": H, "intermediate_size": I,
        "max_tokens_per_rank": 8, "weight_format": fmt, "runner": runner,
    }  # fmt: skip
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


def make(cfg: EPConfig) -> DeviceRunner:
    try:
        return make_device_runner(cfg, DEV)
    except UnsupportedError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Problem:
    cfg: EPConfig
    groups: list[tuple[int, int]]
    experts: list[dict[str, Tensor]]  # the format's tensors per group, on the CPU
    rows: Tensor
    weight_N: Tensor

    @staticmethod
    def make(
        cfg: EPConfig, groups: Sequence[tuple[int, int]] = GROUPS, rows: int = ROWS
    ) -> Problem:
        g, form, experts = torch.Generator().manual_seed(0), format_of(cfg), []
        for _ in groups:
            row = {s.name: torch.zeros(s.shape, dtype=s.dtype) for s in form.specs(cfg)}
            form.fill_random(row, g)
            for name in row:
                if name.endswith("bias"):
                    row[name].normal_(generator=g)
            experts.append(row)
        x, weight = (
            torch.full((rows, cfg.hidden_size), float("nan")),
            torch.full((rows,), float("nan")),
        )
        for start, count in groups:
            if count:
                x[start : start + count] = torch.randn(count, cfg.hidden_size, generator=g)
                weight[start : start + count] = torch.rand(count, generator=g) + 0.25
        return Problem(cfg, list(groups), experts, x.bfloat16(), weight)

    def packed(self, runner: DeviceRunner) -> dict[str, Tensor]:
        """The store's tensors ``[G, …]``, packed as the runner keeps them."""
        G = len(self.groups)
        out = {s.name: torch.zeros(G, *s.shape, dtype=s.dtype, device=DEV) for s in runner.specs()}
        for g, expert in enumerate(self.experts):
            tensors = {name: t.to(DEV) for name, t in expert.items()}
            runner.pack(tensors, {name: t[g] for name, t in out.items()})
        return out

    def device_groups(self, runner: DeviceRunner, bound: int | None, likely: int) -> Groups:
        start, count = (
            torch.tensor([group[i] for group in self.groups], dtype=torch.int32, device=DEV)
            for i in (0, 1)
        )
        rows = sum(c for _, c in self.groups) if bound is None else bound
        return Groups(start, count, self.packed(runner), rows, likely)

    def run(
        self,
        runner: DeviceRunner,
        *,
        bound: int | None = BOUND,
        likely: int = 4,
        sms: int | None = None,
    ) -> Tensor:
        groups = self.device_groups(runner, bound, likely)
        runner.reserve(max(groups.rows, 1))
        poison_scratch(runner)
        rows = self.rows.clone().to(DEV)
        runner.run(rows, self.weight_N.to(DEV), groups, sms)
        return rows.cpu()

    def want(self) -> Tensor:
        """Row after row by the definition, fp64 products."""
        cfg, out = self.cfg, self.rows.clone()
        for (start, count), tensors in zip(self.groups, self.experts, strict=True):
            w13, w2 = (w.double() for w in format_of(cfg).decode(tensors, torch.float32))
            for n in range(start, start + count):
                w, z = float(self.weight_N[n]), self.rows[n].float()
                z = oracle.rnd(z * w) if cfg.route_weight == "input" else z
                h = w13 @ z.double()
                h = h + tensors["w13_bias"].double() if cfg.expert_bias else h
                a = oracle.activation(cfg, oracle.rnd(h.float())[None])[0]
                a = oracle.rnd(a * w if cfg.route_weight == "activation" else a)
                o = w2 @ a.double()
                out[n] = (o + tensors["w2_bias"].double() if cfg.expert_bias else o).bfloat16()
        return out

    @property
    def real(self) -> list[int]:
        return [n for start, count in self.groups for n in range(start, start + count)]

    def check(self, got: Tensor) -> None:
        want, real = self.want(), self.real
        outside = [n for n in range(self.rows.shape[0]) if n not in set(real)]
        fp8_rows = self.cfg.runner == "deepgemm" and self.cfg.weight_format == "fp8"
        assert torch.isfinite(got[real]).all()
        assert got[outside].isnan().all(), "a row of no group was written"
        for n in real:
            assert oracle.rel_l2(got[n], want[n]) < (FP8_ROWS if fp8_rows else IN_CLASS), n


def poison_scratch(runner: DeviceRunner) -> None:
    for value in vars(runner).values():
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            value.fill_(float("nan"))


def cases() -> Sequence[object]:
    """Runner and format pairs that the matrix allows."""
    out = []
    for param in RUNNERS:
        name, marks = (param, ()) if isinstance(param, str) else (param.values[0], param.marks)
        for fmt in ("bf16", "mxfp4", "fp8"):
            on_gpu = name != "torch" or fmt == "bf16"
            if fmt in support.RUNNER_FORMATS[str(name)] and on_gpu:
                out.append(pytest.param(name, fmt, marks=marks, id=f"{name}-{fmt}"))
    return out


every_runner = pytest.mark.parametrize(("runner", "fmt"), cases())


@every_runner
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("place", ["output", "activation", "input"])
def test_rows_are_the_definitions(runner: str, fmt: str, place: str, bias: bool) -> None:
    cfg = config(runner, fmt, route_weight=place, expert_bias=bias)
    problem = Problem.make(cfg)
    problem.check(problem.run(make(cfg)))


@every_runner
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_rows_are_the_definitions_for_every_activation(runner: str, fmt: str, kind: str) -> None:
    cfg = config(runner, fmt, activation=ACTIVATIONS[kind])
    problem = Problem.make(cfg, [(0, 2), (5, 1)], rows=7)
    problem.check(problem.run(make(cfg)))


@every_runner
@pytest.mark.parametrize("changes", [
    {"gate_up_order": "up_first"},
    {"gate_up_interleave": 1},
    {"gate_up_order": "up_first", "gate_up_interleave": 8, "expert_bias": True},
], ids=str)  # fmt: skip
def test_rows_are_the_definitions_for_every_layout(
    runner: str, fmt: str, changes: dict[str, object]
) -> None:
    cfg = config(runner, fmt, **changes)
    problem = Problem.make(cfg, [(0, 2), (5, 1)], rows=7)
    problem.check(problem.run(make(cfg)))


@every_runner
def test_odd_groups(runner: str, fmt: str) -> None:
    """One group, all empty but the last, ends that touch, a bound far above, and no rows at all."""
    cfg = config(runner, fmt)
    made = make(cfg)
    for groups, bound in (
        ([(0, 1)], None),
        ([(3, 17)], 17),
        ([(-1, 0), (0, 0), (9, 0), (1, 2)], 40),
        ([(0, 16), (16, 1), (17, 16)], 33),
        ([(-1, 0), (0, 0)], 5),
    ):
        problem = Problem.make(cfg, groups, rows=35)
        problem.check(problem.run(made, bound=bound))
    nothing = Problem.make(cfg, [(0, 0), (5, 0)], rows=8)
    assert nothing.run(made, bound=0).isnan().all()


@every_runner
def test_a_guess_and_a_share_of_the_gpu_change_no_bits(runner: str, fmt: str) -> None:
    cfg = config(runner, fmt)
    problem, made = Problem.make(cfg), make(cfg)
    want = problem.run(made)
    problem.check(want)
    for likely, sms in ((1, None), (1000, 1), (64, 100)) if CUDA else ((20, 1),):
        got = problem.run(made, likely=likely, sms=sms)
        if made.batch_invariant and CUDA:
            assert torch.equal(got[problem.real], want[problem.real])
        problem.check(got)


@every_runner
def test_no_weights_are_needed_where_the_output_takes_them(runner: str, fmt: str) -> None:
    cfg = config(runner, fmt)
    problem, made = Problem.make(cfg), make(cfg)
    rows, groups = problem.rows.clone().to(DEV), problem.device_groups(made, BOUND, 4)
    made.reserve(BOUND)
    made.run(rows, None, groups)
    problem.check(rows.cpu())


@every_runner
def test_scratch_must_be_reserved(runner: str, fmt: str) -> None:
    cfg = config(runner, fmt)
    problem, made = Problem.make(cfg), make(cfg)
    made.reserve(BOUND - 1)
    with pytest.raises(StateError, match="reserve"):
        made.run(problem.rows.to(DEV), None, problem.device_groups(made, BOUND, 4))


@pytest.mark.gpu
@every_runner
def test_a_row_has_the_same_bits_alone_beside_others_and_in_another_group(
    runner: str, fmt: str
) -> None:
    cfg = config(runner, fmt, hidden_size=512, intermediate_size=384, activation=Activation.situ())
    made = make(cfg)
    if not made.batch_invariant:
        pytest.skip("not claimed")
    many = Problem.make(cfg, [(0, 150), (150, 300)], rows=450)
    together = many.run(made, bound=450, likely=256)
    for n in (0, 77, 149):
        alone = Problem(
            cfg, [(0, 0), (1, 1), (-1, 0)], [many.experts[1], many.experts[0], many.experts[1]],
            torch.stack([many.rows[0], many.rows[n]]), many.weight_N[:2],
        )  # fmt: skip
        for bound, likely in ((1, 1), (64, 128)):
            assert torch.equal(alone.run(made, bound=bound, likely=likely)[1], together[n])


@pytest.mark.gpu
@every_runner
def test_a_graph_replays_with_other_groups(runner: str, fmt: str) -> None:
    """Capture with some counts, replay with others: sizes are the device's alone."""
    cfg = config(runner, fmt, route_weight="activation")
    made, first = make(cfg), Problem.make(cfg, [(0, 5), (8, 2)], rows=40)
    groups = first.device_groups(made, 38, 8)
    made.reserve(38)
    rows, weight = first.rows.clone().to(DEV), first.weight_N.clone().to(DEV)
    made.run(rows, weight, groups)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(rows, weight, groups)
    for ranges in ([(0, 5), (8, 2)], [(1, 0), (2, 38)], [(20, 17), (3, 0)], [(0, 0), (0, 0)]):
        other = Problem.make(cfg, ranges, rows=40)
        other = Problem(cfg, ranges, first.experts, other.rows, other.weight_N)
        rows.copy_(other.rows)
        weight.copy_(other.weight_N)
        groups.start_G.copy_(torch.tensor([s for s, _ in ranges]))
        groups.count_G.copy_(torch.tensor([c for _, c in ranges]))
        graph.replay()
        other.check(rows.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 600])
@every_runner
def test_kimi_k3_sizes_are_right(runner: str, fmt: str, rows: int) -> None:
    """3584 x 3072, SiTU: against a product in fp32 on the GPU."""
    cfg = config(
        runner, fmt, hidden_size=3584, intermediate_size=3072, activation=Activation.situ()
    )
    made = make(cfg)
    problem = Problem.make(cfg, [(0, rows), (rows, 0), (rows, 3)], rows=rows + 3)
    got = problem.run(made, bound=rows + 3, likely=rows)
    for g, (start, count) in enumerate(problem.groups):
        if count:
            decoded = format_of(cfg).decode(problem.experts[g], torch.float32)
            w13, w2 = (w.to(DEV) for w in decoded)
            x = problem.rows[start : start + count].to(DEV).float()
            h = oracle.rnd(x @ w13.T).cpu()
            want = oracle.rnd(oracle.activation(cfg, h)).to(DEV) @ w2.T
            limit = FP8_ROWS if (runner, fmt) == ("deepgemm", "fp8") else IN_CLASS
            assert oracle.rel_l2(got[start : start + count], want.cpu()) < limit


# ---- which runner


def test_importing_the_room_needs_no_triton() -> None:
    code = "import sys, evenep, evenep.experts.registry; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4", "fp8"])
def test_auto_is_one_of_those_that_compute_the_format_and_says_why(fmt: str) -> None:
    made = make_device_runner(config("auto", fmt), DEV)
    assert made.name in AUTO[fmt]
    assert fmt in support.RUNNER_FORMATS[made.name]
    assert made.why
    assert made.why != "asked for"
    assert make_device_runner(config("triton", fmt), DEV).why == "asked for"


def test_autos_candidates_keep_experts_in_the_formats_own_layout() -> None:
    cfg = config("auto", "bf16")
    made = make_device_runner(cfg, DEV)
    assert isinstance(made, AutoRunner)
    assert made.specs() == format_of(cfg).specs(cfg)
    for name in made.names:
        cls = device_runner(name)
        assert cls.specs is DeviceRunner.specs, name
        assert cls.pack is DeviceRunner.pack, name


def test_auto_leaves_torch_out_where_rows_are_no_multiple_of_16_bytes() -> None:
    made = make_device_runner(config("auto", "bf16", intermediate_size=33), DEV)
    assert isinstance(made, AutoRunner)
    assert "torch" not in made.candidates
    assert "multiples of 8" in made.refused["torch"]


def test_autos_candidates_are_timed_on_calls_that_work() -> None:
    cfg = config("auto", "bf16", hidden_size=32, intermediate_size=32)
    made = make_device_runner(cfg, DEV)
    assert isinstance(made, AutoRunner)
    timed = 0

    def tick(call: Callable[[], None]) -> int:
        nonlocal timed
        if CUDA or timed % len(TIMED) == 0:  # one row each: the interpreter is slow
            call()
        timed += 1
        return 1600

    tensors = Problem.make(cfg).packed(made)
    table = made.measure({name: t[:1] for name, t in tensors.items()}, tick)
    assert table == dict.fromkeys(made.candidates, (1600,) * len(TIMED))
    assert timed == len(TIMED) * len(made.candidates)


@pytest.mark.parametrize("name", INTERPRETED)
def test_warming_up_runs_each_class_up_to_the_largest_and_touches_no_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(config(name, "bf16"))
    problem = Problem.make(made.cfg, [(0, 0), (3, 0)])
    groups = problem.device_groups(made, BOUND, 1)
    made.reserve(BOUND)
    rows, run = problem.rows.clone().to(DEV), made.run
    seen: list[int] = []

    def noted(rows_NH: Tensor, weight_N: Tensor, groups: Groups, sms: int | None) -> None:
        seen.append(groups.likely)
        run(rows_NH, weight_N, groups, sms)

    monkeypatch.setattr(made, "run", noted)
    for largest, triton_takes in ((1, [1]), (16, [16]), (17, [16, 17]), (300, [16, 32, 64, 128])):
        made.warm_up(rows, problem.weight_N.to(DEV), groups, largest)
        assert seen == (triton_takes if name == "triton" else [1])
        seen.clear()
    assert rows.isnan().all()


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8"])
def test_torch_refuses_quantised_experts_on_a_gpu_and_names_triton(fmt: str) -> None:
    with pytest.raises(UnsupportedError, match="triton"):
        make_device_runner(config("torch", fmt), DEV)


def test_each_side_refuses_the_others_runners() -> None:
    with pytest.raises(UnsupportedError, match="CPU only"):
        make_device_runner(config("reference", "bf16"), DEV)
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        make_runner(config("triton", "bf16"))
