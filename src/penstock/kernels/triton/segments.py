"""Which segment of rows a program has a tile of, where only the device knows the segments.

Segment r has the rows from starts[r] to starts[r + 1]. Its tiles of `rows` rows each have the numbers from
starts[r] // rows + r on, of which it may need fewer than it has; so num_rows // rows + num_segments + 1 programs
suffice for any division of num_rows rows, and a program finds its segment by a binary search: the CPU needs only
shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_segment(starts_ptr, tile, num_segments, rows: tl.constexpr):
    """The segment r, or num_segments, with start[r] // rows + r <= tile < start[r + 1] // rows + r + 1."""
    low = 0
    high = num_segments + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_right = tl.load(starts_ptr + middle) // rows + middle <= tile
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit
def first_row(start, tile, segment, rows: tl.constexpr):
    """Returns the first row of a tile, counted from the start of its segment."""
    return (tile - start // rows - segment) * rows
