"""The events of a world: a digest of all of them, and the last ones, to diagnose a violation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

_KEPT = 4000
_SHOWN = 30
_LAST = 2


@dataclass(frozen=True, slots=True)
class Event:
    """`subjects` are the requests, transfers and blocks concerned."""

    tick: int
    engine: str
    text: str
    subjects: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.tick:5} {self.engine:8} {self.text} {' '.join(self.subjects)}"


class ViolationError(AssertionError):
    """A check failed. `subjects` are the requests or blocks to look at."""

    def __init__(self, message: str, *subjects: str) -> None:
        super().__init__(message)
        self.subjects = subjects


def describe(error: Exception) -> tuple[str, tuple[str, ...]]:
    """Returns what is wrong with a world in which this was raised, and the subjects to look at."""
    if isinstance(error, ViolationError):
        return str(error), error.subjects
    what = "an assertion failed" if isinstance(error, AssertionError) else type(error).__name__
    return f"{what}: {error}", ()


class Trace:
    def __init__(self) -> None:
        self.tick = 0
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._digest = blake2b(digest_size=16)

    def note(self, engine: str, text: str, *subjects: str) -> None:
        event = Event(self.tick, engine, text, subjects)
        self._events.append(event)
        self._digest.update(str(event).encode())

    def digest(self) -> str:
        """Returns a digest that is equal for runs with the same events in the same order."""
        return self._digest.hexdigest()

    def about(self, subjects: Iterable[str]) -> list[str]:
        """Returns the last events that concern one of these, or a subject that was last named with them; all events if
        there is none.
        """
        wanted = set(subjects)
        last = [event for event in self._events if wanted & set(event.subjects)][-_LAST:]
        named = {name for event in last for name in event.subjects if not is_block(name)}
        wanted |= named
        found = [event for event in self._events if wanted & set(event.subjects)]
        return [str(event) for event in (found or list(self._events))[-_SHOWN:]]


def block_name(engine: str, block_id: int) -> str:
    """Returns the name of a block in traces."""
    return f"{engine}[{block_id}]"


def is_block(name: str) -> bool:
    return name.endswith("]")


def hash_name(block_hash: bytes) -> str:
    """Returns the name of a block's content in traces."""
    return f"#{block_hash.hex()[:8]}"
