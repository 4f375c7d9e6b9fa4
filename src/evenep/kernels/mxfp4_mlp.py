"""Launches of the MXFP4 kernel: descriptors, compiled kernels, and an expert MLP of two launches.

N receive rows, M scratch rows, G groups, I FFN width, H row width; see ``mxfp4_gluon`` for the
GEMMs and ``mxfp4_layout`` for the weights.

An eager launch of a Gluon kernel with three TMA descriptors costs the host some 50 us, most of it
in making the descriptors and in finding the compiled kernel again. Both depend on addresses and
shapes alone, so they are kept by those; a launch that is known costs a few us.

Worked example: a layer's weights, one receive buffer, tiles of 8 rows: the first call makes two
entries (gate+up and down); every later call with the same buffers finds both, whatever the counts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..activation import Activation
from . import mxfp4_gluon, mxfp4_layout
from .mxfp4_tiles import Gemm, Tile, choose, fit, group_places, rows_of_tile
from .weigh_rows import weigh_rows

_KEEP = 4096  # launches known at once; far above layers x tiles x lanes
_WEIGHTS = operator.itemgetter("w13_words", "w13_scales", "w2_words", "w2_scales")
_address = operator.methodcaller("data_ptr")


def _shared(bits: int, swizzle: int = 128, rank: int = 2) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def weight_descriptors(words: Tensor, scales: Tensor, tile: Tile) -> tuple[Any, Any]:
    """TMA descriptors of all groups' words and scales: boxes of one 128-row group, or
    of half of one block's words."""
    blocks = tile.bk // 64
    of_scales = TensorDescriptor.from_tensor(
        scales.view(-1, 16), [tile.scale_columns // 16, 16], _shared(32, swizzle=64)
    )
    box = [16 if tile.bn == 64 else blocks * 32, 32]
    return TensorDescriptor.from_tensor(words.view(-1, 32), box, _shared(32)), of_scales


def row_descriptors(x_NK: Tensor, tile: Tile) -> tuple[Any, Any, Any, Any]:
    """TMA descriptors of x: a whole box; exactly 1, 2, 4 rows (None where the tile has no use).

    What a box holds past the tensor's end arrives as zero and costs no read. A view of windows of
    c rows, ``[N - c + 1, c, K]`` with overlapping strides, ends after c rows of any first row.
    """
    box = TensorDescriptor.from_tensor(x_NK, [tile.rows, tile.bk], _shared(16))
    if not tile.exact:
        return box, None, None, None
    N, K = x_NK.shape
    layout = _shared(16, rank=3)
    few = [
        TensorDescriptor(
            x_NK, [max(1, N - c + 1), c, K], [K, K, 1], [1, tile.rows, tile.bk], layout
        )
        for c in (1, 2, 4)
    ]
    return box, *few


def launch_options(gemm: Gemm) -> dict[str, Any]:
    """Compile options: the tile's, and no fusing of multiply and add, so that every tile's
    epilogue rounds alike."""
    options: dict[str, Any] = {"num_warps": gemm.tile.warps, "enable_fp_fusion": False}
    if gemm.tile.registers:
        options["maxnreg"] = gemm.tile.registers
    if gemm.early:
        options["launch_pdl"] = True
    return options


class Ready:
    """A compiled launch with its descriptors and grid: what is left are the other arguments."""

    __slots__ = ("_descriptors", "_gemm", "_launch")

    def __init__(
        self, compiled: Any, descriptors: tuple[Any, ...], grid: tuple[int, int, int], gemm: Gemm
    ) -> None:
        self._launch, self._descriptors, self._gemm = compiled[grid], descriptors, gemm

    @property
    def per_sm(self) -> int:
        """Programs of a multiprocessor."""
        return self._gemm.tile.ctas

    def __call__(self, *rest: Any) -> None:
        """Queue it; ``rest`` is start_G, count_G, G, weight_N, bias, busy, away, out."""
        self._launch(*self._descriptors, *rest, self._gemm)


class GroupedGemm:
    """Launches of one kind, kept by the addresses and shapes they depend on."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        gemm: Gemm,
        words: Tensor,
        scales: Tensor,
        x: Tensor,
        out: Tensor,
        start_G: Tensor,
        count_G: Tensor,
        weight_N: Tensor | None,
        bias: Tensor | None,
        busy: Tensor | None,
        away: int,
        programs: int,
    ) -> Ready:
        """Queue one launch of ``programs`` programs on the current stream.

        Returns:
            The launch, to be queued again as long as words, scales and x stay where they are.
        """
        grid, G = (programs, 1, 1), count_G.shape[0]
        key = (
            gemm,
            G,
            words.data_ptr(),
            scales.data_ptr(),
            x.data_ptr(),
            x.shape[0],
            x.device.index,
            busy is None,
        )
        rest = (start_G, count_G, G, weight_N, bias, busy, away, out, gemm)
        known = self._known.get(key)
        if known is not None:
            ready = Ready(*known, grid, gemm)
            ready(*rest[:-1])
            return ready
        descriptors = (
            *weight_descriptors(words, scales, gemm.tile),
            *row_descriptors(x, gemm.tile),
        )
        kernel = mxfp4_gluon.mxfp4_grouped_gemm[grid]
        compiled = kernel(*descriptors, *rest, **launch_options(gemm))
        if len(self._known) >= _KEEP:
            self._known.clear()
        self._known[key] = compiled, descriptors
        return Ready(compiled, descriptors, grid, gemm)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the MLP of one model is: sizes, activation, and where the route weight multiplies."""

    H: int
    I: int  # noqa: E741
    act: Activation
    route_weight: str = "output"


class ExpertMLP:
    """Both launches. Not safe to call from two threads at once.

    Args:
        shape: the model's.
        overlap: start the down launch before gate+up has ended, so that its first weights arrive
            in gate+up's last wave.
    """

    def __init__(self, shape: Shape, overlap: bool = True) -> None:
        self.shape, self.overlap = shape, overlap
        self._launch = GroupedGemm()
        self._ready: dict[tuple[object, ...], tuple[Ready, Ready]] = {}

    def gemm(self, down: bool, tile: Tile, G: int, *, bias: bool, weighted: bool) -> Gemm:
        """The description of one of the launches."""
        shape, GB = self.shape, group_places(G)
        act = shape.act
        if down:
            NP, KP = mxfp4_layout.padded_shape(shape.H, shape.I)
            return Gemm(fit(tile, NP), True, GB, NP, KP, C=shape.H, bias=bias, early=self.overlap)
        NP, KP = mxfp4_layout.padded_shape(shape.I * (2 if act.gated else 1), shape.H)
        return Gemm(
            fit(tile, NP),
            False,
            GB,
            NP,
            KP,
            C=shape.I,
            kind=act.kind,
            beta=act.beta or 0.0,
            linear_beta=act.linear_beta or 0.0,
            alpha=act.alpha or 0.0,
            limit=act.limit or 0.0,
            bias=bias,
            weighted=weighted,
        )

    def __call__(
        self,
        rows_NH: Tensor,
        weight_N: Tensor | None,
        start_G: Tensor,
        count_G: Tensor,
        tensors: Mapping[str, Tensor],
        scratch_MI: Tensor,
        *,
        groups: int,
        likely: int,
        sms: int,
        busy: Tensor | None = None,
        leave: int = 0,
        tiles: tuple[Tile, Tile] | None = None,
    ) -> None:
        """Overwrite each group's rows with its expert's outputs.

        Args:
            rows_NH: BF16, contiguous.
            weight_N: fp32 route weights, where they don't belong on the output.
            start_G: int32, first row of each group.
            count_G: int32, its rows; their sum is at most M.
            tensors: ``w13_words``, ``w13_scales``, ``w2_words``, ``w2_scales``, ``[G, …]`` each,
                and ``w13_bias``, ``w2_bias`` if the model has them.
            scratch_MI: BF16; overwritten.
            groups: at most this many groups have rows.
            likely: rows of a busy group.
            sms: SMs to use.
            busy: int32 ``[1]`` on the device, None: 0. Where it isn't 0, ``leave`` of the SMs are
                left to whoever made it so.
            tiles: gate+up's and down's, instead of the chosen ones.
        """
        G = count_G.shape[0]
        likely = rows_of_tile(likely)  # so that few launches are to be known
        if weight_N is not None and self.shape.route_weight == "input":
            weigh_rows(rows_NH, weight_N, start_G, count_G, programs=sms * 4)
        weight_N = weight_N if self.shape.route_weight == "activation" else None
        biases = tensors.get("w13_bias"), tensors.get("w2_bias")
        places = [rows_NH.data_ptr(), scratch_MI.data_ptr(), *map(_address, _WEIGHTS(tensors))]
        hosts = (
            rows_NH.shape[0],
            scratch_MI.shape[0],
            G,
            groups,
            likely,
            sms,
            busy is None,
            self.overlap,
        )
        key = (*places, *hosts, weight_N is None, biases[0] is None, tiles)
        ready = self._ready.get(key)
        if ready is not None:
            up, down = ready
            away = leave * up.per_sm
            up(start_G, count_G, G, weight_N, biases[0], busy, away, scratch_MI)
            away = leave * down.per_sm
            down(start_G, count_G, G, None, biases[1], busy, away, rows_NH)
            return
        made = []
        for second in (False, True):
            name = "w2" if second else "w13"
            words = tensors[f"{name}_words"]
            NP = words.shape[1] * mxfp4_layout.N_TILE
            tile = tiles[second] if tiles else choose(likely, groups, NP, sms)
            weighted = weight_N is not None and not second
            gemm = self.gemm(second, tile, G, bias=biases[second] is not None, weighted=weighted)
            made.append(
                self._launch(
                    gemm,
                    words,
                    tensors[f"{name}_scales"],
                    scratch_MI if second else rows_NH,
                    rows_NH if second else scratch_MI,
                    start_G,
                    count_G,
                    weight_N if weighted else None,
                    biases[second],
                    busy,
                    leave * gemm.tile.ctas,
                    programs=sms * gemm.tile.ctas,
                )
            )
        if len(self._ready) >= _KEEP:
            self._ready.clear()
        self._ready[key] = made[0], made[1]
