"""Every exchange kernel compiled for sm_90 as its launcher launches it, and what must hold."""

from __future__ import annotations

import sys

import torch

from .sm90 import record, resources

R, K, E, B, G = 8, 16, 896, 16, 128
SUMS = ("_combine_exact", "_combine_compact", "_fold")
PAYLOAD = (*SUMS, "_dispatch", "_settle", "_fetch")


def launch_all() -> None:
    """One launch of every kernel at the sizes that matter."""
    from evenep.kernels import combine, count, dispatch, fetch, positions, settle

    ptrs_R = torch.zeros(R, dtype=torch.int64)
    group_G, one = torch.zeros(G, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for T in (1, 2048):
        scratch = count.RouteScratch.make(T, K, E, "cpu")
        ints_TK = torch.zeros(T, K, dtype=torch.int32)
        weights_TK = torch.zeros(T, K)
        for ids_TK in (ints_TK, ints_TK.long()):
            count.count_routes(ids_TK, scratch, E)
            take_ER = torch.zeros(E, R, dtype=torch.int32)
            positions.place_routes(
                ids_TK, scratch, take_ER, take_ER, 1, ints_TK, ints_TK, 2**31 - 1
            )
        count.push_counts(scratch, (0, 1, 2, 3, T), ptrs_R, 1, E)
        for H in (3584, 7168):
            x_TH = torch.zeros(T, H, dtype=torch.bfloat16)
            for w in (None, weights_TK):
                dispatch.dispatch(x_TH, w, ints_TK, ints_TK, ptrs_R, ptrs_R, ptrs_R)
                combine.combine_exact(ints_TK, ints_TK, w, ptrs_R, x_TH)
            combine.combine_compact(ints_TK, ints_TK, ptrs_R, x_TH)
            if T > 1:
                for w in (None, weights_TK[:, 0].contiguous()):
                    settle.settle(x_TH, w, one, group_G, group_G, one, 16)
                    combine.fold(x_TH, w, one, group_G, group_G, one, 16)
    window_RW = torch.zeros(R, count.HEADER + E, dtype=torch.int32)
    count.check_headers(window_RW, one)
    ints = torch.zeros(E, dtype=torch.int32)
    src = torch.zeros(4, R, dtype=torch.int64)
    fetch.fetch_slots(ints[:B], ints[:B], ints, ints, src, (4096, 256, 2048, 130), ptrs_R[:4], 8)


def main() -> None:
    """Say what each kernel takes; fail on a spill or on narrow payload accesses."""
    made = record()
    launch_all()
    for name, kernel, grid in made:
        used, ptx = resources(kernel), kernel.asm["ptx"]
        lines = [line for line in ptx.splitlines() if ".v4.b32" in line or ".v2.b64" in line]
        loads, stores = (sum(f"{kind}.global" in x for x in lines) for kind in ("ld", "st"))
        fma = ptx.count("fma.rn.f32")
        sys.stdout.write(f"{name} grid {grid} warps {kernel.metadata.num_warps} {used} ")
        sys.stdout.write(f"shared {kernel.metadata.shared} wide {loads} {stores} fma {fma}\n")
        assert used["LOCAL"] + used["STACK"] == 0, f"{name} spills"
        if name in PAYLOAD:
            assert min(loads, stores) > 0, f"{name}: payload isn't accessed 16 bytes at a time"
        if name in SUMS:
            assert not fma, f"{name} fuses multiply and add"


if __name__ == "__main__":
    main()
