"""The published config parses to the published sizes; every unsupported value is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from evenep.activation import Activation
from evenep.errors import CheckpointError, ConfigError
from evenep.models.kimi_k3 import KimiK3Config

from .conftest import PUBLISHED_CONFIG


@pytest.fixture
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(PUBLISHED_CONFIG.read_text())
    return loaded


def test_published_sizes() -> None:
    config = KimiK3Config.from_file(PUBLISHED_CONFIG)
    assert (config.num_experts, config.num_experts_per_token) == (896, 16)
    assert (config.hidden_size, config.routed_expert_hidden_size) == (7168, 3584)
    assert (config.moe_intermediate_size, config.shared_width) == (3072, 6144)
    assert config.rms_norm_eps == 1e-5
    assert config.moe_layers == tuple(range(1, 93))
    assert {3, 91, 92} <= config.attention.mla_layers
    assert len(config.attention.mla_layers) == 24
    assert config.quantized


def test_engine_config_follows_the_checkpoint() -> None:
    cfg = KimiK3Config.from_file(PUBLISHED_CONFIG).ep_config(ranks=16, max_tokens_per_rank=128)
    assert (cfg.num_experts, cfg.top_k, cfg.experts_per_rank) == (896, 16, 56)
    assert (cfg.hidden_size, cfg.intermediate_size) == (3584, 3072)
    assert cfg.act == Activation.situ(4.0, 25.0)
    assert (cfg.weight_format, cfg.route_weight, cfg.w13_rows) == ("mxfp4", "output", 6144)


def test_a_choice_may_not_contradict_the_checkpoint() -> None:
    config = KimiK3Config.from_file(PUBLISHED_CONFIG)
    with pytest.raises(ConfigError, match="top_k is the checkpoint's to decide"):
        config.ep_config(max_tokens_per_rank=1, top_k=8)


def test_quantization_config_is_also_found_at_top_level(document: dict[str, Any]) -> None:
    document["quantization_config"] = document["text_config"].pop("quantization_config")
    assert KimiK3Config.from_dict(document).quantized
    del document["quantization_config"]
    assert not KimiK3Config.from_dict(document).quantized


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "silu"),
        ("hidden_act", None),
        ("activation_situ_linear_beta", None),
        ("activation_situ_linear_beta", 0.0),
        ("activation_situ_beta", None),
        ("routed_expert_hidden_size", None),
        ("routed_expert_hidden_size", 3600),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("topk_group", 4),
        ("num_expert_group", 8),
        ("moe_renormalize", False),
        ("latent_moe_use_norm", None),
        ("moe_layer_freq", 2),
        ("num_nextn_predict_layers", 1),
        ("num_experts_per_token", 897),
        ("num_experts", "896"),
        ("first_k_dense_replace", 93),
        ("rms_norm_eps", None),
        ("linear_attn_config", None),
    ],
)
def test_bad_field_is_refused_by_name(document: dict[str, Any], field: str, value: object) -> None:
    if value is None:
        del document["text_config"][field]
    else:
        document["text_config"][field] = value
    with pytest.raises(CheckpointError) as caught:
        KimiK3Config.from_dict(document)
    text = str(caught.value)
    named = {"num_experts_per_token": "experts per token", "first_k_dense_replace": "MoE layer"}
    assert named.get(field, field) in text
    assert "expected" in text


def test_absent_latent_width_says_why(document: dict[str, Any]) -> None:
    del document["text_config"]["routed_expert_hidden_size"]
    with pytest.raises(CheckpointError, match="latent"):
        KimiK3Config.from_dict(document)


@pytest.mark.parametrize(
    ("field", "value"), [("num_bits", 8), ("group_size", 16), ("type", "int"), ("symmetric", False)]
)
def test_other_quantization_is_refused(document: dict[str, Any], field: str, value: object) -> None:
    broken = copy.deepcopy(document)
    groups = broken["text_config"]["quantization_config"]["config_groups"]
    groups["group_0"]["weights"][field] = value
    with pytest.raises(CheckpointError, match=field):
        KimiK3Config.from_dict(broken)


def test_layer_lists_must_split_the_layers(document: dict[str, Any]) -> None:
    document["text_config"]["linear_attn_config"]["kda_layers"].remove(1)
    with pytest.raises(CheckpointError, match="split the layers"):
        KimiK3Config.from_dict(document)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_unreadable_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        KimiK3Config.from_file(tmp_path)
