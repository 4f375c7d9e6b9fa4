"""The MXFP4 runner for Hopper: two launches per step of a layer, weights decoded in registers.

N receive rows, M scratch rows, H row width, I FFN width, G groups.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import StateError, UnsupportedError, explain
from ..formats import TensorSpec
from ..kernels import mxfp4_layout as layout
from .device import DeviceRunner, Groups

if TYPE_CHECKING:
    from ..kernels.mxfp4_tiles import Tile

# Gluon is triton.experimental: the names the kernel uses, looked for before it is imported.
_NAMES = {
    "triton.experimental.gluon": ("jit", "constexpr_function"),
    "triton.experimental.gluon.language": (
        "DistributedLinearLayout",
        "DotOperandLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SliceLayout",
        "allocate_shared_memory",
        "associative_scan",
        "convert_layout",
        "inline_asm_elementwise",
        "num_warps",
        "warp_specialize",
    ),
    "triton.experimental.gluon.language.nvidia.hopper": (
        "mbarrier",
        "tma",
        "warpgroup_mma",
        "warpgroup_mma_init",
        "warpgroup_mma_wait",
    ),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
}


def _missing_in_triton() -> str:
    """What this Triton lacks of what the kernel needs, empty when nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 6):
        return f"Triton {triton.__version__} is older than 3.6"
    for module, names in _NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError as e:
            return f"Triton {triton.__version__} has no {module} ({e})"
        for name in names:
            if not hasattr(found, name):
                return f"{module} of Triton {triton.__version__} has no '{name}'"
    return ""


def unsupported_reason(cfg: EPConfig, device: torch.device) -> str:
    """Why the runner can't serve this config on this device, empty when it can."""
    if cfg.weight_format != "mxfp4":
        return f"it computes MXFP4 experts, not '{cfg.weight_format}'"
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, not '{device.type}'"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it is written for Hopper (SM90), not SM{capability[0]}{capability[1]}"
    return _missing_in_triton()


class GluonRunner(DeviceRunner):
    """MXFP4 experts on SM90, exact in the weights; see ``evenep.kernels.mxfp4_gluon``.

    Experts are kept as words in the order the tensor core reads them: the checkpoint's bytes
    reordered, plus padding where H isn't a multiple of 256 or a matrix's rows of 128. Scale bytes
    above 128 are refused when an expert is packed.

    The scratch between the GEMMs holds only rows that exist: row i of group g is at (rows of the
    groups before g) + i, so ``reserve(M)`` takes 2 M I bytes however large the receive buffer is.

    SiTU's tanh is the GPU's own instruction: relative error up to 2^-11, a quarter of what the
    rounding to BF16 behind it may add.

    There is one scratch, so calls must be ordered: one stream at a time.

    The first call of each class of ``likely`` (8, 16, 32, 64, 128 rows) compiles two kernels, a
    second or so each: ``warm_up`` makes it before a step has to.
    """

    name = "gluon"
    batch_invariant = True

    def __init__(self, cfg: EPConfig, device: torch.device) -> None:
        super().__init__(cfg, device)
        reason = unsupported_reason(cfg, device)
        if reason:
            raise UnsupportedError(
                explain(f"runner 'gluon' is refused: {reason}", fix="use runner='triton'")
            )
        from ..kernels.mxfp4_mlp import ExpertMLP, Shape

        shape = Shape(cfg.hidden_size, cfg.intermediate_size, cfg.act, cfg.route_weight)
        self._mlp = ExpertMLP(shape)
        # With SMs left to others, an early launch would sit on them.
        self._mlp_apart = ExpertMLP(shape, overlap=False)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch_MI = torch.empty(
            0, cfg.intermediate_size, dtype=torch.bfloat16, device=device
        )
        self._order_W = layout.row_order(
            cfg.intermediate_size, cfg.act, cfg.gate_up_order, cfg.gate_up_interleave
        ).to(device)
        self.tiles: tuple[Tile, Tile] | None = None
        """Gate+up's and down's, to measure with; None: chosen per call."""

    @property
    def classes(self) -> Sequence[int]:
        from ..kernels.mxfp4_tiles import TILES

        return tuple(TILES)

    def specs(self) -> list[TensorSpec]:
        """Words, scales and biases of one expert, padded to the kernel's tiles."""
        return packed_specs(self.cfg)

    def pack(self, tensors: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """One expert into the kernel's layout. Waits for the device once, to look at the scales.

        Raises:
            InputError: a scale byte above 128.
        """
        pack_expert(tensors, out, self._order_W if self.cfg.act.gated else None)

    def reserve(self, rows: int) -> None:
        """Allocate the scratch between the GEMMs, ``[rows, I]``."""
        if rows > self._scratch_MI.shape[0]:
            self._scratch_MI = self._scratch_MI.new_empty(rows, self.cfg.intermediate_size)

    def run(
        self, rows_NH: Tensor, weight_N: Tensor | None, groups: Groups, sms: int | None = None
    ) -> None:
        if groups.rows == 0 or groups.count_G.shape[0] == 0:
            return
        if groups.rows > self._scratch_MI.shape[0]:
            raise StateError(
                explain(
                    "more rows than the runner has scratch for",
                    expected=f"at most {self._scratch_MI.shape[0]} rows",
                    got=groups.rows,
                    fix="call reserve() with the largest Groups.rows",
                )
            )
        looks = sms is not None and groups.busy is not None
        leave = self._sms - max(1, min(sms, self._sms)) if sms is not None else 0
        mlp = self._mlp if sms is None or looks else self._mlp_apart
        mlp(
            rows_NH,
            weight_N,
            groups.start_G,
            groups.count_G,
            groups.tensors,
            self._scratch_MI,
            groups=min(groups.count_G.shape[0], groups.rows),
            likely=groups.likely,
            sms=self._sms if looks else self._sms - leave,
            busy=groups.busy if looks else None,
            leave=leave if looks else 0,
            tiles=self.tiles,
        )


def packed_specs(cfg: EPConfig) -> list[TensorSpec]:
    """The tensors of one expert in the kernel's layout."""
    specs = []
    shapes = {
        "w13": (cfg.w13_rows, cfg.hidden_size),
        "w2": (cfg.hidden_size, cfg.intermediate_size),
    }
    for name, (N, K) in shapes.items():
        specs.append(TensorSpec(f"{name}_words", layout.word_shape(N, K), torch.int32))
        specs.append(TensorSpec(f"{name}_scales", layout.scale_shape(N, K), torch.int32))
        if cfg.expert_bias:
            padded = layout.padded_shape(N, K)[0]
            specs.append(TensorSpec(f"{name}_bias", (padded,), torch.bfloat16))
    return specs


def pack_expert(
    tensors: Mapping[str, Tensor], out: Mapping[str, Tensor], order_W: Tensor | None
) -> None:
    """One expert's format tensors into the kernel's layout, on any device.

    Args:
        tensors: as ``evenep.formats.mxfp4`` has them.
        out: as ``packed_specs``; overwritten.
        order_W: ``row_order`` of w13; None: rows as they are.

    Raises:
        InputError: a scale byte above 128.
    """
    layout.check_scales(tensors["w13_scale"], tensors["w2_scale"])
    for name, order in (("w13", order_W), ("w2", None)):
        packed, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        layout.pack_matrix(packed, scale, out[f"{name}_words"], out[f"{name}_scales"], order)
        if f"{name}_bias" in out:
            bias, row = tensors[f"{name}_bias"], out[f"{name}_bias"]
            row.zero_()
            row[: bias.shape[0]] = bias if order is None else bias[order]
