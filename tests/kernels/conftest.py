"""Triton's interpreter makes integers of loop bounds, arrays of one element, which NumPy 2.4 no longer allows."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

if importlib.util.find_spec("triton") and importlib.import_module("triton").knobs.runtime.interpret:
    _interpreter = importlib.import_module("triton.runtime.interpreter")
    _patch_lang_tensor = _interpreter._patch_lang_tensor

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    _interpreter._patch_lang_tensor = _patch_with_index
