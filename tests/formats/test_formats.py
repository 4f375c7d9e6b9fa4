"""Weight formats against scalar loops over their bytes, and the arithmetic of their sizes."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep import Activation, EPConfig
from evenep.errors import InputError
from evenep.formats import FORMATS, format_of
from evenep.formats.fp8 import decode_fp8_block
from evenep.formats.mxfp4 import decode_mxfp4

K3_EXPERT_BYTES = 17_547_264


def config(**changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": 3,
        "top_k": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_tokens_per_rank": 4,
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


def empty_row(cfg: EPConfig) -> dict[str, Tensor]:
    return {s.name: torch.zeros(s.shape, dtype=s.dtype) for s in format_of(cfg).specs(cfg)}


# ---- sizes


def test_a_kimi_k3_expert_has_the_published_number_of_bytes() -> None:
    cfg = config(
        hidden_size=3584, intermediate_size=3072, weight_format="mxfp4",
        activation=Activation.situ(),
    )  # fmt: skip
    assert format_of(cfg).expert_bytes(cfg) == K3_EXPERT_BYTES


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
)
def test_specs_and_bytes_are_what_the_format_says(
    name: str, h: int, i: int, gated: bool, bias: bool
) -> None:
    H, I = 32 * h, 128 * i  # noqa: E741
    cfg = config(
        hidden_size=H, intermediate_size=I, weight_format=name, expert_bias=bias,
        activation="swiglu" if gated else "relu2",
    )  # fmt: skip
    W = 2 * I if gated else I
    params = W * H + H * I
    blocks = math.ceil(W / 128) * math.ceil(H / 128) + math.ceil(H / 128) * (I // 128)
    want = {
        "bf16": 2 * params,
        "mxfp4": params // 2 + params // 32,
        "fp8": params + 4 * blocks,
    }[name] + (2 * (W + H) if bias else 0)
    fmt = format_of(cfg)
    assert fmt.expert_bytes(cfg) == want
    row = empty_row(cfg)
    assert sum(t.numel() * t.element_size() for t in row.values()) == want
    assert ("w13_bias" in row) == ("w2_bias" in row) == bias
    w13, w2 = fmt.decode(row, torch.float32)
    assert w13.shape == (W, H)
    assert w2.shape == (H, I)


# ---- values


def scalar_mxfp4(packed: list[list[int]], scale: list[list[int]]) -> list[list[float]]:
    """Nibble by nibble from the definition: E2M1, low nibble first, times ``2 ** (b - 127)``."""

    def e2m1(code: int) -> float:
        sign = -1.0 if code & 8 else 1.0
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return math.copysign(size, sign)

    out = []
    for bytes_, scales in zip(packed, scale, strict=True):
        codes = [c for b in bytes_ for c in (b & 15, b >> 4)]
        out.append([e2m1(c) * 2.0 ** (scales[j // 32] - 127) for j, c in enumerate(codes)])
    return out


def same_bits(got: Tensor, want: list[list[float]]) -> bool:
    """Equal values, and equal signs of zero."""
    expected = torch.tensor(want, dtype=torch.float64)
    value = got.double()
    return torch.equal(value, expected) and torch.equal(value.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_worked_example(dtype: torch.dtype) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, :4] = torch.tensor([0x21, 0x9F, 0x80, 0x35])
    got = decode_mxfp4(packed, torch.tensor([[120]], dtype=torch.uint8), dtype)
    want = [v * 2.0**-7 for v in (0.5, 1.0, -6.0, -0.5, 0.0, -0.0, 3.0, 1.5)] + [0.0] * 24
    assert got.dtype == dtype
    assert same_bits(got, [want])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_every_byte_under_every_allowed_scale_is_exact(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8).view(253, 1).repeat(1, 16)
    assert same_bits(
        decode_mxfp4(packed, scale, dtype), scalar_mxfp4(packed.tolist(), scale.tolist())
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**31))
def test_mxfp4_matches_the_scalar_loop(rows: int, groups: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, 16 * groups), generator=g).to(torch.uint8)
    scale = torch.randint(0, 253, (rows, groups), generator=g).to(torch.uint8)
    want = scalar_mxfp4(packed.tolist(), scale.tolist())
    assert same_bits(decode_mxfp4(packed, scale, torch.bfloat16), want)


def scalar_e4m3(byte: int) -> float:
    """One E4M3 code from its bits: bias 7, no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.copysign(size, sign)


