"""Checks that all ranks of an engine have the same arithmetic and the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.messages.kv_transfer import ShardId
from penstock.messages.tensor_rows import TensorRows
from penstock.utils.digest import DIGEST_BYTES, add_digests, digest, subtract_digests
from penstock.utils.errors import ConfigError
from penstock.worker.messages import WorkerFacts


def check_arithmetic(facts: Sequence[WorkerFacts]) -> None:
    """Raises ConfigError if a rank's arithmetic gives other last bits than the first rank's."""
    first = facts[0]
    for each in facts:
        if (each.device, each.arithmetic) != (first.device, first.arithmetic):
            raise ConfigError(
                f"rank {first.shard} computes on {first.device} with {first.arithmetic}, and rank {each.shard} on "
                f"{each.device} with {each.arithmetic}: their results differ in the last bits. Give all ranks devices "
                "of one kind and the same release; on CPUs PENSTOCK_CPU_ISA chooses an instruction set of an "
                "arithmetic that all of them have"
            )


def digest_weights(facts: Sequence[WorkerFacts]) -> bytes:
    """Returns the digest [16 bytes] of every tensor that any rank has read, independent of how the ranks divide them.
    Raises ConfigError if two ranks have read different bytes.
    """
    tensors: dict[str, _Tensor] = {}
    for each in facts:
        for rows in each.read:
            tensors.setdefault(rows.name, _Tensor(rows.dtype, rows.shape, rows.axis)).add(each.shard, rows)
    return digest(*(part for name in sorted(tensors) for part in tensors[name].identity(name)))


@dataclass(slots=True)
class _Tensor:
    """The intervals of one tensor that the ranks have read, each once; all of rows or all of columns."""

    dtype: str
    shape: tuple[int, ...]
    axis: int
    intervals: dict[tuple[int, int], tuple[bytes, ShardId]] = field(
        default_factory=dict[tuple[int, int], tuple[bytes, ShardId]]
    )

    def add(self, shard: ShardId, rows: TensorRows) -> None:
        found, reader = self.intervals.setdefault((rows.first, rows.end), (rows.digest, shard))
        assert self.axis == rows.axis, f"{rows.name} is read by rows and by columns"
        if (found, self.dtype, self.shape) != (rows.digest, rows.dtype, rows.shape):
            raise _differs(rows.name, (reader, shard))

    def identity(self, name: str) -> tuple[bytes, bytes]:
        """Returns the tensor's name, type and shape, and the digest of all its rows."""
        size = self.shape[self.axis]
        total = self._digests_before(name).get(size)
        assert total is not None, f"{name}: {sorted(self.intervals)} are not all of its {size} rows"
        return repr((name, self.dtype, self.shape)).encode(), total

    def _digests_before(self, name: str) -> dict[int, bytes]:
        """Returns the digest of all rows before each row at which an interval begins or ends, starting with row 0.

        Every interval adds its digest from its first row to its end. If several sequences of intervals lead to a row,
        they must agree: some ranks read a whole tensor and others parts of it.
        """
        steps: dict[int, list[tuple[int, int]]] = {}
        for first, end in self.intervals:
            steps.setdefault(first, []).append((first, end))
            steps.setdefault(end, []).append((first, end))
        before, open_rows = {0: bytes(DIGEST_BYTES)}, [0]
        while open_rows:
            row = open_rows.pop()
            for first, end in steps.get(row, ()):
                own, _ = self.intervals[first, end]
                other = end if row == first else first
                reached = add_digests(before[row], own) if row == first else subtract_digests(before[row], own)
                if other not in before:
                    before[other] = reached
                    open_rows.append(other)
                elif before[other] != reached:
                    raise _differs(name, (reader for _, reader in self.intervals.values()))
        return before


def _differs(name: str, readers: Iterable[ShardId]) -> ConfigError:
    ranks = ", ".join(map(str, sorted(set(readers))))
    return ConfigError(
        f"ranks {ranks} have read different weights of {name!r}: the model's folder must hold the same checkpoint "
        "on every host"
    )
