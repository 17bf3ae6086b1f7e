"""Every test runs with the checks that production leaves out: poisoned KV blocks, and integrity after every step."""

from __future__ import annotations

import os

os.environ.setdefault("PENSTOCK_DEBUG", "1")