def fp32(value: float) -> float:
    """The nearest fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


@settings(deadline=None, max_examples=12)
@given(
    st.sampled_from([1, 5, 127, 128, 129, 200, 256]),
    st.sampled_from([1, 7, 127, 128, 130, 257]),
    st.integers(0, 2**31),
)
def test_fp8_blocks_match_the_scalar_loop_on_ragged_edges(rows: int, cols: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, cols), generator=g).to(torch.uint8)
    raw[(raw & 127) == 127] = 0  # NaN codes compare with nothing
    scale = torch.randn(math.ceil(rows / 128), math.ceil(cols / 128), generator=g)
    codes, scales = raw.tolist(), scale.tolist()
    want = [
        [fp32(scalar_e4m3(codes[n][k]) * scales[n // 128][k // 128]) for k in range(cols)]
        for n in range(rows)
    ]
    assert same_bits(decode_fp8_block(raw.view(torch.float8_e4m3fn), scale, torch.float32), want)
    rounded = torch.tensor(want).bfloat16()
    got = decode_fp8_block(raw.view(torch.float8_e4m3fn), scale, torch.bfloat16)
    assert torch.equal(got, rounded)


def test_fp8_decodes_both_matrices_with_their_own_scales() -> None:
    cfg = config(hidden_size=200, weight_format="fp8")
    row = empty_row(cfg)
    for name, size in (("w13", 2.0), ("w2", 3.0)):
        row[name].copy_(torch.ones(row[name].shape))
        scale = row[f"{name}_scale"]
        scale.copy_(torch.arange(scale.numel()).view(scale.shape) + size)
    w13, w2 = format_of(cfg).decode(row, torch.float32)
    assert [float(w13[at]) for at in ((0, 0), (128, 0), (0, 199))] == [2.0, 4.0, 3.0]
    assert [float(w2[at]) for at in ((0, 0), (199, 127))] == [3.0, 4.0]


def test_bf16_is_itself() -> None:
    cfg = config()
    row = empty_row(cfg)
    for name in row:
        row[name].copy_(torch.randn(row[name].shape))
    for dtype in (torch.bfloat16, torch.float32):
        w13, w2 = format_of(cfg).decode(row, dtype)
        assert w13.dtype == w2.dtype == dtype
        assert torch.equal(w13.bfloat16(), row["w13"])
        assert torch.equal(w2.bfloat16(), row["w2"])


# ---- refusals


@pytest.mark.parametrize(
    ("byte", "name"), list(itertools.product([253, 254, 255], ["w13_scale", "w2_scale"]))
)
def test_mxfp4_scales_that_mean_no_finite_bf16_are_refused_with_their_place(
    byte: int, name: str
) -> None:
    cfg = config(weight_format="mxfp4")
    row = empty_row(cfg)
    row[name][-1, -1] = byte
    with pytest.raises(InputError) as caught:
        format_of(cfg).validate(row, "layer 3, expert 7")
    for word in ("layer 3, expert 7", name, str(byte), "0..252"):
        assert word in str(caught.value)
    row[name][-1, -1] = 252
    format_of(cfg).validate(row, "here")


def test_the_largest_allowed_mxfp4_scale_is_finite_and_the_next_is_not() -> None:
    code = torch.full((1, 16), 0x77, dtype=torch.uint8)
    for byte, finite in ((252, True), (253, False)):
        got = decode_mxfp4(code, torch.tensor([[byte]], dtype=torch.uint8), torch.bfloat16)
        assert bool(torch.isfinite(got).all()) == finite
