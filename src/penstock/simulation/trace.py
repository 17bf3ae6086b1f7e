"""What has happened in a world: a digest of all of it, and the last events, to understand a violation."""

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
        """The last events that concern one of these or whatever was last named beside them; all when there is none."""
        wanted = set(subjects)
        last = [event for event in self._events if wanted & set(event.subjects)][-_LAST:]
        named = {name for event in last for name in event.subjects if not is_block(name)}
        wanted |= named | {name.partition("/")[0] for name in named}
        found = [event for event in self._events if wanted & set(event.subjects)]
        return [str(event) for event in (found or list(self._events))[-_SHOWN:]]


def block_name(engine: str, block_id: int) -> str:
    """How traces call a block."""
    return f"{engine}[{block_id}]"


def is_block(name: str) -> bool:
    return name.endswith("]")


def hash_name(block_hash: bytes) -> str:
    """How traces call what a block holds."""
    return f"#{block_hash.hex()[:8]}"
