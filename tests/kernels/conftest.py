"""Makes a row of `tl.dot` independent of the other rows in Triton's interpreter, as it is on a GPU.

The interpreter multiplies by numpy's BLAS, whose kernels for some processors round a row by its place among the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _dot(self: InterpreterBuilder, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
    """a [..., M, K] @ b [..., K, N] + d; no kernel of ours multiplies 8-bit floats."""
    left, right = a.data.astype(d.data.dtype, copy=False), b.data.astype(d.data.dtype, copy=False)
    product = np.matmul(left[..., :, None, :], right[..., None, :, :])[..., 0, :]
    return TensorHandle(product + d.data, d.dtype.scalar)


@pytest.fixture(scope="session", autouse=True)
def dot_row_by_row() -> None:
    InterpreterBuilder.create_dot = _dot
