"""Expert weight formats: named byte tensors, and what they decode to.

An expert is stored as its format's tensors, byte for byte; nothing is upcast in the store or on
the wire. Shapes: H row width, I FFN width, W = rows of the first GEMM (2 I gated, else I).

Adding a format: subclass ``WeightFormat`` in this file or a new one and ``register`` it, plus
one ``Choice`` in ``evenep.support``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import InputError, explain
from .mxfp4 import GROUP, decode_mxfp4

BLOCK = 128  # rows and columns that share one FP8 scale


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of one expert."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor for one expert."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFormat(ABC):
    """How one expert's two matrices are stored."""

    name: str

    @abstractmethod
    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        """The tensors of w13 ``[W, H]`` and w2 ``[H, I]``, without biases."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One expert's ``(w13 [W, H], w2 [H, I])`` in ``dtype``, exact where the format is."""

    @abstractmethod
    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Overwrite one expert's tensors with plausible random weights."""

    def validate(self, tensors: Mapping[str, Tensor], where: str) -> None:  # noqa: B027
        """Refuse values the format can't mean (an E8M0 NaN, say). Default: nothing to refuse."""

    def specs(self, cfg: EPConfig) -> list[TensorSpec]:
        """Every tensor of one expert, biases included."""
        specs = self.matrices(cfg)
        if cfg.expert_bias:
            specs.append(TensorSpec("w13_bias", (cfg.w13_rows,), torch.bfloat16))
            specs.append(TensorSpec("w2_bias", (cfg.hidden_size,), torch.bfloat16))
        return specs

    def expert_bytes(self, cfg: EPConfig) -> int:
        """Bytes that move when one expert is replicated."""
        return sum(spec.nbytes for spec in self.specs(cfg))


class BF16(WeightFormat):
    """Plain matrices."""

    name = "bf16"

    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        return [
            TensorSpec("w13", (cfg.w13_rows, cfg.hidden_size), torch.bfloat16),
            TensorSpec("w2", (cfg.hidden_size, cfg.intermediate_size), torch.bfloat16),
        ]

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return tensors["w13"].to(dtype), tensors["w2"].to(dtype)

    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in ("w13", "w2"):
            fan_in = tensors[name].shape[-1]
            values = torch.randn(tensors[name].shape, generator=generator) * fan_in**-0.5
            tensors[name].copy_(values)


class MXFP4(WeightFormat):
    """OCP MXFP4 as Kimi-K3 stores it: see ``evenep.weights.mxfp4`` for the bytes."""

    name = "mxfp4"

    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        W, H, I = cfg.w13_rows, cfg.hidden_size, cfg.intermediate_size  # noqa: E741
        return [
            TensorSpec("w13_packed", (W, H // 2), torch.uint8),
            TensorSpec("w13_scale", (W, H // GROUP), torch.uint8),
            TensorSpec("w2_packed", (H, I // 2), torch.uint8),
            TensorSpec("w2_scale", (H, I // GROUP), torch.uint8),
        ]

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            decode_mxfp4(tensors["w13_packed"], tensors["w13_scale"], dtype),
            decode_mxfp4(tensors["w2_packed"], tensors["w2_scale"], dtype),
        )

    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in ("w13", "w2"):
            packed, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
            packed.random_(0, 256, generator=generator)
            # E2M1 codes have mean square 8.56; aim at unit gain, vary the scale per group.
            middle = 127 - round(math.log2((2 * packed.shape[-1] * 8.56) ** 0.5))
            scale.random_(middle - 2, middle + 2, generator=generator)

    def validate(self, tensors: Mapping[str, Tensor], where: str) -> None:
        for name in ("w13_scale", "w2_scale"):
            top = int(tensors[name].max())
            if top > 252:
                meaning = "NaN" if top == 255 else "a scale whose larger codes overflow BF16"
                raise InputError(
                    explain(
                        f"{name} holds byte {top}, {meaning}",
                        where=where,
                        expected="E8M0 bytes 0..252",
                        got=top,
                    )
                )


class FP8(WeightFormat):
    """E4M3 with one FP32 scale per 128 x 128 block (DeepSeek-V3, Kimi-K2)."""

    name = "fp8"

    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        specs = []
        for name, rows, cols in (
            ("w13", cfg.w13_rows, cfg.hidden_size),
            ("w2", cfg.hidden_size, cfg.intermediate_size),
        ):
            blocks = (math.ceil(rows / BLOCK), math.ceil(cols / BLOCK))
            specs.append(TensorSpec(name, (rows, cols), torch.float8_e4m3fn))
            specs.append(TensorSpec(f"{name}_scale", blocks, torch.float32))
        return specs

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            decode_fp8_block(tensors["w13"], tensors["w13_scale"], dtype),
            decode_fp8_block(tensors["w2"], tensors["w2_scale"], dtype),
        )

    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in ("w13", "w2"):
            codes, scale = tensors[name], tensors[f"{name}_scale"]
            codes.copy_(torch.randn(codes.shape, generator=generator))
            spread = torch.rand(scale.shape, generator=generator) + 0.5
            scale.copy_(spread * codes.shape[-1] ** -0.5)


def decode_fp8_block(codes_NK: Tensor, scale_nk: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 codes ``[N, K]`` times the scale of their 128 x 128 block, computed in fp32."""
    N, K = codes_NK.shape
    scale_NK = scale_nk.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    return (codes_NK.float() * scale_NK).to(dtype)


FORMATS: dict[str, WeightFormat] = {}


def register(fmt: WeightFormat) -> None:
    """Make a format available under its name."""
    FORMATS[fmt.name] = fmt


for _fmt in (BF16(), MXFP4(), FP8()):
    register(_fmt)


def format_of(cfg: EPConfig) -> WeightFormat:
    """The format a config asks for; the support matrix has already vouched for the name."""
    return FORMATS[cfg.weight_format]
