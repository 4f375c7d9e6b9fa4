"""Which group a row block belongs to, from counts on the device, in Gluon.

G groups, GB places of the table (a power of two), ROWS x rows of a block.

Worked example: counts (3, 0, 18), starts (0, -, 8), ROWS = 16. Blocks per group 1, 0, 2, their
running sums 1, 1, 3. Block 2: two running sums are <= 2, so group 2; it is that group's second, so
receive row 8 + 16 = 24, scratch row 3 + 16 = 19, and 2 rows are left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def group_table(start_G, count_G, G, GB: gl.constexpr, ROWS: gl.constexpr):
    """Per group: index, first row, rows, running sums of row blocks and of rows."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    g = gl.arange(0, GB, layout=L)
    start = gl.load(start_G + g, mask=g < G, other=0)
    count = gl.load(count_G + g, mask=g < G, other=0)
    blocks_to = gl.associative_scan((count + ROWS - 1) // ROWS, 0, _add)
    return g, start, count, blocks_to, gl.associative_scan(count, 0, _add)


@gluon.jit
def find_block(table, block, ROWS: gl.constexpr):
    """Group of a row block, its first receive and scratch rows, and its rows from there on."""
    g, start, count, blocks_to, rows_to = table
    group = gl.sum((blocks_to <= block).to(gl.int32), 0)
    here = g == group
    done = (block - blocks_to + (count + ROWS - 1) // ROWS) * ROWS
    receive_row = gl.sum(gl.where(here, start + done, 0), 0)
    scratch_row = gl.sum(gl.where(here, rows_to - count + done, 0), 0)
    return group, receive_row, scratch_row, gl.sum(gl.where(here, count - done, 0), 0)
