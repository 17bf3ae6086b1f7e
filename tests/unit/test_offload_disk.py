"""The disk tier on a real disk: it loads only intact chunks, whatever happened to the files or to their writer."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.kv_transfer.offload import OffloadKey
from penstock.kv_transfer.offload.manager import LookupResult, OffloadingManager
from penstock.kv_transfer.offload.messages import StateChunks
from penstock.kv_transfer.offload.policies import LRUPolicy
from penstock.kv_transfer.offload.region import OffloadRegion
from penstock.kv_transfer.offload.tiers import chunk_file
from penstock.kv_transfer.offload.tiers.base import JobResult, TransferJob
from penstock.kv_transfer.offload.tiers.disk import DiskTier, DiskTierConfig
from penstock.utils.digest import digest
from penstock.utils.errors import ConfigError
from tests.unit.offload_fakes import content, make_key

CHUNK = 2 * chunk_file._PAGE
HEAD = chunk_file._PAGE
FILE = HEAD + CHUNK
FINGERPRINT = b"\x01" * 32
NUM_KILLS = 20


class Disk:
    """A tier with a region of its own, controlled job by job."""

    def __init__(self, path: Path, num_files: int = 100, fingerprint: bytes = FINGERPRINT, **options: int) -> None:
        self.region = OffloadRegion(64, CHUNK)
        self.tier = DiskTier(DiskTierConfig(path, num_files * FILE, **options), fingerprint, self.region)
        self.num_jobs = 0

    def submit(self, keys: Sequence[OffloadKey], is_promotion: bool, first_chunk: int = 0) -> bool:
        self.num_jobs += 1
        chunk_ids = tuple(range(first_chunk, first_chunk + len(keys)))
        for chunk_id, key in zip(chunk_ids, keys, strict=True):
            self.region.chunk(chunk_id)[:] = bytes(CHUNK) if is_promotion else content(key, CHUNK)
        digests = tuple(None if is_promotion or key[1][0] % 2 else digest(content(key, CHUNK)) for key in keys)
        job = TransferJob(self.num_jobs, tuple(keys), chunk_ids, digests, is_promotion)
        return self.tier.submit_load(job) if is_promotion else self.tier.submit_store(job)

    def finish(self) -> JobResult:
        self.tier.check_integrity()
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        self.tier.check_integrity()
        return result

    def store(self, *numbers: int) -> set[OffloadKey]:
        assert self.submit([make_key(number) for number in numbers], is_promotion=False)
        return set(self.finish().successful_keys)

    def load(self, numbers: Iterable[int]) -> set[OffloadKey]:
        return self.load_keys([make_key(number) for number in numbers])

    def load_keys(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Loads the keys, checks every byte and digest of the successful ones, and returns them."""
        assert self.submit(keys, is_promotion=True)
        result = self.finish()
        for key, attached in zip(result.successful_keys, result.digests, strict=True):
            assert self.region.chunk(keys.index(key)) == content(key, CHUNK)
            assert attached == (None if key[1][0] % 2 else digest(content(key, CHUNK)))
        assert result.num_bytes == CHUNK * len(result.successful_keys)
        return set(result.successful_keys)

    def present(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self.tier.lookup(make_key(number))]


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def file_of(path: Path, number: int) -> Path:
    (file,) = (file for file in files(path) if make_key(number)[1].hex() in file.name)
    return file


def keys(*numbers: int) -> set[OffloadKey]:
    return {make_key(number) for number in numbers}


