"""EPConfig: what it refuses and how it says so, its defaults, and its identity."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep import Activation, EPConfig
from evenep.config import INT32_MAX
from evenep.errors import ConfigError, UnsupportedError

SIZES: dict[str, object] = {
    "num_experts": 16,
    "top_k": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_tokens_per_rank": 32,
}
AT_LEAST_ONE = (
    "num_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "max_tokens_per_rank",
    "ranks",
    "row_alignment",
    "in_flight",
)
AT_LEAST_ZERO = ("slots_per_rank", "decode_cache_bytes", "gate_up_interleave")


def make(**changes: object) -> EPConfig:
    return EPConfig(**(SIZES | changes))  # type: ignore[arg-type]


# ---- refusals

NOT_INTS = [1.5, 2.0, "3", True, math.nan]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *itertools.product(AT_LEAST_ONE, [0, -1, None, *NOT_INTS]),
        *itertools.product(AT_LEAST_ZERO, [-1, *NOT_INTS]),
    ],
)
def test_a_bad_size_is_refused_by_name_with_what_it_got(name: str, bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: bad})
    assert f"EPConfig: bad {name} (expected an int >= " in str(caught.value)
    assert f"got {bad}" in str(caught.value)


BAD_VALUES: list[tuple[str, object]] = [
    ("top_k", 17),
    ("epsilon", -0.01),
    ("epsilon", 1.01),
    ("epsilon", math.nan),
    ("epsilon", "0.1"),
    ("epsilon", None),
    ("timeout_s", 0),
    ("timeout_s", -1.0),
    ("timeout_s", math.nan),
    ("timeout_s", "60"),
    ("timeout_s", None),
    ("load_timeout_s", 0),
    ("load_timeout_s", "60"),
    ("reduction", "sum"),
    ("reduction", None),
    ("route_weight", "router"),
    ("gate_up_order", "gate"),
]


@pytest.mark.parametrize(("name", "bad"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name: str, bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: bad})
    assert f"EPConfig: bad {name} " in str(caught.value)
    assert f"got {bad}" in str(caught.value)


@pytest.mark.parametrize("name", ["policy", "weight_format", "runner"])
@pytest.mark.parametrize("bad", ["magic", "", None, 3])
def test_an_unknown_choice_is_unsupported_and_lists_the_supported(name: str, bad: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        make(**{name: bad})
    assert f"EPConfig: unknown {name} (expected one of [" in str(caught.value)
    assert f"got {bad}" in str(caught.value)


@pytest.mark.parametrize("bad", [None, 3, ("swiglu",)])
def test_an_activation_of_another_type_is_refused_by_name(bad: object) -> None:
    with pytest.raises(ConfigError, match="activation"):
        make(activation=bad)


@pytest.mark.parametrize(
    ("kind", "constants", "words"),
    [
        ("gelu", {}, "unknown activation"),
        ("swiglu_clamp_before", {}, "needs limit"),
        ("swiglu_clamp_after", {"limit": 0.0}, "needs limit"),
        ("swigluoai", {"limit": 7.0}, "needs alpha"),
        ("swigluoai", {"limit": 7.0, "alpha": -1.0}, "needs alpha"),
        ("situ", {"beta": 4.0}, "needs linear_beta"),
        ("situ", {"beta": math.nan, "linear_beta": 1.0}, "needs beta"),
        ("situ", {"beta": math.inf, "linear_beta": 1.0}, "needs beta"),
        ("situ", {"beta": "4", "linear_beta": 1.0}, "needs beta"),
        ("swiglu", {"limit": 7.0}, "has no constant limit"),
        ("relu2", {"alpha": 1.0}, "has no constant alpha"),
    ],
)
def test_activation_constants_are_exactly_those_of_the_kind(
    kind: str, constants: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Activation(kind, **constants)


def test_an_activations_name_is_enough_when_it_has_no_constants() -> None:
    assert make(activation="relu2").act == Activation("relu2")
    assert make().act == Activation("swiglu")
    with pytest.raises(ConfigError, match="needs beta"):
        make(activation="situ")


def test_rows_that_no_int32_can_count_are_refused_and_the_last_that_fit_are_not() -> None:
    most = INT32_MAX // (4 * 3)
    assert make(max_tokens_per_rank=most, ranks=3).max_tokens_per_rank == most
    with pytest.raises(ConfigError, match=r"bad max_tokens_per_rank .*int32"):
        make(max_tokens_per_rank=most + 1, ranks=3)


def test_every_field_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        EPConfig(16, 4, 64, 128, 32)  # type: ignore[misc]


# ---- defaults


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 1024), st.integers(1, 64))
def test_slots_default_as_documented(E: int, R: int) -> None:
    home = -(-E // R)
    want = {"exact": home, "static": min(home, max(4, -(-home // 8)))}
    for policy in ("static", "bounded", "auto", "exact"):
        cfg = make(num_experts=E, top_k=1, ranks=R, policy=policy)
        assert cfg.experts_per_rank == home
        assert (
            cfg.slots == cfg.slots_per_rank == (0 if R == 1 else want.get(policy, want["static"]))
        )


def test_sizes_given_are_kept_and_derived_ones_follow() -> None:
    cfg = make(slots_per_rank=0, ranks=2)
    assert cfg.slots == 0
    assert make().w13_rows == 256
    assert make(activation="relu2").w13_rows == 128


# ---- identity

CHANGES: dict[str, object] = {
    "num_experts": 17,
    "top_k": 5,
    "hidden_size": 96,
    "intermediate_size": 256,
    "max_tokens_per_rank": 33,
    "ranks": 3,
    "slots_per_rank": 7,
    "policy": "bounded",
    "epsilon": 0.03,
    "reduction": "exact",
    "row_alignment": 2,
    "in_flight": 2,
    "activation": Activation.situ(),
    "weight_format": "mxfp4",
    "timeout_s": 61.0,
    "load_timeout_s": 61.0,
    "runner": "reference",
    "route_weight": "input",
    "expert_bias": True,
    "gate_up_order": "up_first",
    "gate_up_interleave": 8,
    "decode_cache_bytes": 5,
}


def test_the_digest_changes_with_every_field() -> None:
    assert set(CHANGES) == {f.name for f in dataclasses.fields(EPConfig)}
    base = make(slots_per_rank=4, ranks=2)
    digests = {base.digest()} | {
        base.replace(**{name: value}).digest() for name, value in CHANGES.items()
    }
    assert len(digests) == 1 + len(CHANGES)
    constants = [Activation.situ(4.0, 25.0), Activation.situ(4.0, 24.0), Activation.situ(3.0, 25.0)]
    assert len({base.replace(activation=a).digest() for a in constants}) == 3


def test_equal_configs_have_equal_digests_however_they_were_written() -> None:
    written = make(slots_per_rank=4, ranks=2, activation="swiglu")
    resolved = make(ranks=2, activation=Activation("swiglu"))
    assert written == resolved
    assert written.digest() == resolved.digest()
    assert len(written.digest()) == 64


def test_a_config_survives_json() -> None:
    cfg = make(activation=Activation.situ(), ranks=2)
    values = json.loads(json.dumps(cfg.to_dict()))
    values["activation"] = Activation(**values["activation"])
    assert EPConfig(**values) == cfg


def test_configs_are_frozen_and_replace_validates_again() -> None:
    cfg = make()
    for field in dataclasses.fields(cfg):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cfg, field.name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.act.kind = "relu2"  # type: ignore[misc]
    with pytest.raises(ConfigError, match="bad top_k"):
        cfg.replace(top_k=99)
    assert cfg.replace(top_k=5).top_k == 5
    assert cfg.top_k == 4
