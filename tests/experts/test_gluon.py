"""The Gluon runner: right against fp32 on decoded weights, and the same bits however it is cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from evenep import Activation, EPConfig
from evenep.errors import StateError, UnsupportedError
from evenep.experts.device import Groups
from evenep.experts.gluon_runner import GluonRunner
from evenep.formats import format_of
from evenep.kernels.mxfp4_tiles import SMALL, SMALL_SPREAD, TILES, Tile

from .. import oracle

gpu = pytest.mark.gpu
IN_CLASS = 5e-3  # relative L2; two BF16 roundings that may fall the other way
GAP = 3
KINDS = [
    Activation("swiglu"),
    Activation("swiglu_clamp_before", limit=0.7),
    Activation("swiglu_clamp_after", limit=0.4),
    Activation("swigluoai", alpha=1.702, limit=0.7),
    Activation.situ(beta=1.5, linear_beta=2.0),
    Activation("relu2"),
]
CUTS = [
    *TILES.values(),
    SMALL_SPREAD,
    dataclasses.replace(SMALL, exact=True),
    Tile(8, 64, 256, 4, pipelined=False, warps=4, ctas=3, registers=80),
    Tile(8, 64, 128, 8, pipelined=False, warps=4, ctas=3, registers=80, exact=True),
    Tile(16, 128, 128, 6, pipelined=False, warps=4, ctas=1),
    Tile(64, 256, 128, 5, pipelined=True, warps=8, ctas=1),
    Tile(64, 256, 64, 10, pipelined=True, warps=8, ctas=1),
    Tile(128, 128, 128, 5, pipelined=True, warps=8, ctas=1),
    Tile(128, 128, 64, 9, pipelined=True, warps=8, ctas=1),
    Tile(256, 128, 64, 5, pipelined=True, warps=8, ctas=1),
]


def config(**changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 160,
        "intermediate_size": 96,
        "max_tokens_per_rank": 8,
        "weight_format": "mxfp4",
        "activation": Activation.situ(),
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


@dataclass
class Problem:
    """Experts of a rank, and rows of them with gaps between; all on the GPU."""

    cfg: EPConfig
    runner: GluonRunner
    experts: list[dict[str, Tensor]]
    packed: dict[str, Tensor]
    start_G: Tensor
    count_G: Tensor
    rows: Tensor
    weight_N: Tensor

    @staticmethod
    def make(cfg: EPConfig, counts: list[int], seed: int = 0) -> Problem:
        device = torch.device("cuda")
        g = torch.Generator().manual_seed(seed)
        runner = GluonRunner(cfg, device)
        packed = {
            s.name: torch.zeros(len(counts), *s.shape, dtype=s.dtype, device=device)
            for s in runner.specs()
        }
        experts = []
        for e in range(len(counts)):
            one = {s.name: torch.empty(s.shape, dtype=s.dtype) for s in format_of(cfg).specs(cfg)}
            format_of(cfg).fill_random(one, g)
            for name in one:
                if name.endswith("_bias"):
                    one[name].copy_(torch.randn(one[name].shape, generator=g) * 0.3)
            experts.append({name: t.to(device) for name, t in one.items()})
            runner.pack(experts[-1], {name: t[e] for name, t in packed.items()})
        starts, end = [], GAP
        for count in counts:
            starts.append(end)
            end += count + GAP
        rows = torch.full((end, cfg.hidden_size), float("nan")).bfloat16()
        weight_N = torch.full((end,), float("nan"))
        for start, count in zip(starts, counts, strict=True):
            span = slice(start, start + count)
            rows[span] = torch.randn(count, cfg.hidden_size, generator=g).bfloat16()
            weight_N[span] = torch.rand(count, generator=g) + 0.25
        # Where a group is empty its start may be anything.
        starts = [s if c else -7777 for s, c in zip(starts, counts, strict=True)]
        runner.reserve(max(1, sum(counts)))
        ints = {"dtype": torch.int32, "device": device}
        return Problem(
            cfg,
            runner,
            experts,
            packed,
            torch.tensor(starts, **ints),  # type: ignore[arg-type]
            torch.tensor(counts, **ints),  # type: ignore[arg-type]
            rows.to(device),
            weight_N.to(device),
        )

    def groups(self, likely: int = 8, rows: int | None = None) -> Groups:
        bound = self.runner._scratch_MI.shape[0] if rows is None else rows
        return Groups(self.start_G, self.count_G, self.packed, bound, likely)

    def run(
        self,
        likely: int = 8,
        tile: Tile | None = None,
        sms: int | None = None,
        rows: Tensor | None = None,
        busy: Tensor | None = None,
    ) -> Tensor:
        out = (self.rows if rows is None else rows).clone()
        self.runner._scratch_MI.fill_(float("nan"))
        self.runner.tiles = (tile, tile) if tile else None
        groups = dataclasses.replace(self.groups(likely), busy=busy)
        self.runner.run(out, self.weight_N, groups, sms)
        torch.cuda.synchronize()
        return out

    def spans(self) -> list[tuple[int, slice]]:
        pairs = zip(self.start_G.tolist(), self.count_G.tolist(), strict=True)
        return [(e, slice(s, s + c)) for e, (s, c) in enumerate(pairs) if c]

    def want(self) -> Tensor:
        """fp64 products of decoded weights, with the house's rounding points."""
        cfg, out = self.cfg, self.rows.cpu().clone()
        for e, span in self.spans():
            t = {name: tensor.cpu() for name, tensor in self.experts[e].items()}
            w13, w2 = (w.double() for w in format_of(cfg).decode(t, torch.float32))
            w = self.weight_N.cpu()[span, None]
            z = self.rows.cpu()[span].float()
            z = oracle.rnd(z * w) if cfg.route_weight == "input" else z
            h = z.double() @ w13.T
            h = h + t["w13_bias"].double() if cfg.expert_bias else h
            a = oracle.activation(cfg, oracle.rnd(h.float()))
            a = oracle.rnd(a * w if cfg.route_weight == "activation" else a)
            o = a.double() @ w2.T
            o = o + t["w2_bias"].double() if cfg.expert_bias else o
            out[span] = o.bfloat16()
        return out

    def check(self, got: Tensor, want: Tensor) -> None:
        got = got.cpu()
        outside = torch.ones(got.shape[0], dtype=torch.bool)
        for e, span in self.spans():
            outside[span] = False
            assert torch.isfinite(got[span]).all(), f"group {e}"
            assert oracle.rel_l2(got[span], want[span]) < IN_CLASS, f"group {e}"
        same = bits(got[outside]) == bits(self.rows.cpu()[outside])
        assert same.all(), "a row outside the groups was written"


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)


