"""Random contents for fixture checkpoints, with statistics that make every K3 detail matter.

"Hot" contents put the gate's standard deviation at 4.5 and the up half's at 18: there SiTU
differs from SiLU, and its linear bound bites. On tamer contents a wrong activation hides below
the noise of BF16. H hidden, D latent, E experts.
"""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .config import KimiK3Config
from .names import BLOCK, ROUTED, Entry
from .reader import TORCH_DTYPES

CODE_RMS = math.sqrt(68.5 / 8)  # root mean square of a uniformly random E2M1 code
GATE_STD = 4.5
# lowest and highest scale byte of each expert matrix, uniform in between
HOT_BYTES = {"w1": (115, 125), "w3": (117, 127), "w2": (107, 117)}
PLAIN_BYTES = {"w1": (112, 122), "w3": (112, 122), "w2": (112, 122)}
BIAS_RAMP, BIAS_NOISE, PLAIN_BIAS = 0.42, 0.155, 0.018
NOISE_BLOCK = 8


def scale_rms(low: int, high: int) -> float:
    """Root mean square of ``2 ** (byte - 127)`` over a uniform byte."""
    factors = np.exp2(np.arange(low, high + 1) - 127.0)
    return float(np.sqrt(np.mean(factors**2)))


def correction_bias(E: int, rng: np.random.Generator, hot: bool) -> NDArray[np.float32]:
    """The router's bias ``[E]``: noise on a ramp that favours low ids.

    The noise of each block of 8 experts is the same set of quantiles, shuffled, so that the
    imbalance of contiguous homes comes from the ramp (max/mean about 1.6 at two ranks and 2.0
    at four for standard normal input) and not from the seed.
    """
    quantiles = np.array(
        [NormalDist().inv_cdf((i + 0.5) / NOISE_BLOCK) for i in range(NOISE_BLOCK)]
    )
    quantiles /= quantiles.std()
    blocks = [rng.permutation(quantiles) for _ in range(-(-E // NOISE_BLOCK))]
    noise = np.concatenate(blocks)[:E]
    if not hot:
        return (PLAIN_BIAS * noise).astype(np.float32)
    ramp = 0.5 - np.arange(E) / max(E - 1, 1)
    return (BIAS_NOISE * noise + BIAS_RAMP * ramp).astype(np.float32)


def random_tensor(entry: Entry, cfg: KimiK3Config, seed: int, hot: bool) -> Tensor:
    """The content of one table entry: a pure function of (entry, sizes, seed, hot)."""
    rng = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
    if entry.use == ROUTED and entry.dtype == "U8":
        return _expert_bytes(entry, rng, HOT_BYTES if hot else PLAIN_BYTES)
    leaf = entry.name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "e_score_correction_bias":
        return torch.from_numpy(correction_bias(cfg.num_experts, rng, hot))
    if "norm" in leaf:
        values = rng.random(entry.shape, np.float32) + np.float32(0.5)
    else:
        fan_in = entry.shape[-1] if len(entry.shape) > 1 else 1
        gain = _latent_gain(cfg, hot) if entry.use == BLOCK and _is_latent_down(leaf) else 1.0
        values = rng.standard_normal(entry.shape, np.float32) * np.float32(gain * fan_in**-0.5)
    if leaf == "A_log":
        values[cfg.attention.kda_heads :] = 0
    return torch.from_numpy(values).to(TORCH_DTYPES[entry.dtype])


def _expert_bytes(
    entry: Entry, rng: np.random.Generator, ranges: dict[str, tuple[int, int]]
) -> Tensor:
    if entry.name.endswith("weight_packed"):
        codes = np.frombuffer(rng.bytes(entry.nbytes), np.uint8).reshape(entry.shape)
        return torch.from_numpy(codes.copy())
    low, high = ranges[entry.name.split(".")[-2]]
    return torch.from_numpy(rng.integers(low, high, entry.shape, np.uint8, endpoint=True))


def _is_latent_down(leaf: str) -> bool:
    return leaf == "routed_expert_down_proj"


def _latent_gain(cfg: KimiK3Config, hot: bool) -> float:
    """Standard deviation of the latent rows that puts the gate's at ``GATE_STD``."""
    if not hot:
        return 1.0
    D = cfg.routed_expert_hidden_size
    return GATE_STD / (math.sqrt(D) * CODE_RMS * scale_rms(*HOT_BYTES["w1"]))
