"""The connector to read first: it stores KV as safetensors files in a folder, one per block.

An engine that finds a prompt's first blocks in the folder loads them instead of computing them. Loads are synchronous
and layer by layer: the step that needs them waits for each layer's bytes right before that layer attends. Saves happen
one step after a block is complete, before anything can overwrite it. `docs/adding_a_connector.md` walks through this
file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from penstock.config.options import Must, Text, convert_options
from penstock.kv_transfer.connector import NO_MATCH, ConnectorEvent, LoadEnded, Match, RequestView
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.ledger import TransferLedger, bad_ranges
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from penstock.messages.kv_transfer import (
    BadRange,
    ConnectorSetup,
    KVConnectorMetadata,
    KVConnectorOutput,
    ShardId,
    TransferId,
    TransferReport,
    TransferStatus,
)
from penstock.messages.scheduler_output import BlockIds, BlockTable, SchedulerOutput
from penstock.utils.errors import ConfigError
from penstock.utils.layer_hooks import LayerHooks
from penstock.utils.logging import get_logger
from penstock.utils.wire import register_kind

logger = get_logger(__name__)

Placed = tuple[int, str]
"""(block id, name of its KV file, which may not exist yet)."""


class ExampleLoad(msgspec.Struct, frozen=True):
    """Consecutive blocks of a request, starting with block `first`."""

    transfer_id: TransferId
    first: int
    blocks: tuple[Placed, ...]


@register_kind
class ExampleMetadata(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True):
    loads: tuple[ExampleLoad, ...] = ()
    saves: tuple[Placed, ...] = ()

    @property
    def has_sync_loads(self) -> bool:
        return bool(self.loads)


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """The connector's one option, a folder."""

    shared_storage_path: Annotated[Text, Must("a folder")]


class ExampleConnector:
    """See the module's docstring."""

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> ExampleScheduler:
        """Raises ConfigError for an invalid option, a folder that cannot be created, and sliding windows."""
        groups = context.cache.groups
        if len(groups) > 1 or any(group.spec.sliding_window for group in groups):
            raise ConfigError("ExampleConnector takes models without sliding windows only: use OffloadingConnector")
        folder = _folder(context)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"shared_storage_path of ExampleConnector cannot be used: {error}") from None
        return ExampleScheduler(folder, context)

    @staticmethod
    def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> ExampleWorker:
        return ExampleWorker(_folder(context), shard, context.cache)


def _folder(context: ConnectorContext) -> Path:
    """Returns a folder that is specific to the weights, the arithmetic and the rank's part of the KV."""
    options = convert_options(ExampleOptions, context.config.kv_connector_extra_config, "of ExampleConnector")
    num_stages, num_ranks = (1 + max(numbers) for numbers in zip(*context.shards, strict=True))
    name = f"{context.fingerprint.hex()}-pp{num_stages}-tp{num_ranks}"
    return Path(options.shared_storage_path).expanduser() / name


class ExampleScheduler(NullSchedulerConnector):
    """Decides what is loaded and saved by block hash, which identifies a block's whole prefix."""

    def __init__(self, folder: Path, context: ConnectorContext) -> None:
        self._folder = folder
        self._shards = context.shards
        self._block_size = context.cache.block_size
        self._ledger = TransferLedger[tuple[int, int]]()  # the tokens of each load
        self._loads: list[ExampleLoad] = []
        self._saves: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        first = num_computed_tokens // self._block_size
        names = map(_file_name, itertools.islice(request.block_hashes, first, None))
        found = sum(1 for _ in itertools.takewhile(self._has_all_shards, names))
        return Match(found * self._block_size) if found else NO_MATCH

    def _has_all_shards(self, name: str) -> bool:
        return all((self._folder / _of_shard(name, shard)).exists() for shard in self._shards)

    def update_state_after_alloc(
        self, request: RequestView, transfer_id: TransferId, block_ids: BlockIds, num_computed_tokens: int, end: int
    ) -> None:
        first, last = num_computed_tokens // self._block_size, end // self._block_size
        names = map(_file_name, request.block_hashes[first:last])
        load = ExampleLoad(transfer_id, first, tuple(zip(block_ids[0][first:last], names, strict=True)))
        self._ledger.open(transfer_id, self._shards, (num_computed_tokens, end))
        self._loads.append(load)

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None:
        for block_id, block_hash in zip(block_ids[0][first:end], request.block_hashes[first:end], strict=True):
            name = _file_name(block_hash)
            if block_id != NULL_BLOCK and not self._has_all_shards(name):
                self._saves[name] = block_id

    def build_connector_meta(self, plan: SchedulerOutput) -> ExampleMetadata:
        metadata = ExampleMetadata(tuple(self._loads), tuple((block, name) for name, block in self._saves.items()))
        self._loads.clear()
        self._saves.clear()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        events: list[ConnectorEvent] = []
        for report in output.reports:
            if (ended := self._ledger.apply(report)) is not None:
                (first, end), reports = ended
                events.append(LoadEnded(report.transfer_id, bad_ranges(reports, 1, first, end)))
        return events

    @property
    def has_pending_work(self) -> bool:
        return bool(self._saves)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()


