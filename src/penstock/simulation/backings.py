"""What can stand behind the engines of a world, by name: a new connector joins the simulation with one entry here."""

from __future__ import annotations

from collections.abc import Callable

from penstock.simulation.backing import Backing, BackingContext, NoBacking, StoreBacking
from penstock.simulation.tiers import OffloadBacking

BACKINGS: dict[str, Callable[[BackingContext], Backing]] = {
    "none": lambda context: NoBacking(),
    "store": StoreBacking,
    "tiers": OffloadBacking,
}
