"""The kernels of a GPU, in Triton: one file per kernel, beside it the function that launches it.

A launcher takes what the wrapper of its name in `penstock.kernels` takes, allocates what it returns and waits for
nothing. Without a GPU the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors and slowly, which
is how the tests compare it with the torch reference; `tl.dot` of bfloat16 is wrong there, that of other types right.
"""

from __future__ import annotations

import importlib

from triton import knobs

if knobs.runtime.interpret:
    # The interpreter makes integers of loop bounds, which are arrays of one element: NumPy 2.4 no longer allows that.
    _interpreter = importlib.import_module("triton.runtime.interpreter")
    _patch_lang_tensor = _interpreter._patch_lang_tensor

    def _patch_with_index(tensor: type, scope: object) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _interpreter._patch_lang_tensor = _patch_with_index
