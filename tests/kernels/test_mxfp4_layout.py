"""The packed words hold every code and scale, and the kernel's own arithmetic finds them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep import Activation, EPConfig
from evenep.errors import InputError
from evenep.experts import gluon_runner
from evenep.experts.activations import split_gate_up
from evenep.formats.mxfp4 import decode_mxfp4
from evenep.kernels import mxfp4_layout as layout


def random_matrix(N: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (N, K // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 129, (N, K // 32), generator=g, dtype=torch.uint8)
    return packed, scale


def pack(packed: Tensor, scale: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    N, K = packed.shape[0], packed.shape[1] * 2
    words = torch.full(layout.word_shape(N, K), -7777, dtype=torch.int32)
    scales = torch.full(layout.scale_shape(N, K), -7777, dtype=torch.int32)
    layout.pack_matrix(packed, scale, words, scales, order)
    return words, scales


def config(**changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": 2,
        "top_k": 1,
        "hidden_size": 160,
        "intermediate_size": 96,
        "max_tokens_per_rank": 8,
        "weight_format": "mxfp4",
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("N", "K"), [(1, 32), (128, 256), (160, 96), (129, 288), (7, 512), (384, 3584)]
)
def test_unpacking_gives_back_every_byte(N: int, K: int) -> None:
    packed, scale = random_matrix(N, K)
    words, scales = pack(packed, scale)
    again, again_scale = layout.unpack_matrix(words, scales, N, K)
    assert torch.equal(again, packed)
    assert torch.equal(again_scale, scale)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**31))
def test_unpacking_gives_back_any_shape(N: int, groups: int, seed: int) -> None:
    packed, scale = random_matrix(N, 32 * groups, seed)
    words, scales = pack(packed, scale)
    again, again_scale = layout.unpack_matrix(words, scales, N, 32 * groups)
    assert torch.equal(again, packed)
    assert torch.equal(again_scale, scale)


def test_packing_in_chunks_gives_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, scale = random_matrix(700, 512)
    whole = pack(packed, scale)
    monkeypatch.setattr(layout, "_CHUNK_BYTES", 1)
    assert all(map(torch.equal, whole, pack(packed, scale)))


def test_every_pair_of_codes_survives_at_every_place_of_a_word() -> None:
    byte = torch.arange(256, dtype=torch.int32)
    for r in range(4):
        for other in (0x00000000, -1, 0x5A5A5A5A):
            v = (byte << (8 * r)) | (other & ~(255 << (8 * r)))
            assert torch.equal(layout.decode_words(layout.encode_words(v)), v)


def test_every_scale_byte_survives_beside_every_other() -> None:
    byte = torch.arange(layout.TOP_SCALE + 1, dtype=torch.int32)
    pairs = torch.cartesian_prod(byte, byte)
    for rows in ((pairs, pairs), (pairs, pairs.flip(0)), (pairs.flip(1), pairs)):
        b = torch.stack(rows, dim=-2)
        assert torch.equal(layout.decode_scales(layout.encode_scales(b)), b)


def test_the_docstrings_worked_example() -> None:
    q = layout.encode_words(torch.tensor([0x87436521 - (1 << 32)], dtype=torch.int32))
    assert int(q) == 0x2CA63045
    assert int(q) & 0x81C081C0 == 0x00800040
    b = torch.tensor([[127, 128], [120, 121]], dtype=torch.int32)
    assert int(layout.encode_scales(b)) == 0x7F7BFEFB


def test_a_word_times_its_scale_is_the_weight_in_bf16() -> None:
    """The kernel's arithmetic by hand: mask, then one BF16 product with 2^(b - 1)."""
    packed, scale = random_matrix(128, 256)
    want = decode_mxfp4(packed, scale, torch.bfloat16)
    words, scales = pack(packed, scale)
    q = words[0].view(4, 8, 8, 4, 4)  # block, tile, g, q, step
    s = scales[0].view(4, 8, 8)
    mask = 0x81C081C0 - (1 << 32)
    factor = (s & 0x7F807F80).contiguous().view(torch.bfloat16).view(4, 8, 8, 2)
    code = (q & mask).contiguous().view(torch.bfloat16).view(4, 8, 8, 4, 4, 2)
    by_step = factor.double().repeat_interleave(2, dim=-1)[:, :, :, None, :, None]
    got = (code.double() * by_step).bfloat16()  # register 0: row g, columns 2 q, 2 q + 1
    rows = want.view(8, 2, 8, 4, 4, 2, 4, 2)[:, 0, :, :, :, 0]  # tile, g, block, step, q, pair
    assert torch.equal(got, rows.permute(2, 0, 1, 4, 3, 5))


