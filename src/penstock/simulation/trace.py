"""What has happened in a world: a digest of all of it, and the last events for whoever must understand one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

_KEPT = 4000
_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Event:
    """`subjects` are the requests, transfers and blocks that it concerns."""

    tick: int
    engine: str
    text: str
    subjects: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.tick:5} {self.engine:8} {self.text} {' '.join(self.subjects)}"


class ViolationError(AssertionError):
    """A promise was broken. `subjects` says which requests or blocks to look at."""

    def __init__(self, message: str, *subjects: str) -> None:
        super().__init__(message)
        self.subjects = subjects


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
        """Equal for runs in which the same things happened in the same order."""
        return self._digest.hexdigest()

    def about(self, subjects: Iterable[str]) -> list[str]:
        """The last events that concern one of these, or all of them when none does."""
        wanted = set(subjects)
        # A block's story is that of its requests too.
        found = [event for event in self._events if wanted & set(event.subjects)]
        return [str(event) for event in (found or list(self._events))[-_SHOWN:]]


def block_name(block_id: int) -> str:
    return f"b{block_id}"