class ExampleWorker(NullWorkerConnector):
    """Reads and writes one rank's files."""

    def __init__(self, folder: Path, shard: ShardId, cache: KVCacheConfig) -> None:
        self._folder = folder
        self._shard = shard
        self._block_size = cache.block_size
        self._hooked = {name for group in cache.groups for name in group.layer_names}
        self._metadata = ExampleMetadata()
        self._files: dict[Placed, dict[str, np.ndarray]] = {}
        self._lost: set[Placed] = set()

    @property
    def layer_hooks(self) -> LayerHooks:
        return self

    def register_kv_caches(self, view: KVCacheView) -> None:
        self._view = view
        self._bytes_of = {layer.name: layer.block_bytes for layer in view.layout.layers}

    def begin_step(self, metadata: KVConnectorMetadata | None) -> None:
        assert isinstance(metadata, ExampleMetadata), metadata
        self._metadata = metadata
        for block_id, name in metadata.saves:
            self._save(block_id, name)

    def start_load_kv(self) -> None:
        """Opens the files; their layers are copied one by one, except for layers that the model itself does not run."""
        for placed in self._placed():
            try:
                tensors = load_file(self._folder / _of_shard(placed[1], self._shard))
                if [(name, each.nbytes) for name, each in sorted(tensors.items())] != sorted(self._bytes_of.items()):
                    raise ValueError("it holds other layers")
                self._files[placed] = tensors
            except (OSError, SafetensorError, ValueError) as error:
                logger.warning("KV of block %s cannot be loaded: %s", placed[1], error)
                self._lost.add(placed)
        for name in self._bytes_of.keys() - self._hooked:
            self.wait_for_layer_load(name)

    def _placed(self) -> list[Placed]:
        return [placed for load in self._metadata.loads for placed in load.blocks]

    def wait_for_layer_load(self, layer_name: str) -> None:
        for (block_id, _), tensors in self._files.items():
            self._view.write_layer(layer_name, block_id, tensors[layer_name].data)

    def save_kv_layer(self, layer_name: str) -> None:
        """Does nothing: blocks are saved with the next step, when they are complete in all layers."""

    def get_finished(self, finished_request_ids: frozenset[str]) -> KVConnectorOutput:
        return KVConnectorOutput(tuple(map(self._report, self._metadata.loads)))

    def _report(self, load: ExampleLoad) -> TransferReport:
        size = self._block_size
        bad = tuple(
            BadRange(0, index * size, (index + 1) * size)
            for index, placed in enumerate(load.blocks, start=load.first)
            if placed in self._lost
        )
        status = TransferStatus.FAILED if bad else TransferStatus.DONE
        return TransferReport(load.transfer_id, self._shard, status, bad)

    def end_step(self) -> None:
        self._metadata = ExampleMetadata()
        self._files.clear()
        self._lost.clear()

    def _save(self, block_id: int, name: str) -> None:
        """Writes a file that becomes visible only by an atomic rename, so that no partial file is ever read."""
        tensors: dict[str, np.ndarray] = {}
        for layer_name, num_bytes in self._bytes_of.items():
            tensors[layer_name] = np.empty(num_bytes, dtype=np.uint8)
            self._view.read_layer(layer_name, block_id, tensors[layer_name].data)
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(save(tensors))
            os.replace(file.name, self._folder / _of_shard(name, self._shard))
        except OSError as error:
            logger.warning("KV of block %s cannot be saved: %s", name, error)
            with contextlib.suppress(OSError, UnboundLocalError):
                os.unlink(file.name)


def _file_name(block_hash: bytes) -> str:
    return block_hash.hex()


def _of_shard(name: str, shard: ShardId) -> str:
    return f"{name}.pp{shard[0]}.tp{shard[1]}.safetensors"
