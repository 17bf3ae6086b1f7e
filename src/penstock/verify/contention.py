"""A process that disturbs others: it loads a core and memory, and pauses, at random.

    python -m penstock.verify.contention SEED

runs until its standard input ends, so it ends with the process that started it.
"""

from __future__ import annotations

import random
import select
import sys

import numpy as np

from penstock.utils.clock import SystemClock

_MOST_BUSY_SECONDS, _MOST_IDLE_SECONDS = 0.5, 0.2
_MOST_ELEMENTS = 4 << 20


def main(arguments: list[str]) -> int:
    rng, clock = random.Random(int(arguments[0])), SystemClock()
    while True:
        end = clock.now() + rng.uniform(0, _MOST_BUSY_SECONDS)
        while clock.now() < end:
            memory = np.full(rng.randrange(1, _MOST_ELEMENTS), 1.0, dtype=np.float32)
            memory[:: rng.randrange(1, 64)] += 1.0
        ready, _, _ = select.select([sys.stdin], [], [], rng.uniform(0, _MOST_IDLE_SECONDS))
        if ready:
            return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
