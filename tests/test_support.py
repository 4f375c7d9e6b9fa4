"""The support matrix: every refusal refuses, every registry agrees with it, the docs print it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from evenep import Activation, Engine, EPConfig, EPGroup, ExpertWeights, Hardware, launch, support
from evenep.activation import KINDS
from evenep.config import GATE_UP_ORDERS, REDUCTIONS, ROUTE_WEIGHT_PLACES
from evenep.errors import ConfigError, LaunchError, UnsupportedError
from evenep.experts import RUNNERS
from evenep.experts.activations import GATED
from evenep.experts.registry import DEVICE_RUNNERS
from evenep.formats import FORMATS
from evenep.plan.policies import POLICIES
from evenep.transport import BY_DEVICE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- generated -->\n", "<!-- /generated -->\n"
CONFIG_AXES = ("policy", "weight_format", "runner", "reduction", "route_weight")
REFUSED = [c for c in support.CHOICES if c.refused]
FREE = Hardware(row_ps=1, read_ps=1, launch_ps=1, fetch_ps=1)


def make(**changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": 4,
        "top_k": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_tokens_per_rank": 8,
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


def names(axis: str) -> set[str]:
    return {c.name for c in support.choices(axis, supported=True)}


# ---- choices


@pytest.mark.parametrize("choice", REFUSED, ids=lambda c: f"{c.axis}-{c.name}")
def test_a_refused_choice_says_why_and_what_to_use_and_that_is_supported(
    choice: support.Choice,
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        support.require(choice.axis, choice.name, where="here")
    text = str(caught.value)
    assert text == f"here: {choice.axis} '{choice.name}' is refused: {choice.refused}. " + (
        f"Fix: use '{choice.nearest}'."
    )
    support.require(choice.axis, choice.nearest)


@pytest.mark.parametrize("choice", REFUSED, ids=lambda c: f"{c.axis}-{c.name}")
def test_a_refused_choice_is_refused_where_users_make_it(choice: support.Choice) -> None:
    def build(group: EPGroup) -> None:
        cfg = make()
        x, weights = torch.zeros(1, 64).bfloat16(), torch.ones(1, 2)
        with Engine(cfg, group, ExpertWeights.random(cfg), hardware=FREE) as engine:
            x = x.to(getattr(torch, choice.name)) if choice.axis == "dtype" else x
            engine(x, torch.zeros(1, 2, dtype=torch.int64), weights)

    if choice.axis in CONFIG_AXES:
        with pytest.raises(UnsupportedError, match=choice.nearest):
            make(**{choice.axis: choice.name})
    elif choice.axis == "transport":
        with pytest.raises(UnsupportedError, match=choice.nearest):
            launch(build, 1, choice.name)
    elif choice.axis == "dtype":
        with pytest.raises(
            LaunchError, match=f"dtype '{choice.name}' is refused.*{choice.nearest}"
        ):
            launch(build, 1, "threads")
    else:  # no CUDA here to make a tensor on: the engine asks with these words
        assert choice.axis == "device"


@pytest.mark.parametrize("axis", sorted({c.axis for c in support.CHOICES}))
def test_an_unknown_value_lists_what_is_supported(axis: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        support.require(axis, "magic")
    assert f"unknown {axis}" in str(caught.value)
    for name in names(axis):
        assert f"'{name}'" in str(caught.value)
    assert not any(f"'{c.name}'" in str(caught.value) for c in REFUSED if c.axis == axis)


def test_every_choice_is_listed_once_and_explained() -> None:
    assert max(Counter((c.axis, c.name) for c in support.CHOICES).values()) == 1
    for c in support.CHOICES:
        assert bool(c.refused) == bool(c.nearest) != bool(c.note), c


@pytest.mark.parametrize("axis", CONFIG_AXES)
def test_every_supported_choice_of_a_config_builds(axis: str) -> None:
    for name in names(axis):
        partner = {"weight_format": "mxfp4"} if name == "gluon" else {}
        assert getattr(make(**{axis: name}, **partner), axis) == name


def test_a_runner_builds_with_exactly_its_formats() -> None:
    assert set(support.RUNNER_FORMATS) == names("runner")
    for runner, formats in support.RUNNER_FORMATS.items():
        for fmt in names("weight_format"):
            if fmt in formats:
                make(runner=runner, weight_format=fmt)
            else:
                with pytest.raises(UnsupportedError):
                    make(runner=runner, weight_format=fmt)


def test_registries_and_supported_choices_are_the_same_sets() -> None:
    assert names("weight_format") == set(FORMATS)
    assert names("runner") == {"auto", *RUNNERS, *DEVICE_RUNNERS}
    assert names("transport") == {name for kinds in BY_DEVICE.values() for name in kinds}
    assert {d: set(t) for d, t in support.TRANSPORTS_OF.items()} == {
        d: set(kinds) for d, kinds in BY_DEVICE.items()
    }
    assert names("device") == set(BY_DEVICE)
    assert names("policy") == set(POLICIES)
    assert names("activation") == set(KINDS) == {*GATED, "relu2"}
    assert names("reduction") == set(REDUCTIONS)
    assert names("route_weight") == set(ROUTE_WEIGHT_PLACES)
    assert all(key == entry.name for key, entry in FORMATS.items())
    assert all(key == entry.name for key, entry in RUNNERS.items())
    assert all(key == e.name for kinds in BY_DEVICE.values() for key, e in kinds.items())


# ---- rules

BROKEN: dict[str, list[dict[str, object]]] = {
    "exact needs slots": [{"policy": "exact", "ranks": 2, "slots_per_rank": 1}],
    "mxfp4 groups": [
        {"weight_format": "mxfp4", "hidden_size": 48},
        {"weight_format": "mxfp4", "intermediate_size": 80},
    ],
    "fp8 blocks": [{"weight_format": "fp8", "intermediate_size": 192}],
    "gate/up interleave": [
        {"gate_up_interleave": 2},
        {"gate_up_interleave": 1, "activation": "relu2"},
        {"gate_up_interleave": 8, "intermediate_size": 100},
    ],
    "gluon format": [{"runner": "gluon"}, {"runner": "gluon", "weight_format": "fp8"}],
    "deepgemm format": [{"runner": "deepgemm", "weight_format": "mxfp4"}],
}
JUST_FINE: list[dict[str, object]] = [
    {"policy": "exact", "ranks": 2, "slots_per_rank": 2},
    {"policy": "exact", "ranks": 1, "slots_per_rank": 0},
    {"policy": "bounded", "ranks": 2, "slots_per_rank": 1},
    {"weight_format": "mxfp4", "hidden_size": 96, "intermediate_size": 160},
    {"weight_format": "bf16", "hidden_size": 48, "intermediate_size": 80},
    {"weight_format": "fp8", "intermediate_size": 128, "hidden_size": 200},
    {"weight_format": "fp8", "intermediate_size": 192, "activation": "relu2"},
    {"gate_up_interleave": 8, "intermediate_size": 104},
    {"gate_up_interleave": 1, "intermediate_size": 33},
    {"activation": Activation("relu2"), "intermediate_size": 33},
]


def test_every_rule_has_a_config_that_breaks_it() -> None:
    assert set(BROKEN) == {rule.name for rule in support.RULES}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, c) for name, all_of in BROKEN.items() for c in all_of]
)
def test_a_broken_rule_refuses_with_its_reason_and_the_nearest_choice(
    name: str, changes: dict[str, object]
) -> None:
    rule = next(r for r in support.RULES if r.name == name)
    with pytest.raises(UnsupportedError) as caught:
        make(**changes)
    for words in ("EPConfig: ", rule.reason, "got ", f"Fix: use {rule.nearest}."):
        assert words in str(caught.value)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("changes", JUST_FINE, ids=str)
def test_what_only_just_keeps_the_rules_builds(changes: dict[str, object]) -> None:
    make(**changes)


def test_the_interleave_refusal_names_what_stands_in_its_way() -> None:
    for changes in BROKEN["gate/up interleave"]:
        with pytest.raises(UnsupportedError, match=r"got (gate_up_interleave|intermediate_size)="):
            make(**changes)
    assert GATE_UP_ORDERS == ("gate_first", "up_first")


# ---- docs


def test_the_page_of_the_docs_is_the_matrix() -> None:
    page = DOCS.read_text()
    before, _, rest = page.partition(BEGIN)
    table, found, after = rest.partition(END)
    assert found, f"{DOCS.name} has lost its markers"
    update = (
        "docs/support.md is out of date. Update it with:\n"
        "  python -m evenep.support > table.md\n"
        f"and put table.md between {BEGIN.strip()} and {END.strip()}."
    )
    assert table == "\n" + support.as_markdown() + "\n", update
    assert before.startswith("# ")
    assert after == ""


def test_the_module_prints_the_matrix() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "evenep.support"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == support.as_markdown()


def test_the_matrix_has_a_line_per_choice_and_rule() -> None:
    lines = support.as_markdown().splitlines()
    for c in support.CHOICES:
        row = next(line for line in lines if line.startswith(f"| {c.axis} | `{c.name}` |"))
        assert (c.refused or c.note) in row
        assert ("refused" in row) == bool(c.refused)
    for rule in support.RULES:
        assert f"| {rule.name} | {rule.reason} | {rule.nearest} |" in lines
