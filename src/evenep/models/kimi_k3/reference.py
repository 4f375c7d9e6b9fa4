"""The oracle: one MoE block written straight from its definition, slowly and independently.

Shares no code with the engine's path: shards are read through the safetensors library, nibbles
are decoded here, and all arithmetic is fp32 with an explicit bf16 rounding ``rnd`` at each place
where the model rounds. Tests override a method to plant a bug and see it caught.

T tokens, H hidden, D latent, I expert FFN width, E experts, K experts per token.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

Floats = NDArray[np.float32]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rnd(x: Tensor) -> Tensor:
    """Round fp32 to the nearest bf16, kept as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


@functools.lru_cache(maxsize=2)
def _weight_map(index: Path) -> dict[str, str]:
    """Tensor to shard; the published index is 60 MB, so layers share one parse."""
    found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return found


class Oracle:
    """The block of decoder layer ``layer`` of a checkpoint directory.

    Every method takes and returns fp32 tensors whose values are exact bf16 where the model has
    bf16. Experts are decoded when first needed and kept.
    """

    def __init__(self, path: str | Path, layer: int) -> None:
        self.path = Path(path)
        text = json.loads((self.path / "config.json").read_text())["text_config"]
        self.shard_of = _weight_map(self.path / "model.safetensors.index.json")
        self.prefix = f"language_model.model.layers.{layer}.block_sparse_moe."
        self.K = int(text["num_experts_per_token"])
        self.scaling, self.eps = float(text["routed_scaling_factor"]), float(text["rms_norm_eps"])
        self.beta = float(text["activation_situ_beta"])
        self.linear_beta = float(text["activation_situ_linear_beta"])
        self._experts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def tensor(self, name: str) -> Tensor:
        """A tensor of the block as stored."""
        full = self.prefix + name
        with safe_open(self.path / self.shard_of[full], framework="pt") as shard:
            found: Tensor = shard.get_tensor(full)
        return found

    def expert(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded gate ``[I, D]``, up ``[I, D]`` and down ``[D, I]`` of expert e."""
        if e not in self._experts:
            w1, w3, w2 = (
                self.decode(
                    self.tensor(f"experts.{e}.{w}.weight_packed").numpy(),
                    self.tensor(f"experts.{e}.{w}.weight_scale").numpy(),
                )
                for w in ("w1", "w3", "w2")
            )
            self._experts[e] = (w1, w3, w2)
        return self._experts[e]

    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Tensor:
        """MXFP4 bytes to values: even columns are low nibbles, 32 columns share a scale."""
        rows, half = packed.shape
        codes = np.empty((rows, 2 * half), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = packed & 0x0F, packed >> 4
        values = np.asarray(MAGNITUDES, np.float32)[codes & 7]
        values = np.where(codes & 8, -values, values)
        exponent = scale.astype(np.int32) - 127
        return torch.from_numpy(np.ldexp(values, np.repeat(exponent, 32, axis=1)))

    def activation(self, g: Tensor, u: Tensor) -> Tensor:
        """SiTU-GLU, unrounded."""
        a, b = self.beta, self.linear_beta
        return a * torch.tanh(g / a) * torch.sigmoid(g) * b * torch.tanh(u / b)

    def scores(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Sigmoid scores ``[T, E]`` and the same plus the correction bias."""
        score_TE = torch.sigmoid(x_TH @ self.tensor("gate.weight").float().T)
        return score_TE, score_TE + self.tensor("gate.e_score_correction_bias")

    def router(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """ids int64 ``[T, K]`` (ties to the lowest id) and weights ``[T, K]``."""
        _, choice_TE = self.scores(x_TH)
        order = np.argsort(-choice_TE.numpy(), axis=1, kind="stable")
        ids_TK = torch.from_numpy(order[:, : self.K].copy())
        return ids_TK, self.weigh(x_TH, ids_TK)

    def weigh(self, x_TH: Tensor, ids_TK: Tensor) -> Tensor:
        """Weights of given ids: unbiased scores over their sum; 0 for ids < 0."""
        score_TE, _ = self.scores(x_TH)
        weight_TK = torch.take_along_dim(score_TE, ids_TK.clamp(min=0), dim=1) * (ids_TK >= 0)
        return weight_TK / (weight_TK.sum(1, keepdim=True) + 1e-20) * self.scaling

    def latent(self, x_TH: Tensor) -> Tensor:
        """What dispatch moves, ``[T, D]``."""
        return rnd(x_TH @ self.tensor("routed_expert_down_proj.weight").float().T)

    def gate_up(self, z_ND: Tensor, e: int) -> tuple[Tensor, Tensor]:
        """Gate and up projections of rows through expert e."""
        w1, w3, _ = self.expert(e)
        return rnd(z_ND @ w1.T), rnd(z_ND @ w3.T)

    def routed(self, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The routed sum before the norm, ``[T, D]``: fp32 over k ascending, one rounding."""
        T, D = z_TD.shape
        out_TKD = torch.zeros(T, ids_TK.shape[1], D)
        for e in np.unique(ids_TK.numpy()).tolist():
            if e < 0:
                continue
            t, k = torch.where(ids_TK == e)
            g, u = self.gate_up(z_TD[t], e)
            out_TKD[t, k] = rnd(rnd(self.activation(g, u)) @ self.expert(e)[2].T)
        total_TD = torch.zeros(T, D)
        for slot in range(ids_TK.shape[1]):
            total_TD += out_TKD[:, slot] * weights_TK[:, slot, None]
        return rnd(total_TD)

    def norm(self, routed_TD: Tensor) -> Tensor:
        """RMSNorm with the model's rounding before the weight."""
        mean_T1 = routed_TD.square().mean(1, keepdim=True)
        scaled = rnd(routed_TD / torch.sqrt(mean_T1 + self.eps))
        return rnd(self.tensor("routed_expert_norm.weight").float() * scaled)

    def up(self, routed_TD: Tensor) -> Tensor:
        """Norm and up projection of the routed sum, ``[T, H]``."""
        weight_HD = self.tensor("routed_expert_up_proj.weight").float()
        return rnd(self.norm(routed_TD) @ weight_HD.T)

    def shared(self, x_TH: Tensor) -> Tensor:
        """The shared experts, ``[T, H]``."""
        gate, up, down = (
            self.tensor(f"shared_experts.{n}_proj.weight").float() for n in ("gate", "up", "down")
        )
        return rnd(rnd(self.activation(rnd(x_TH @ gate.T), rnd(x_TH @ up.T))) @ down.T)

    def block(self, x_TH: Tensor, ids_TK: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The whole block: ``(y [T, H], routed sum [T, D], ids [T, K])``."""
        x_TH = x_TH.float()
        if ids_TK is None:
            ids_TK, weights_TK = self.router(x_TH)
        else:
            ids_TK = ids_TK.long()
            weights_TK = self.weigh(x_TH, ids_TK)
        routed_TD = self.routed(self.latent(x_TH), ids_TK, weights_TK)
        return rnd(self.up(routed_TD) + self.shared(x_TH)), routed_TD, ids_TK


def relative_l2(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` in fp64."""
    difference = got.double() - want.double()
    return float(difference.norm() / want.double().norm().clamp_min(1e-300))
