"""DeepGEMM's grouped GEMMs on SM90: BF16, and FP8 weights times FP8 rows.

M compact rows, K inputs, N outputs, G groups. Groups are handed over as DeepGEMM's "psum" layout:
the row after each group's last, groups starting at multiples of 64 or 128, all on the device.

An FP8 config rounds the rows of both GEMMs to E4M3 with a scale per 128 columns, about 3 % noise on
an expert's output: other numerics than every other runner has, so ``auto`` never picks this one.

The package is ``deep_gemm`` (wheel ``sgl-deep-gemm``). A wheel built for another torch imports and
then fails or miscomputes, so making a runner multiplies a small problem first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import UnsupportedError, explain
from ..kernels.group_tiles import Tiles, group_tiles
from ..kernels.quantize import GROUP, quantize_rows, quantize_rows_ref
from ..kernels.sizing import num_sms
from .compact import CompactRunner
from .device import Groups

SETTINGS = threading.Lock()
"""DeepGEMM's alignment and SM count belong to the process; ranks may be threads of one."""

_FEW = 64  # rows of a busy group up to which groups start at multiples of 64
_MULTIPLE = {"bf16": 64, "fp8": 128}  # of hidden_size and intermediate_size


class DeepGemmRunner(CompactRunner):
    """``deepgemm``. Binding it to fewer SMs compiles its kernels once more."""

    name = "deepgemm"
    batch_invariant = True
    align = 128

    def __init__(self, cfg: EPConfig, device: torch.device) -> None:
        reason = refusal(cfg, device)
        if reason:
            raise UnsupportedError(
                explain(f"runner 'deepgemm' {reason}", where=str(device), fix="use runner 'auto'")
            )
        super().__init__(cfg, device)
        self._gemm = load()
        self._h_MW, self._o_MH = self._empty(0, cfg.w13_rows), self._empty(0, cfg.hidden_size)

    @property
    def classes(self) -> Sequence[int]:
        return (_FEW, 2 * _FEW)

    def align_for(self, groups: Groups) -> int:
        return 64 if groups.likely <= _FEW else self.align

    def reserve(self, rows: int) -> None:
        super().reserve(rows)
        cfg, M = self.cfg, self.compact_rows(rows)
        if self._h_MW.shape[0] >= M:
            return
        self._h_MW, self._o_MH = self._empty(M, cfg.w13_rows), self._empty(M, cfg.hidden_size)
        if cfg.weight_format == "fp8":
            K = max(cfg.hidden_size, cfg.intermediate_size)
            self._codes = torch.empty(M * K, dtype=torch.float8_e4m3fn, device=self.device)
            self._scales = torch.empty(M * K // GROUP, device=self.device)

    def gemm(
        self,
        x_MK: Tensor,
        tensors: Mapping[str, Tensor],
        name: str,
        tiles: Tiles,
        sms: int | None,
    ) -> Tensor:
        M, K = x_MK.shape
        out_MN = (self._h_MW if name == "w13" else self._o_MH)[:M]
        every = num_sms(self.device)
        sms_used = every if sms is None else min(sms, every)
        w_GNK = tensors[name]
        if self.cfg.weight_format == "bf16":
            with SETTINGS:
                self._gemm.set_num_sms(sms_used)
                multiply(self._gemm, x_MK, w_GNK, out_MN, tiles)
            return out_MN
        q_MK = self._codes[: M * K].view(M, K)
        scale_MQ = self._scales[: M * K // GROUP].view(K // GROUP, M).T
        quantize_rows(x_MK, q_MK, scale_MQ, tiles, sms)
        weights = (w_GNK, tensors[f"{name}_scale"])
        with SETTINGS:
            self._gemm.set_num_sms(sms_used)
            multiply(self._gemm, (q_MK, scale_MQ), weights, out_MN, tiles)
        return out_MN


Operand = Tensor | tuple[Tensor, Tensor]


def multiply(deep_gemm: ModuleType, x: Operand, w: Operand, out_MN: Tensor, tiles: Tiles) -> None:
    """``out = x w^T`` for the groups' compact rows; other rows of ``out`` may be written.

    Call it with ``SETTINGS`` held.
    """
    deep_gemm.set_mk_alignment_for_contiguous_layout(tiles.align)
    if isinstance(x, Tensor):
        product = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    else:
        product = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    product(x, w, out_MN, tiles.ends_G, use_psum_layout=True)


def load() -> ModuleType:
    """The package, imported late: importing it needs a CUDA toolkit."""
    import deep_gemm

    return deep_gemm  # type: ignore[no-any-return]


def refusal(cfg: EPConfig, device: torch.device) -> str:
    """Why DeepGEMM can't run this config on this device; empty when it can."""
    multiple = _MULTIPLE[cfg.weight_format]
    if cfg.hidden_size % multiple or cfg.intermediate_size % multiple:
        return (
            f"needs hidden_size and intermediate_size to be multiples of {multiple} "
            f"for {cfg.weight_format}"
        )
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a GPU of SM90"
    return probe(cfg.weight_format, device)


@functools.cache
def probe(fmt: str, device: torch.device) -> str:
    """Multiply two small groups; the reason when that fails or comes out wrong, else empty."""
    try:
        worst = _error_of_a_small_problem(load(), fmt, device)
    except Exception as error:  # whatever a foreign wheel raises is the reason
        return f"failed its first GEMM: {type(error).__name__}: {error}"
    return "" if worst < 0.01 else f"got its first GEMM wrong by {worst:.2g}"


def _error_of_a_small_problem(deep_gemm: ModuleType, fmt: str, device: torch.device) -> float:
    """Relative L2 error of groups of 3, 0 and 70 rows, K = 256, N = 384."""
    K, N, counts = 256, 384, [3, 0, 70]
    random = torch.Generator(device).manual_seed(0)
    count_G = torch.tensor(counts, dtype=torch.int32, device=device)
    tiles = group_tiles(torch.zeros_like(count_G), count_G, sum(counts), 16, align=128)
    x_MK = torch.randn(256, K, generator=random, device=device).bfloat16()
    w_GNK = torch.randn(len(counts), N, K, generator=random, device=device).bfloat16()
    out_MN = torch.full((256, N), torch.nan, dtype=torch.bfloat16, device=device)
    if fmt == "bf16":
        with SETTINGS:
            multiply(deep_gemm, x_MK, w_GNK, out_MN, tiles)
        exact_x, exact_w = x_MK.float(), w_GNK.float()
    else:
        q_MK, scale_MQ = quantize_rows_ref(x_MK)
        scale_MQ = scale_MQ.T.contiguous().T
        codes = w_GNK.to(torch.float8_e4m3fn)
        scale_G = torch.rand(len(counts), N // 128, K // 128, generator=random, device=device) + 0.5
        with SETTINGS:
            multiply(deep_gemm, (q_MK, scale_MQ), (codes, scale_G), out_MN, tiles)
        exact_x = q_MK.float() * scale_MQ.repeat_interleave(128, 1)
        exact_w = codes.float() * scale_G.repeat_interleave(128, 1).repeat_interleave(128, 2)
    got = torch.cat([out_MN[:3], out_MN[128:198]]).float()
    want = torch.cat([exact_x[:3] @ exact_w[0].T, exact_x[128:198] @ exact_w[2].T])
    return float((got - want).norm() / want.norm())