def test_padding_is_zero_codes_and_zero_scales() -> None:
    packed, scale = random_matrix(160, 96)
    words, scales = pack(packed, scale)
    whole, whole_scale = layout.unpack_matrix(words, scales, 256, 256)
    assert torch.equal(whole[:160, :48], packed)
    assert not whole[160:].any()
    assert not whole[:, 48:].any()
    assert not whole_scale[160:].any()
    assert not whole_scale[:, 3:].any()


@pytest.mark.parametrize("order", ["gate_first", "up_first"])
@pytest.mark.parametrize("interleave", [0, 1, 8])
def test_gates_and_their_ups_end_up_eight_rows_apart(order: str, interleave: int) -> None:
    cfg = config(gate_up_order=order, gate_up_interleave=interleave)
    FFN = cfg.intermediate_size
    rows = torch.arange(2 * FFN)
    gate, up = split_gate_up(rows[None], order, interleave)
    packed = layout.row_order(FFN, cfg.act, order, interleave)
    tiles = packed.view(-1, 2, 8)
    assert torch.equal(tiles[:, 0].flatten(), gate[0])
    assert torch.equal(tiles[:, 1].flatten(), up[0])
    assert torch.equal(packed.sort().values, rows)


def test_relu2_has_no_pairs_to_bring_together() -> None:
    assert torch.equal(layout.row_order(96, Activation("relu2"), "gate_first", 0), torch.arange(96))


@pytest.mark.parametrize(
    "changes",
    [{}, {"gate_up_order": "up_first", "gate_up_interleave": 1}, {"activation": "relu2"}],
    ids=str,
)
def test_an_expert_comes_back_whole(changes: dict[str, object]) -> None:
    cfg = config(expert_bias=True, **changes)
    W, H, FFN = cfg.w13_rows, cfg.hidden_size, cfg.intermediate_size
    tensors, g = {}, torch.Generator().manual_seed(3)
    for name, (N, K) in {"w13": (W, H), "w2": (H, FFN)}.items():
        tensors[f"{name}_packed"], tensors[f"{name}_scale"] = random_matrix(N, K)
        tensors[f"{name}_bias"] = torch.randn(N, generator=g).bfloat16()
    specs = gluon_runner.packed_specs(cfg)
    out = {s.name: torch.full(s.shape, -7777, dtype=torch.int32).to(s.dtype) for s in specs}
    order = None
    if cfg.act.gated:
        order = layout.row_order(FFN, cfg.act, cfg.gate_up_order, cfg.gate_up_interleave)
    gluon_runner.pack_expert(tensors, out, order)
    for name, (N, K), rows in (("w13", (W, H), order), ("w2", (H, FFN), None)):
        packed, scale = layout.unpack_matrix(
            out[f"{name}_words"], out[f"{name}_scales"], N, K, rows
        )
        assert torch.equal(packed, tensors[f"{name}_packed"])
        assert torch.equal(scale, tensors[f"{name}_scale"])
        bias = out[f"{name}_bias"]
        want = tensors[f"{name}_bias"]
        assert torch.equal(bias[:N], want if rows is None else want[rows])
        assert not bias[N:].any()


def test_a_scale_above_two_is_refused_with_the_way_out() -> None:
    scale = torch.full((4, 3), 128, dtype=torch.uint8)
    layout.check_scales(scale)
    scale[2, 1] = 129
    with pytest.raises(InputError, match=r"got 129.*runner='triton'"):
        layout.check_scales(torch.zeros_like(scale), scale)
