"""Where weights come from: random ones are pure, given ones are checked by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep import EPConfig, ExpertWeights
from evenep.errors import InputError
from evenep.formats import FORMATS, format_of

from .test_formats import config, empty_row

E = 5


def load(source: ExpertWeights, layer: int, experts: list[int]) -> list[dict[str, Tensor]]:
    rows = [empty_row(source.cfg) for _ in experts]
    source.load(layer, experts, rows)
    return rows


def raw(row: dict[str, Tensor]) -> tuple[bytes, ...]:
    """The very bytes, by name."""
    return tuple(row[name].view(torch.uint8).numpy().tobytes() for name in sorted(row))


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
    st.integers(0, 10**6),
    st.lists(st.integers(0, E - 1), min_size=1, max_size=E, unique=True),
    st.integers(0, 1),
)
def test_random_weights_depend_on_seed_layer_and_expert_alone(
    name: str, bias: bool, seed: int, experts: list[int], layer: int
) -> None:
    cfg = config(weight_format=name, expert_bias=bias, num_experts=E)
    source = ExpertWeights.random(cfg, layers=2, seed=seed)
    load(source, 1 - layer, [0])  # what was asked before doesn't matter
    together = [raw(row) for row in load(source, layer, experts)]
    alone = [raw(load(ExpertWeights.random(cfg, 2, seed), layer, [e])[0]) for e in experts]
    assert together == alone


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_weights_differ_between_seeds_layers_experts_and_tensors(name: str) -> None:
    cfg = config(weight_format=name, expert_bias=True, num_experts=E)
    seen = [
        raw(row)
        for seed in (0, 1)
        for layer in (0, 1)
        for row in load(ExpertWeights.random(cfg, 2, seed), layer, list(range(E)))
    ]
    for tensor in range(len(seen[0])):
        assert len({row[tensor] for row in seen}) == len(seen), sorted(empty_row(cfg))[tensor]


def test_any_64_bit_seed_gives_weights() -> None:
    cfg = config(num_experts=E)
    seeds = (20_261_201, 2**31, 2**32 + 1, 2**63 - 1)
    assert len({raw(load(ExpertWeights.random(cfg, seed=s), 0, [0])[0]) for s in seeds}) == 4


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_weights_are_finite_and_of_useful_size(name: str) -> None:
    cfg = config(weight_format=name, hidden_size=256)
    fmt = format_of(cfg)
    row = load(ExpertWeights.random(cfg), 0, [0])[0]
    fmt.validate(row, "here")
    for matrix in fmt.decode(row, torch.float32):
        gain = float(matrix.square().sum(1).mean().sqrt())  # of a row with unit inputs
        assert 0.4 < gain < 2.5


def test_loading_reports_the_bytes_of_every_expert() -> None:
    cfg = config(weight_format="mxfp4", num_experts=E)
    tensors = {n: torch.zeros(E, *t.shape, dtype=t.dtype) for n, t in empty_row(cfg).items()}
    for source in (ExpertWeights.random(cfg), ExpertWeights.from_tensors(cfg, tensors)):
        heard: list[int] = []
        source.load(0, [1, 4], [empty_row(cfg), empty_row(cfg)], heard.append)
        assert heard == [format_of(cfg).expert_bytes(cfg)] * 2


# ---- from_tensors


def given_tensors(cfg: EPConfig) -> dict[str, Tensor]:
    """Stacked tensors of all experts; expert e's bytes are its random weights'."""
    rows = load(ExpertWeights.random(cfg), 0, list(range(cfg.num_experts)))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_tensors_given_are_the_tensors_loaded(name: str) -> None:
    cfg = config(weight_format=name, expert_bias=True, num_experts=E)
    first, second = given_tensors(cfg), {n: t.flip(0) for n, t in given_tensors(cfg).items()}
    source = ExpertWeights.from_tensors(cfg, [first, second])
    assert source.layers == (0, 1)
    for layer, tensors in enumerate((first, second)):
        for e, row in zip([3, 0], load(source, layer, [3, 0]), strict=True):
            assert raw(row) == raw({n: t[e].clone() for n, t in tensors.items()})
    assert ExpertWeights.from_tensors(cfg, first).layers == (0,)


Spoil = Callable[[dict[str, Tensor]], object]
BAD_TENSORS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "missing": (lambda t: t.pop("w2_scale"), ("wrong tensor names", "w2_scale", "mxfp4")),
    "extra": (lambda t: t.update(w13=t["w2_scale"]), ("wrong tensor names", "'w13'")),
    "a bias nobody asked for": (lambda t: t.update(w2_bias=t["w2_scale"]), ("w2_bias",)),
    "too few experts": (
        lambda t: t.update(w13_packed=t["w13_packed"][:-1]),
        ("wrong tensor w13_packed", "(5, 256, 32)", "(4, 256, 32)"),
    ),
    "transposed": (
        lambda t: t.update(w2_packed=t["w2_packed"].transpose(1, 2)),
        ("wrong tensor w2_packed", "(5, 64, 64)"),
    ),
    "wrong dtype": (
        lambda t: t.update(w13_scale=t["w13_scale"].to(torch.int8)),
        ("wrong tensor w13_scale", "torch.uint8", "torch.int8"),
    ),
    "NaN scale": (
        lambda t: t["w13_scale"][4, 7, 1].fill_(255),
        ("w13_scale", "expert 4", "255"),
    ),
    "overflowing scale": (lambda t: t["w2_scale"][2].fill_(253), ("w2_scale", "expert 2", "253")),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_wrong_tensor_is_refused_by_name_layer_and_reason(name: str) -> None:
    spoil, words = BAD_TENSORS[name]
    if name == "transposed":
        cfg = config(weight_format="mxfp4", num_experts=E, intermediate_size=256)
        words = ("wrong tensor w2_packed", "(5, 64, 128)", "(5, 128, 64)")
    else:
        cfg = config(weight_format="mxfp4", num_experts=E)
    good, bad = given_tensors(cfg), given_tensors(cfg)
    spoil(bad)
    with pytest.raises(InputError) as caught:
        ExpertWeights.from_tensors(cfg, [good, bad])
    for word in (*words, "layer 1"):
        assert word in str(caught.value), name
