"""The GPU kernels in Triton: one file per kernel, with the function that launches it.

A launcher takes the arguments of the wrapper of the same name in `penstock.kernels`, allocates its results and does not
wait. Without a GPU the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors and slowly, which
the tests use to compare it with the torch reference; there `tl.dot` is wrong for bfloat16 and correct for other types.
"""

from __future__ import annotations

import importlib

from triton import knobs

if knobs.runtime.interpret:
    # The interpreter converts loop bounds, arrays of one element, to integers, which NumPy 2.4 no longer allows.
    _interpreter = importlib.import_module("triton.runtime.interpreter")
    _patch_lang_tensor = _interpreter._patch_lang_tensor

    def _patch_with_index(tensor: type, scope: object) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _interpreter._patch_lang_tensor = _patch_with_index