def test_stored_chunks_can_be_loaded(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.store(1, 2, 3) == keys(1, 2, 3)
    assert disk.load([3, 1, 9]) == keys(1, 3)
    stats = disk.tier.stats()
    assert (stats.num_chunks, stats.num_stored, stats.num_loaded, stats.num_vanished) == (3, 3, 2, 1)
    assert not disk.tier.has_pending_work()
    disk.tier.shutdown()


def test_a_restart_finds_intact_files_and_deletes_others(tmp_path: Path) -> None:
    first = Disk(tmp_path)
    first.store(*range(10))
    first.tier.shutdown()
    folder = files(tmp_path)[0].parent
    cut = file_of(tmp_path, 3)
    cut.write_bytes(cut.read_bytes()[:-1])
    capitals = folder / (files(tmp_path)[0].stem.upper() + ".kv")
    for name in ("0123.tmp", "notes.txt", "0-zz.kv", "-1-00.kv", capitals.name):
        (folder / name).write_bytes(b"x" * FILE)
    (folder / "someone's").mkdir()
    second = Disk(tmp_path)
    assert second.present(range(10)) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert len(files(tmp_path)) == 9
    assert {event.key for event in second.tier.take_events()} == keys(0, 1, 2, 4, 5, 6, 7, 8, 9)
    assert second.load(range(10)) == keys(0, 1, 2, 4, 5, 6, 7, 8, 9)
    second.tier.shutdown()


def test_another_model_or_another_chunk_size_finds_nothing(tmp_path: Path) -> None:
    Disk(tmp_path).store(1)
    assert Disk(tmp_path, fingerprint=b"\x02" * 32).present([1]) == []
    other_size = DiskTier(DiskTierConfig(tmp_path, 10 * FILE), FINGERPRINT, OffloadRegion(4, CHUNK // 2))
    assert not other_size.lookup(make_key(1))
    assert Disk(tmp_path).present([1]) == [1]


def test_a_file_of_another_model_is_not_loaded(tmp_path: Path) -> None:
    Disk(tmp_path / "a", fingerprint=b"\x02" * 32).store(1)
    disk = Disk(tmp_path / "b")
    disk.store(1)
    file_of(tmp_path / "b", 1).write_bytes(file_of(tmp_path / "a", 1).read_bytes())
    assert disk.load([1]) == set()
    assert disk.tier.stats().num_corrupted == 1


def test_a_file_under_another_keys_name_is_not_loaded(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(1, 2)
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    assert disk.load([1, 2]) == keys(2)


@pytest.mark.long
def test_every_damaged_file_is_found_counted_and_deleted(tmp_path: Path) -> None:
    chance = random.Random(7)
    numbers = range(600)
    disk = Disk(tmp_path, num_files=600)
    for start in range(0, 600, 50):
        disk.store(*numbers[start : start + 50])
    damaged = sorted(chance.sample(numbers, 6))
    # One per cent of the files are damaged, half of them before the payload, half in the payload.
    for place, number in enumerate(damaged):
        offset = chance.randrange(HEAD) if place % 2 else chance.randrange(HEAD, FILE)
        file = file_of(tmp_path, number)
        data = bytearray(file.read_bytes())
        data[offset] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    loaded: set[OffloadKey] = set()
    for start in range(0, 600, 50):
        loaded |= disk.load(numbers[start : start + 50])
    assert loaded == keys(*numbers) - keys(*damaged)
    assert disk.tier.stats().num_corrupted == 6
    assert disk.present(damaged) == []
    assert len(files(tmp_path)) == 594
    assert disk.store(*damaged) == keys(*damaged), "the next store replaces them"


@pytest.mark.spread(1)
@pytest.mark.parametrize("num_bytes", [CHUNK, 1000], ids=["whole pages", "a part of one"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans())
def test_every_flipped_bit_and_truncation_is_detected(
    tmp_path: Path, num_bytes: int, place: float, bit: int, cut: bool
) -> None:
    folder = chunk_file.ChunkFolder(tmp_path, FINGERPRINT, num_bytes)
    key, region = make_key(1), OffloadRegion(2, num_bytes)
    source, target = region.chunk(0), mmap.mmap(-1, num_bytes)
    source[:] = content(key, num_bytes)
    folder.write(key, source, None)
    assert folder.read(key, memoryview(target)) is not None
    assert target[:] == source
    file = file_of(tmp_path, 1)
    data = bytearray(file.read_bytes())
    offset = int(place * (len(data) - 1))
    data[offset] ^= 1 << bit
    file.write_bytes(data[:offset] if cut else data)
    assert folder.read(key, memoryview(target)) is None


def test_a_folder_without_direct_io(tmp_path: Path, monkeypatch) -> None:
    """In-memory file systems of older kernels refuse O_DIRECT."""
    open_file = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(chunk_file.os, "open", refuse)
    disk = Disk(tmp_path)
    assert disk.store(1, 2) == keys(1, 2)
    assert disk.load([1, 2]) == keys(1, 2)


def test_the_limit_always_holds_and_the_least_recently_used_is_evicted(tmp_path: Path, monkeypatch) -> None:
    most = 0
    write_all = chunk_file._write_all

    def watch(descriptor: int, data: memoryview) -> None:
        nonlocal most
        write_all(descriptor, data)
        most = max(most, sum(os.path.getsize(file) for file in files(tmp_path)))

    monkeypatch.setattr(chunk_file, "_write_all", watch)
    disk = Disk(tmp_path, num_files=4, num_threads=1)
    disk.store(1, 2, 3, 4)
    disk.load([1])
    disk.tier.touch([make_key(2)])
    assert disk.store(5, 6) == keys(5, 6)
    assert disk.present(range(8)) == [1, 2, 5, 6]
    for number in range(10, 30):
        disk.store(number)
    assert most == 4 * FILE
    assert disk.tier.stats().num_evicted == 22
    assert disk.tier.stats().num_chunks == len(files(tmp_path)) == 4


def test_a_touched_prompt_loses_its_tail_first(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_files=3)
    disk.store(1, 2, 3)
    disk.tier.touch([make_key(1), make_key(2), make_key(3)])
    disk.store(4)
    assert disk.present([1, 2, 3]) == [1, 2]


def test_a_file_with_more_bytes_than_were_written_is_not_loaded(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(1)
    with file_of(tmp_path, 1).open("ab") as file:
        file.write(b"more")
    assert disk.load([1]) == set()
    assert files(tmp_path) == []


def test_a_chunk_that_is_stored_again_is_used_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_files=2)
    for number in (1, 2, 1, 3):
        assert disk.store(number) == keys(number)
    assert disk.present([1, 2, 3]) == [1, 3]


def test_a_victim_that_could_not_be_deleted_is_the_next_one(tmp_path: Path, monkeypatch) -> None:
    disk = Disk(tmp_path, num_files=3)
    for number in (1, 2, 3):
        disk.store(number)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "unlink", refuse)
        disk.store(4)
    disk.store(4)
    assert disk.present([1, 2, 3, 4]) == [2, 3, 4]


def test_a_victim_that_is_forgotten_while_it_cannot_be_deleted_is_never_found(tmp_path: Path, monkeypatch) -> None:
    disk = Disk(tmp_path, num_files=1)
    disk.store(1)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "unlink", refuse)
        disk.submit([make_key(2)], is_promotion=False)
        disk.tier.forget(make_key(1))
        assert disk.finish().successful_keys == ()
        assert disk.present([1, 2]) == []
        disk.tier.drain_jobs()
    assert disk.present([1, 2]) == []


def test_a_file_gets_its_name_after_its_bytes_are_on_the_medium(tmp_path: Path, monkeypatch) -> None:
    calls: list[tuple[str, object]] = []
    fsync, replace = os.fsync, os.replace

    def flush(descriptor: int) -> None:
        calls.append(("fsync", os.fstat(descriptor).st_ino))
        assert os.fstat(descriptor).st_size == FILE
        fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        calls.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(chunk_file.os, "fsync", flush)
    monkeypatch.setattr(chunk_file.os, "replace", rename)
    Disk(tmp_path).store(1)
    number = file_of(tmp_path, 1).stat().st_ino
    assert calls == [("fsync", number), ("replace", number)]


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Returns an event that is set when a chunk is about to be written, and one that this waits for."""
    has_begun, goes_on = threading.Event(), threading.Event()
    write = chunk_file.ChunkFolder.write

    def write_slowly(*args: object) -> None:
        has_begun.set()
        assert goes_on.wait(10)
        write(*args)

    monkeypatch.setattr(chunk_file.ChunkFolder, "write", write_slowly)
    return has_begun, goes_on


def test_shutdown_drops_waiting_stores_and_waits_for_running_ones(tmp_path: Path, monkeypatch) -> None:
    disk = Disk(tmp_path, num_threads=1)
    has_begun, goes_on = hold_writes(monkeypatch)
    is_dropped = threading.Event()
    disk.submit([make_key(1), make_key(2)], is_promotion=False)
    assert has_begun.wait(10)
    *_, waiting = disk.tier._tasks
    waiting.add_done_callback(lambda _future: is_dropped.set())
    closing = threading.Thread(target=disk.tier.shutdown)
    closing.start()
    assert is_dropped.wait(10)
    assert waiting.cancelled()
    closing.join(0.2)
    assert closing.is_alive(), "a chunk is still being read"
    goes_on.set()
    closing.join(10)
    assert [file.name for file in files(tmp_path)] == [file_of(tmp_path, 1).name]


def test_what_was_forgotten_is_not_found_after_a_restart(tmp_path: Path, monkeypatch) -> None:
    """Though the engine ends before the files could be deleted, and while one is being written."""
    disk = Disk(tmp_path, num_threads=1)
    disk.store(1, 2)
    has_begun, goes_on = hold_writes(monkeypatch)
    disk.submit([make_key(3), make_key(4)], is_promotion=False)
    assert has_begun.wait(10)
    disk.tier.forget(make_key(1))
    disk.tier.reset()
    disk.tier.check_integrity()
    *_, last = disk.tier._tasks
    last.add_done_callback(lambda _future: goes_on.set())
    disk.tier.shutdown()
    assert files(tmp_path) == []
    assert Disk(tmp_path).present(range(5)) == []


def test_a_file_is_not_evicted_while_it_is_loaded(tmp_path: Path) -> None:
    disk = Disk(tmp_path, num_files=1)
    disk.store(1)
    disk.submit([make_key(1)], is_promotion=True)
    # The store has another chunk than the load.
    disk.submit([make_key(2)], is_promotion=False, first_chunk=1)
    disk.tier.drain_jobs()
    results = {result.is_promotion: set(result.successful_keys) for result in disk.tier.get_finished_jobs()}
    assert results == {True: keys(1), False: set()}
    assert disk.present([1, 2]) == [1]
    assert disk.store(2) == keys(2)


def test_a_smaller_limit_at_restart_drops_the_oldest(tmp_path: Path) -> None:
    Disk(tmp_path).store(1, 2, 3, 4)
    for age, number in enumerate((2, 4, 1, 3)):
        os.utime(file_of(tmp_path, number), (1000 + age, 1000 + age))
    assert Disk(tmp_path, num_files=2).present([1, 2, 3, 4]) == [1, 3]
    assert len(files(tmp_path)) == 2


def test_a_load_counts_as_use_across_restarts(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(1, 2)
    for number in (1, 2):
        os.utime(file_of(tmp_path, number), (1000 + number, 1000 + number))
    disk.load([1])
    assert Disk(tmp_path, num_files=1).present([1, 2]) == [1]


def test_a_full_queue_refuses_jobs(tmp_path: Path) -> None:
    disk = Disk(tmp_path, max_queued_chunks=4)
    assert disk.submit([make_key(number) for number in range(6)], is_promotion=False), (
        "a job that is alone is accepted whatever its size"
    )
    assert not disk.submit([make_key(9)], is_promotion=False)
    assert disk.tier.stats().num_refused == 1
    assert len(disk.finish().successful_keys) == 6


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_failed_writes_are_counted_and_logged_once(tmp_path: Path, monkeypatch, caplog, code) -> None:
    disk = Disk(tmp_path)
    disk.store(1)
    write_all = chunk_file._write_all

    def fail_in_the_payload(descriptor: int, data: memoryview) -> None:
        if len(data) == CHUNK:
            write_all(descriptor, data[: CHUNK // 2])
            raise OSError(code, os.strerror(code))
        write_all(descriptor, data)

    monkeypatch.setattr(chunk_file, "_write_all", fail_in_the_payload)
    assert disk.store(2, 3) == set()
    assert disk.store(4) == set()
    assert disk.tier.stats().num_failed == 3
    assert len(caplog.records) == 1
    assert len(files(tmp_path)) == 1, "no half-written file remains"
    monkeypatch.undo()
    assert disk.store(2, 3) == keys(2, 3)
    assert disk.load([1, 2, 3]) == keys(1, 2, 3)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_new_files_take_the_places_of_the_oldest(tmp_path: Path, monkeypatch, code) -> None:
    """Others have filled it before the tier has reached its limit."""
    disk, write_all = Disk(tmp_path, num_threads=1), chunk_file._write_all

    def write_if_there_is_room(descriptor: int, data: memoryview) -> None:
        if len(data) == CHUNK and len(files(tmp_path)) > 4:
            raise OSError(code, os.strerror(code))
        write_all(descriptor, data)

    monkeypatch.setattr(chunk_file, "_write_all", write_if_there_is_room)
    stored = [number for number in range(12) if disk.store(number)]
    assert stored == [0, 1, 2, 3, 5, 7, 9, 11]
    assert disk.present(range(12)) == [5, 7, 9, 11]
    assert disk.load([5, 7, 9, 11]) == keys(5, 7, 9, 11)
    stats = disk.tier.stats()
    assert (stats.num_failed, stats.num_evicted) == (4, 4)
    monkeypatch.undo()
    assert disk.store(20, 21, 22) == keys(20, 21, 22)
    assert disk.present(range(30)) == [5, 7, 9, 11, 20, 21, 22]


def test_a_write_that_ends_within_the_first_page_is_counted(tmp_path: Path, monkeypatch) -> None:
    """As where a disk is full: a part of the page is written, and then nothing."""
    disk, calls = Disk(tmp_path), []
    disk.store(0)
    disk.store(1)
    write, readv = os.write, os.readv

    def write_some(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:1024])

    def read_some(descriptor: int, buffers: list[memoryview]) -> int:
        calls.append(len(buffers[0]))
        if len(calls) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return readv(descriptor, [buffers[0][:1024]])

    for folder in disk.tier._folders:
        monkeypatch.setattr(folder, "_direct", 0)
    monkeypatch.setattr(chunk_file.os, "write", write_some)
    monkeypatch.setattr(chunk_file.os, "readv", read_some)
    assert disk.store(2) == set()
    assert files(tmp_path) == [file_of(tmp_path, 1)], "no half-written file remains, and the oldest makes room"
    calls.clear()
    assert disk.load([1]) == set()
    assert disk.tier.stats().num_failed == 2
    monkeypatch.undo()
    assert disk.store(2) == keys(2)


def test_a_file_that_cannot_be_deleted_still_counts_and_is_never_found(tmp_path: Path, monkeypatch) -> None:
    disk = Disk(tmp_path, num_files=2)
    disk.store(1, 2)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "unlink", refuse)
        assert disk.store(3) == set(), "its victim could not be deleted"
        assert disk.present([1, 2]) == [1, 2]
        disk.tier.forget(make_key(1))
        disk.tier.drain_jobs()
    assert disk.present([1, 2]) == [2]
    assert disk.store(1) == set()
    assert disk.store(3) == keys(3)
    assert disk.present([1, 2, 3]) == [3]
    assert len(files(tmp_path)) == 2


def test_vanished_and_unreadable_files_are_misses(tmp_path: Path, monkeypatch) -> None:
    disk = Disk(tmp_path)
    disk.store(1, 2, 3)
    file_of(tmp_path, 1).unlink()
    assert disk.load([1, 2]) == keys(2)

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "the disk is dying")

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file, "_read_all", fail)
        assert disk.load([2]) == set()
    assert disk.present([1, 2, 3]) == [3]
    assert (disk.tier.stats().num_vanished, disk.tier.stats().num_failed) == (1, 1)


@pytest.mark.parametrize(("code", "is_found"), [(errno.EMFILE, True), (errno.EACCES, False)])
def test_a_file_that_could_not_be_opened_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_found: bool
) -> None:
    """This engine may be out of descriptors for a while, or not be allowed to read another's file."""
    disk = Disk(tmp_path)
    disk.store(1)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "open", fail)
        assert disk.load([1]) == set()
    assert disk.load([1]) == (keys(1) if is_found else set())
    assert len(files(tmp_path)) == 1
    assert Disk(tmp_path).load([1]) == keys(1)


@pytest.mark.parametrize(("code", "is_found"), [(errno.EMFILE, True), (errno.EACCES, False)])
def test_a_promotion_that_could_not_open_a_file_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_found: bool
) -> None:
    disk = Disk(tmp_path)
    disk.store(1)
    manager = OffloadingManager(1, LRUPolicy(), [disk.tier])
    with monkeypatch.context() as patch:
        patch.setattr(chunk_file.os, "open", Mock(side_effect=OSError(code, os.strerror(code))))
        assert manager.promote([make_key(1)]) == 1
        disk.tier.drain_jobs()
        manager.poll()
    assert manager.lookup(make_key(1)) is LookupResult.MISS
    assert disk.present([1]) == [1] * is_found
    manager.shutdown()
    assert Disk(tmp_path).load([1]) == keys(1)


def test_an_emptied_folder_is_filled_again(tmp_path: Path) -> None:
    """As someone may do who needs room on the disk; the engine must not have to start again."""
    disk = Disk(tmp_path / "kv")
    disk.store(1, 2)
    for folder in (tmp_path / "kv").iterdir():
        shutil.rmtree(folder)
    assert disk.load([1]) == set()
    assert disk.store(1, 3) == keys(1, 3)
    assert disk.load([1, 2, 3]) == keys(1, 3)
    assert disk.tier.stats().num_failed == 0


def test_all_threads_are_started_with_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system later allows no more of them, jobs go on."""
    disk = Disk(tmp_path)
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert disk.store(*range(9)) == keys(*range(9))
    assert disk.load(range(9)) == keys(*range(9))
    with pytest.raises(ConfigError, match="disk_path needs 4 threads more: can't start new thread; raise the limit"):
        DiskTier(DiskTierConfig(tmp_path, 9 * FILE), FINGERPRINT, disk.region)
    assert refuse.call_count == 1


def test_a_named_pipe_in_the_place_of_a_file_holds_up_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(1)
    file = file_of(tmp_path, 1)
    file.unlink()
    os.mkfifo(file)
    assert disk.load([1]) == set()


def test_reset_and_forget_reach_stores_in_flight(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.store(1)
    disk.submit([make_key(2), make_key(3)], is_promotion=False)
    disk.tier.forget(make_key(2))
    assert set(disk.finish().successful_keys) == keys(3)
    disk.submit([make_key(4)], is_promotion=False)
    disk.tier.reset()
    assert disk.present(range(5)) == []
    assert disk.finish().successful_keys == ()
    assert disk.present(range(5)) == []
    disk.tier.drain_jobs()
    assert files(tmp_path) == []
    assert disk.tier.take_events() == []
    assert disk.store(1, 2) == keys(1, 2)


def test_two_engines_in_one_folder_do_not_damage_each_others_files(tmp_path: Path) -> None:
    first, second = Disk(tmp_path, num_files=6), Disk(tmp_path, num_files=6)
    chance = random.Random(3)
    for _ in range(60):
        for disk in (first, second):
            disk.submit([make_key(number) for number in chance.sample(range(12), 5)], is_promotion=False)
        for disk in (first, second):
            disk.finish()
        first.load(chance.sample(range(12), 6))
        second.load(chance.sample(range(12), 6))
    for disk in (first, second):
        stats = disk.tier.stats()
        assert (stats.num_corrupted, stats.num_failed) == (0, 0), "a file is complete or does not exist"
        assert stats.num_loaded > 0
    third = Disk(tmp_path, num_files=12)
    assert third.load(third.present(range(12))) == keys(*third.present(range(12)))


WRITER = """
import sys, pathlib
from tests.unit.offload_fakes import make_key
from tests.unit.test_offload_disk import Disk
disk = Disk(pathlib.Path(sys.argv[1]), num_files=40)
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    disk.submit([make_key(number + i) for i in range(8)], is_promotion=False)
    disk.tier.drain_jobs()
    disk.tier.get_finished_jobs()
    number += 8
"""


@pytest.mark.long
def test_a_writer_killed_at_any_moment_leaves_only_complete_files(tmp_path: Path) -> None:
    chance = random.Random(11)
    num_temporaries = num_warm = 0
    for turn in range(NUM_KILLS):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(turn * 10_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.05))
            child.kill()
        num_temporaries += sum(file.suffix == ".tmp" for file in files(tmp_path))
        disk = Disk(tmp_path, num_files=40)
        assert all(file.suffix == ".kv" and file.stat().st_size == FILE for file in files(tmp_path))
        found = [event.key for event in disk.tier.take_events()]
        assert len(found) == len(files(tmp_path)) <= 40
        assert disk.load_keys(found) == set(found), "all files that the restart finds are intact"
        num_warm += len(found)
        disk.tier.shutdown()
    assert num_warm > NUM_KILLS
    assert num_temporaries > 0, "some processes were killed during a write"


def test_the_manager_with_a_disk_tier(tmp_path: Path) -> None:
    region = OffloadRegion(8, CHUNK)
    tier = DiskTier(DiskTierConfig(tmp_path, 20 * FILE), FINGERPRINT, region)
    manager = OffloadingManager(8, LRUPolicy(), [tier])
    chance = random.Random(5)
    for turn in range(150):
        prompt = [make_key(100 * chance.randrange(6) + place) for place in range(4)]
        manager.promote(prompt)
        for key, chunk_id in manager.prepare_store([(key, place) for place, key in enumerate(prompt)]):
            region.chunk(chunk_id)[:] = content(key, CHUNK)
            manager.complete_store(key, digest(content(key, CHUNK)), success=True)
        if turn % 3 == 0:
            tier.drain_jobs()
        manager.poll()
        found = [key for key in prompt if manager.lookup(key) is LookupResult.HIT]
        for key, chunk in zip(found, manager.prepare_load(found), strict=True):
            assert region.chunk(chunk.chunk_id) == content(key, CHUNK)
            assert chunk.digest == digest(content(key, CHUNK))
        manager.complete_load(found)
        manager.check_integrity()
        tier.check_integrity()
    assert manager.stats.num_promoted > 20
    assert manager.stats.tiers[0].num_evicted > 0
    manager.shutdown()


STATES = StateChunks(group=1, num_chunks=8, chunk_bytes=4 * CHUNK)
STATE_FILE = HEAD + STATES.chunk_bytes


class TwoSizes:
    """A tier for blocks of tokens, group 0, and states, group 1."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.region = OffloadRegion(8, CHUNK, STATES)
        self.tier = DiskTier(DiskTierConfig(path, num_bytes), FINGERPRINT, self.region)

    def move(self, keys: Sequence[OffloadKey], is_promotion: bool) -> JobResult:
        chunk_ids = tuple(8 * key[0] + place % 8 for place, key in enumerate(keys))
        for key, chunk_id in zip(keys, chunk_ids, strict=True):
            chunk = self.region.chunk(chunk_id)
            chunk[:] = bytes(len(chunk)) if is_promotion else content(key, len(chunk))
        job = TransferJob(1, tuple(keys), chunk_ids, (None,) * len(keys), is_promotion)
        assert self.tier.submit_load(job) if is_promotion else self.tier.submit_store(job)
        self.tier.check_integrity()
        self.tier.drain_jobs()
        self.tier.check_integrity()
        assert sum(file.stat().st_size for file in files(self.path)) == self.tier._num_bytes <= self.tier._max_bytes
        (result,) = self.tier.get_finished_jobs()
        for key, chunk_id in zip(keys, chunk_ids, strict=True):
            if key in result.successful_keys:
                chunk = self.region.chunk(chunk_id)
                assert chunk == content(key, len(chunk))
        return result

    def present(self) -> list[tuple[int, int]]:
        return [
            (group, number) for group in range(2) for number in range(20) if self.tier.lookup(make_key(number, group))
        ]


def test_files_of_two_sizes_share_a_limit_in_bytes(tmp_path: Path) -> None:
    disk = TwoSizes(tmp_path, STATE_FILE + 6 * FILE)
    blocks, states = [make_key(n) for n in range(6)], [make_key(n, 1) for n in range(3)]
    # One at a time, because those of one job are stored by several threads and end in any order.
    for block in blocks:
        assert disk.move([block], is_promotion=False).num_bytes == CHUNK
    assert disk.move(states[:1], is_promotion=False).num_bytes == STATES.chunk_bytes
    assert {file.stat().st_size for file in files(tmp_path)} == {FILE, STATE_FILE}
    # A state needs the room of three blocks.
    disk.tier.touch([states[0]])
    disk.move(states[1:2], is_promotion=False)
    assert disk.present() == [(0, 3), (0, 4), (0, 5), (1, 0), (1, 1)]
    # The oldest files leave, whatever their size.
    disk.tier.touch(blocks)
    disk.move([make_key(9)], is_promotion=False)
    assert disk.present() == [(0, 3), (0, 4), (0, 5), (0, 9), (1, 1)]
    stats = disk.tier.stats()
    assert (stats.num_bytes_stored, stats.num_evicted) == (7 * CHUNK + 2 * STATES.chunk_bytes, 4)
    disk.tier.shutdown()


def test_a_restart_finds_files_of_two_sizes_in_their_order(tmp_path: Path) -> None:
    disk = TwoSizes(tmp_path, 20 * STATE_FILE)
    wanted = [make_key(1), make_key(1, 1), make_key(2), make_key(2, 1)]
    for age, key in enumerate(wanted):
        disk.move([key], is_promotion=False)
        (file,) = (file for file in files(tmp_path) if file.name == f"{key[0]}-{key[1].hex()}.kv")
        os.utime(file, (1e9 + age, 1e9 + age))
    disk.tier.shutdown()
    second = TwoSizes(tmp_path, 20 * STATE_FILE)
    result = second.move(wanted, is_promotion=True)
    assert result.successful_keys == tuple(wanted)
    assert result.num_bytes == second.tier.stats().num_bytes_loaded == 2 * (CHUNK + STATES.chunk_bytes)
    second.tier.shutdown()
    for age, key in enumerate(wanted):
        (file,) = (file for file in files(tmp_path) if file.name == f"{key[0]}-{key[1].hex()}.kv")
        os.utime(file, (1e9 + age, 1e9 + age))
    third = TwoSizes(tmp_path, STATE_FILE + FILE)
    assert third.present() == [(0, 2), (1, 2)]
    # Of a damaged state nothing is loaded, and its place is free again.
    (file,) = (file for file in files(tmp_path) if file.name.startswith("1-"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert third.move(wanted[2:], is_promotion=True).successful_keys == (wanted[2],)
    assert third.present() == [(0, 2)]
    # So is that of a state that someone else has deleted.
    third.move([wanted[1]], is_promotion=False)
    next(file for file in files(tmp_path) if file.name.startswith("1-")).unlink()
    assert third.move([wanted[1]], is_promotion=True).successful_keys == ()
    assert third.present() == [(0, 2)]
    third.tier.shutdown()


def test_configuration_errors_name_the_option(tmp_path: Path) -> None:
    region = OffloadRegion(1, CHUNK)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", Path("~nobody-has-this-name/x"), tmp_path / "a\0b", tmp_path / "\ud800"):
        with pytest.raises(ConfigError, match="disk_path"):
            DiskTier(DiskTierConfig(path, 10 * FILE), FINGERPRINT, region)
    with pytest.raises(ConfigError, match="disk_bytes_to_use"):
        DiskTier(DiskTierConfig(tmp_path, FILE - 1), FINGERPRINT, region)
    with pytest.raises(ConfigError, match=f"at least {FILE + STATE_FILE}, one chunk and one state"):
        TwoSizes(tmp_path, FILE + STATE_FILE - 1)