@gpu
@pytest.mark.parametrize(
    "counts",
    [[0, 1, 3, 4, 16, 17], [64, 0, 100], [0, 256, 300, 0, 2, 0], [0, 0, 0], [5]],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(160, 96), (512, 384), (32, 32), (1312, 1056)], ids=str)
def test_rows_match_the_oracle_for_every_hint(sizes: tuple[int, int], counts: list[int]) -> None:
    problem = Problem.make(config(hidden_size=sizes[0], intermediate_size=sizes[1]), counts)
    want = problem.want()
    for likely in (1, 8, 16, 32, 64, 128, 1000):
        problem.check(problem.run(likely), want)


@gpu
@pytest.mark.parametrize("tile", CUTS, ids=str)
def test_every_tile_matches_the_oracle(tile: Tile) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 768}
    problem = Problem.make(config(**sizes), [1, 2, 0, 3, 4, 8, 70, 129])
    problem.check(problem.run(tile=tile), problem.want())


@gpu
@pytest.mark.parametrize("act", KINDS, ids=lambda act: act.kind)
@pytest.mark.parametrize("place", ["output", "activation", "input"])
def test_activations_and_route_weights(act: Activation, place: str) -> None:
    for bias, likely in ((False, 8), (True, 64)):  # every kernel takes about a second to compile
        cfg = config(activation=act, route_weight=place, expert_bias=bias)
        problem = Problem.make(cfg, [3, 0, 40])
        problem.check(problem.run(likely), problem.want())


@gpu
@pytest.mark.parametrize("order", ["gate_first", "up_first"])
@pytest.mark.parametrize("interleave", [0, 1, 8])
def test_orders_of_gate_and_up(order: str, interleave: int) -> None:
    problem = Problem.make(config(gate_up_order=order, gate_up_interleave=interleave), [3, 0, 9])
    problem.check(problem.run(), problem.want())


@gpu
def test_activations_are_accurate_and_keep_nan_at_extreme_inputs() -> None:
    """Rows whose single column picks h: tiny, huge and NaN gates and ups."""
    for act in KINDS:
        problem = Problem.make(config(activation=act), [7])
        rows = problem.rows.clone()
        for n, scale in enumerate((0.0, 1e-6, 1e-3, 1.0, 30.0, 3000.0, float("nan"))):
            rows[GAP + n] = problem.rows[GAP] * scale
        problem.rows = rows
        got, want = problem.run()[GAP : GAP + 7].cpu(), problem.want()[GAP : GAP + 7]
        for n in range(6):
            assert oracle.rel_l2(got[n], want[n]) < 2 * IN_CLASS, (act.kind, n)
        assert got[6].isnan().all(), act.kind


