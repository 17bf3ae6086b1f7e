"""Every test runs with the checks that production leaves out: poisoned KV blocks, and integrity after every step."""

from __future__ import annotations

import os
import signal

import torch

os.environ.setdefault("PENSTOCK_DEBUG", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what it runs in the background, and every child inherits it: none would end at an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # Triton looks when it is first imported: without a GPU its kernels run in its interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
