"""Triton's interpreter turns a loop's bounds into integers as NumPy 2.4 does not allow any more: arrays of one element."""

from __future__ import annotations

import importlib
from typing import Any

from triton import knobs

if knobs.runtime.interpret:
    _interpreter = importlib.import_module("triton.runtime.interpreter")
    _patch_lang_tensor = _interpreter._patch_lang_tensor

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _interpreter._patch_lang_tensor = _patch_with_index
