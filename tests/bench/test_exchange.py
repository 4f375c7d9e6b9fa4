"""The exchange bench measures a step that is right, and counts the bytes that it moves."""

from __future__ import annotations

import torch

from evenep.bench.exchange import RANKS, calls, make_case, route_call
from evenep.kernels.combine import combine_exact_ref

DEV = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T, H, K = 3, 16, 5


def test_its_step_is_the_one_the_kernels_make_of_the_ids() -> None:
    case = make_case(T, H, K, DEV)
    route, dest_TK, row_TK = route_call(case)
    route()
    assert torch.equal(dest_TK, case.dest_TK)
    assert torch.equal(row_TK, case.row_TK)
    run = calls(case)
    for name in ("dispatch", "settle", "combine_exact"):
        run[name]()
    want = combine_exact_ref(case.dest_TK, case.row_TK, case.weights_TK, case.rows)
    assert torch.equal(case.y_TH, want)


def test_bytes_are_those_of_the_rows_read_and_written() -> None:
    case = make_case(T, H, K, DEV)
    pairs = sum(len(set(dest)) for dest in case.dest_TK.tolist())
    row = 2 * H
    assert case.moved["dispatch"] == (T + pairs) * row
    assert case.moved["combine_exact"] == (T * K + T) * row
    assert case.moved["combine_compact"] == (pairs + T) * row
    assert len(case.rows) == RANKS