@gpu
def test_a_row_has_the_same_bits_in_every_tile_slot_and_company() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 768}
    problem = Problem.make(config(**sizes), [1, 0, 5, 33, 140])
    first = problem.run(tile=SMALL)
    for tile in CUTS:
        for sms in (None, 7):
            assert torch.equal(bits(problem.run(tile=tile, sms=sms)), bits(first)), (tile, sms)
    # Alone: every other row becomes NaN.
    _, span = problem.spans()[2]
    n = span.start + 17
    for tile in CUTS:
        rows = torch.full_like(problem.rows, float("nan"))
        rows[n] = problem.rows[n]
        assert torch.equal(bits(problem.run(tile=tile, rows=rows)[n]), bits(first[n])), tile
    # Another slot, among other rows: the last group's expert serves the first group.
    moved = Problem.make(config(**sizes), [4, 1, 2, 3, 0])
    for name, tensor in moved.packed.items():
        tensor[0].copy_(problem.packed[name][4])
    last = problem.spans()[-1][1]
    moved.rows[GAP : GAP + 4] = problem.rows[last.start + 50 : last.start + 54]
    got = moved.run()[GAP : GAP + 4]
    assert torch.equal(bits(got), bits(first[last.start + 50 : last.start + 54]))


@gpu
def test_sms_are_left_where_the_device_says_that_a_fetch_is_under_way() -> None:
    problem = Problem.make(config(hidden_size=1024, intermediate_size=768), [1, 0, 5, 33, 140])
    first = problem.run()
    for moving in (0, 1, 3):
        busy = torch.tensor([moving], dtype=torch.int32, device="cuda")
        for sms in (1, 7, 124):
            assert torch.equal(bits(problem.run(sms=sms, busy=busy)), bits(first)), (moving, sms)


@gpu
def test_runs_repeat_bit_for_bit_with_and_without_overlap() -> None:
    problem = Problem.make(config(hidden_size=1024, intermediate_size=3072), [9, 0, 65, 2, 2, 1])
    for likely in (8, 16, 64):
        first = problem.run(likely)
        for i in range(20):
            problem.runner._mlp.overlap = bool(i % 2)
            assert torch.equal(bits(problem.run(likely)), bits(first))


@gpu
@pytest.mark.parametrize("likely", [8, 32, 128])
def test_a_captured_graph_follows_counts_changed_in_place(likely: int) -> None:
    problem = Problem.make(config(hidden_size=512, intermediate_size=384), [30, 30, 30, 30])
    runner, rows = problem.runner, problem.rows.clone()
    groups = problem.groups(likely)
    runner.run(rows, problem.weight_N, groups)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.run(rows, problem.weight_N, groups)
    starts = problem.start_G.tolist()
    for counts in ([30, 0, 17, 1], [0, 0, 0, 0], [1, 30, 2, 29], [30, 30, 30, 30]):
        problem.count_G.copy_(torch.tensor(counts))
        problem.start_G.copy_(torch.tensor([s if c else -1 for s, c in zip(starts, counts)]))  # noqa: B905
        rows.copy_(problem.rows)
        graph.replay()
        torch.cuda.synchronize()
        problem.check(rows, problem.want())
        assert torch.equal(bits(rows), bits(problem.run(likely)))


@gpu
def test_many_groups_of_few_rows() -> None:
    counts = [(7 * g) % 5 for g in range(200)]
    problem = Problem.make(config(num_experts=200), counts)
    problem.check(problem.run(), problem.want())


@gpu
def test_no_rows_on_the_host_or_on_the_device_is_no_work() -> None:
    problem = Problem.make(config(), [0, 0])
    assert torch.equal(bits(problem.run()), bits(problem.rows))
    rows = problem.rows.clone()
    problem.runner.run(rows, None, problem.groups(rows=0))
    torch.cuda.synchronize()
    assert torch.equal(bits(rows), bits(problem.rows))


@gpu
def test_more_rows_than_reserved_are_refused() -> None:
    problem = Problem.make(config(), [4])
    with pytest.raises(StateError, match="reserve"):
        problem.runner.run(problem.rows, None, problem.groups(rows=5))


@gpu
def test_packing_on_the_gpu_gives_the_cpus_words() -> None:
    problem = Problem.make(config(hidden_size=512, intermediate_size=384), [1])
    from evenep.experts.gluon_runner import pack_expert

    experts = {name: t.cpu() for name, t in problem.experts[0].items()}
    out = {name: torch.empty_like(t[0], device="cpu") for name, t in problem.packed.items()}
    pack_expert(experts, out, problem.runner._order_W.cpu())
    for name, tensor in problem.packed.items():
        assert torch.equal(tensor[0].cpu(), out[name]), name


@gpu
def test_k3_shape() -> None:
    sizes = {"hidden_size": 3584, "intermediate_size": 3072}
    problem = Problem.make(config(**sizes), [1, 0, 20, 130])
    want, first = problem.want(), None
    for likely in (1, 16, 32, 64, 128):
        got = problem.run(likely)
        problem.check(got, want)
        first = got if first is None else first
        assert torch.equal(bits(got), bits(first))


def test_it_is_refused_without_a_hopper_gpu_and_names_the_next_best() -> None:
    with pytest.raises(UnsupportedError, match=r"not 'cpu'.*runner='triton'"):
        GluonRunner(config(), torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"not 'bf16'.*runner='triton'"):
        GluonRunner(config(weight_format="bf16"), torch.device("cpu"))
