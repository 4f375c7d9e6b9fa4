"""What ``evenep.bench.experts`` measures: packed experts on a GPU behind one grouped GEMM each.

E experts, M rows of all of them, H row width, I FFN width (Kimi-K3's); W = 2 I.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..config import EPConfig
from ..experts.device import Groups
from ..experts.gluon_runner import GluonRunner
from ..formats.mxfp4 import E2M1, GROUP
from ..kernels.mxfp4_tiles import Tile

H, I = 3584, 3072  # noqa: E741


def random_experts(E: int) -> dict[str, Tensor]:
    """Random codes and K3's range of scale bytes, on the GPU."""
    g = torch.Generator("cuda").manual_seed(0)
    made = {}
    for name, N, K in (("w13", 2 * I, H), ("w2", H, I)):
        options: dict[str, Any] = {"generator": g, "dtype": torch.uint8, "device": "cuda"}
        made[f"{name}_packed"] = torch.randint(0, 256, (E, N, K // 2), **options)
        made[f"{name}_scale"] = torch.randint(112, 123, (E, N, K // GROUP), **options)
    return made


def decode(packed_NJ: Tensor, scale_NQ: Tensor) -> Tensor:
    """Values ``[N, K]`` in BF16, exact, on the GPU."""
    values = torch.tensor(E2M1, dtype=torch.bfloat16, device=packed_NJ.device)
    codes = torch.stack([packed_NJ & 15, packed_NJ >> 4], dim=-1).flatten(1)
    factor = torch.exp2(scale_NQ.float() - 127).bfloat16().repeat_interleave(GROUP, dim=1)
    return values[codes.int()] * factor


class Gluon:
    """The runner with E packed experts."""

    def __init__(self, cfg: EPConfig, experts: dict[str, Tensor]) -> None:
        E = experts["w13_packed"].shape[0]
        self.runner = GluonRunner(cfg, torch.device("cuda"))
        self.packed = {
            s.name: torch.empty(E, *s.shape, dtype=s.dtype, device="cuda")
            for s in self.runner.specs()
        }
        for e in range(E):
            one = {name: t[e] for name, t in experts.items()}
            self.runner.pack(one, {name: t[e] for name, t in self.packed.items()})

    def groups(self, counts: list[int], likely: int) -> Groups:
        """Consecutive groups of these sizes."""
        count = torch.tensor(counts, dtype=torch.int32, device="cuda")
        start = (count.cumsum(0) - count).int()
        self.runner.reserve(sum(counts))
        return Groups(start, count, self.packed, sum(counts), likely)

    def launch(self, down: bool, rows: Tensor, groups: Groups, tile: Tile) -> None:
        """One of the two GEMMs on its own."""
        runner, mlp = self.runner, self.runner._mlp_apart
        gemm = mlp.gemm(down, tile, len(groups.count_G), bias=False, weighted=False)
        name, scratch = "w2" if down else "w13", runner._scratch_MI
        mlp._launch(
            gemm,
            self.packed[f"{name}_words"],
            self.packed[f"{name}_scales"],
            scratch if down else rows,
            rows if down else scratch,
            groups.start_G,
            groups.count_G,
            None,
            None,
            None,
            0,
            runner._sms * gemm.tile.ctas,
        )


class Humming:
    """humming 0.1.12, W4A16 batch-invariant, ``grouped_contiguous``, tuned as it is best here."""

    # Rows of one expert up to which a block serves, block rows, its columns, programs per SM.
    BLOCKS = ((8, 8, 2), (32, 16, 2), (96, 64, 2), (512, 128, 1), (1 << 14, 176, 1))

    def __init__(self, experts: dict[str, Tensor]) -> None:
        from humming.schema.mxfp4 import Mxfp4WeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        E = experts["w13_packed"].shape[0]
        tuning, low = [], 0
        for most, block, ctas in self.BLOCKS:
            values = {
                "block_shape": [block, 256, 64],
                "warp_shape": [block, 32, 64],
                "use_stream_k": False,
                "num_stages": 4,
                "num_ctas_per_sm": ctas,
                "use_warp_spec": True,
                "use_tma": True,
                "use_mbarrier": True,
            }
            tuning.append([low, most * E, values])
            low = most * E
        self.tuning = json.dumps(tuning)
        self.compute = json.dumps({"use_batch_invariant": True, "gemm_type": "grouped_contiguous"})
        self.locks = torch.zeros(1024, dtype=torch.int32, device="cuda")
        self.layers = {}
        for name, N, K in (("w13", 2 * I, H), ("w2", H, I)):
            given = {
                "weight": experts[f"{name}_packed"].clone(),
                "weight_scale": experts[f"{name}_scale"].clone(),
            }
            schema, tensors = Mxfp4WeightSchema().convert_humming(
                given, [N], [K], torch.bfloat16, E
            )
            layer = prepare_layer_config(
                shape_n=N,
                shape_k=K,
                weight_schema=schema,
                num_experts=E,
                torch_dtype=torch.bfloat16,
            )
            self.layers[name] = (layer.to_str(), transform_humming_tensors(layer, tensors))

    def launch(self, name: str, x: Tensor, out: Tensor, offsets: Tensor) -> None:
        """One grouped GEMM; offsets int32 ``[E + 1]``."""
        from humming import ops

        layer, tensors = self.layers[name]
        ops.humming_gemm(
            layer_config=layer,
            compute_config=self.compute,
            tuning_config=self.tuning,
            inputs=x,
            outputs=out,
            expert_layout=offsets,
            locks=self.locks,
            **tensors,
        )

    def check(self, experts: dict[str, Tensor]) -> None:
        """Compare gate+up of the first and last expert with fp32; compiles every kernel.

        Raises:
            RuntimeError: it isn't right.
        """
        E = experts["w13_packed"].shape[0]
        x = torch.randn(E, H, device="cuda").bfloat16()
        out = torch.full((E, 2 * I), float("nan"), dtype=torch.bfloat16, device="cuda")
        self.launch("w13", x, out, torch.arange(E + 1, dtype=torch.int32, device="cuda"))
        for e in (0, E - 1):
            w = decode(experts["w13_packed"][e], experts["w13_scale"][e]).float()
            want = w @ x[e].float()
            error = float((out[e].float() - want).norm() / want.norm())
            if not error < 5e-3:
                raise RuntimeError(f"relative error {error:.1e} in expert {e}")
