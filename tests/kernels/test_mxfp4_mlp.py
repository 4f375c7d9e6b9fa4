"""The host's side of the MXFP4 launches, with the kernel replaced by one that takes notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evenep import Activation
from evenep.kernels import mxfp4_gluon, mxfp4_layout
from evenep.kernels.mxfp4_mlp import ExpertMLP, Shape

H, FFN, G, N, M, SMS = 160, 96, 5, 40, 20, 132
Note = tuple[str, int, tuple[Any, ...], dict[str, Any]]


class Kernel:
    """Stands in for the jitted kernel and for what compiling it returns."""

    def __init__(self, notes: list[Note], word: str = "compiled") -> None:
        self.notes, self.word = notes, word

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> Kernel:
            self.notes.append((self.word, grid[0], args, options))
            return Kernel(self.notes, "known")

        return launch


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Note]:
    taken: list[Note] = []
    monkeypatch.setattr(mxfp4_gluon, "mxfp4_grouped_gemm", Kernel(taken))
    return taken


def weights(groups: int = G) -> dict[str, Tensor]:
    made = {}
    for name, (rows, columns) in {"w13": (2 * FFN, H), "w2": (H, FFN)}.items():
        words = mxfp4_layout.word_shape(rows, columns)
        scales = mxfp4_layout.scale_shape(rows, columns)
        made[f"{name}_words"] = torch.zeros(groups, *words, dtype=torch.int32)
        made[f"{name}_scales"] = torch.zeros(groups, *scales, dtype=torch.int32)
    return made


class Caller:
    def __init__(self, **choices: Any) -> None:
        self.mlp = ExpertMLP(Shape(H, FFN, Activation.situ(), "activation"), **choices)
        self.rows = torch.zeros(N, H, dtype=torch.bfloat16)
        self.scratch = torch.zeros(M, FFN, dtype=torch.bfloat16)
        self.weight = torch.ones(N)
        self.counts = torch.zeros(G, dtype=torch.int32)
        self.tensors = weights()

    def __call__(self, likely: int = 1, sms: int = SMS, weight: Tensor | None = None) -> None:
        self.mlp(
            self.rows, weight, self.counts, self.counts, self.tensors, self.scratch,
            groups=len(self.counts), likely=likely, sms=sms,
        )  # fmt: skip


def test_two_launches_and_the_second_may_start_early(notes: list[Note]) -> None:
    Caller()()
    assert [n[0] for n in notes] == ["compiled"] * 2
    assert [n[3].get("launch_pdl", False) for n in notes] == [False, True]
    assert not any(n[3]["enable_fp_fusion"] for n in notes)
    notes.clear()
    Caller(overlap=False)()
    assert not any(n[3].get("launch_pdl", False) for n in notes)


def test_a_launch_that_is_known_is_found_again_and_takes_the_new_arguments(
    notes: list[Note],
) -> None:
    call = Caller()
    call(weight=call.weight)
    call.counts = call.counts.clone()
    call(weight=call.weight.clone())
    assert [n[0] for n in notes] == ["compiled", "compiled", "known", "known"]
    for first, again in zip(notes[:2], notes[2:], strict=True):
        assert again[1] == first[1], "the same grid"
        assert len(again[2]) == len(first[2])
        assert again[2][:6] == first[2][:6], "the same descriptors"
        assert again[2][6] is call.counts
    assert notes[2][2][-2] is call.scratch
    assert notes[3][2][-2] is call.rows
    assert notes[3][2][9] is None, "the route weight is gate+up's alone"


def test_whatever_a_launch_depends_on_makes_another(notes: list[Note]) -> None:
    call = Caller()
    call()

    def makes_another() -> bool:
        notes.clear()
        call()
        return [n[0] for n in notes] == ["compiled"] * 2

    for change in (
        {"rows": torch.zeros(N, H, dtype=torch.bfloat16)},
        {"tensors": weights()},
        {"counts": torch.zeros(3, dtype=torch.int32), "tensors": weights(3)},
    ):
        for name, value in change.items():
            setattr(call, name, value)
        notes.clear()
        call()
        assert notes[0][0] == "compiled", list(change)
        assert not makes_another()
    for options in ({"likely": 40}, {"weight": call.weight}):
        notes.clear()
        call(**options)  # type: ignore[arg-type]
        assert notes[0][0] == "compiled", options


def test_fewer_sms_are_fewer_programs_of_the_same_kernel(notes: list[Note]) -> None:
    call = Caller()
    call()
    call(sms=10)
    assert [n[0] for n in notes[2:]] == ["known", "known"]
    assert [n[1] for n in notes] == [2 * SMS, 2 * SMS, 20, 20]
