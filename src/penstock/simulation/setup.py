"""The parameters of a world: plain numbers that a scenario draws from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config.engine import SchedulerConfig
from penstock.config.lora import LoraConfig
from penstock.core.kv_cache_planning import blocks_for_one_request, states_for_one_request
from penstock.messages.adapters import Adapter
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.simulation.oracle import NUM_HEADS, RECURRENT, OracleLayer, cache_config, make_layers
from penstock.utils.math import round_up

TICK_SECONDS = 0.01


def engine_name(number: int) -> str:
    return f"engine{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities per transfer, per report, per tick. They end with tick `Setup.fault_ticks`.

    `slow` transfers take up to `max_delay` seconds, the others a few milliseconds. `late` reports arrive some steps
    later, `repeated` ones twice, as do the results of the disk; `contradicted` failures of a rank are preceded by a
    success report. `crash` ends an engine, `worker_error` makes a rank raise an exception, `disk_loss` empties the
    disk.

    Between engine cores, `slow_messages` take up to `max_delay` seconds, a connection is `broken` before, within or
    after a message, or `refused`; a `partition` delays all messages between two engines, a `stop` stops an engine's
    process, possibly for longer than a lease, and `garbage` are messages of a peer that violates the protocol.
    """

    drop: float = 0.0
    lost_completion: float = 0.0
    die: float = 0.0
    die_unsettled: float = 0.0
    corrupt: float = 0.0
    slow: float = 0.1
    max_delay: float = 0.1
    late: float = 0.0
    repeated: float = 0.0
    contradicted: float = 0.0
    crash: float = 0.0
    worker_error: float = 0.0
    disk_loss: float = 0.0

    # Between engine cores: per message, per connection opened, and per tick.
    slow_messages: float = 0.1
    broken: float = 0.0
    refused: float = 0.0
    partition: float = 0.0
    stop: float = 0.0
    garbage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests and their lifecycle. `handoff`: prefilled in one engine, continued in another.

    `reuse` is the share of requests that take the id of one that has ended, `abort` the share that is aborted some time
    after its arrival, `abort_loading` the probability per tick that a request waiting for KV is aborted. `reset` is the
    probability per tick that an engine's prefix cache is reset. With `continues`, an answer that is lost with its
    engine goes on at any engine, as with Penstock's router; a share of `grammars` is constrained.
    """

    num_requests: int = 10
    arrival: float = 0.3
    num_stems: int = 2
    max_stem: int = 30
    max_suffix: int = 12
    max_output: int = 14
    abort: float = 0.1
    abort_loading: float = 0.0
    reuse: float = 0.1
    salts: tuple[str | None, ...] = (None,)
    adapters: tuple[Adapter | None, ...] = (None,)
    stop: float = 0.2
    handoff: bool = False
    reset: float = 0.0
    continues: bool = False
    grammars: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """The first `num_prefill` engines prefill for the others. Times are in seconds.

    `style` is how proxies drive them: serial, concurrent, or mixed. A conversation has `turns`. The rates are per
    request: `answer_lost` and `answer_late` concern P's answer on its way to D; `replayed` parameters are also sent to
    a second engine; `altered` ones differ from P's answer; `prefill_missing`: of two concurrent requests, P's is never
    sent; `misled` requests name an engine that violates the protocol; `shared`: P computes only the beginning of a
    prompt. From tick `dead_from` on there is no prefill engine. With `expects_no_expiry` every hold must be ended by
    its reader. Holds take at most `hold_share` of the pool.
    """

    num_prefill: int = 1
    hold_seconds: float = 1.0
    lease_seconds: float = 0.2
    park_seconds: float = 0.6
    hold_share: float = 1.0
    max_parked: int = 64
    is_attested: bool = True
    digest_bytes_per_tick: int = 256
    style: str = "serial"
    turns: int = 1
    answer_lost: float = 0.0
    answer_late: float = 0.0
    replayed: float = 0.0
    altered: float = 0.0
    prefill_missing: float = 0.0
    misled: float = 0.0
    shared: float = 0.0
    dead_from: int = -1
    expects_no_expiry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`topologies` has (pp, tp) of every engine; blocks of `wide_groups` have more bytes than others. `spare_blocks` is
    the number of blocks beyond those of the longest request; `spare_states` is the same for the states of recurrent
    layers, of which one is kept every `checkpoint_interval` tokens. `depth` is how many steps may be in flight in
    addition to one for each stage but the last: 1 is synchronous. `stage_layers` is the number of layers of every group
    in each stage, for engines with that many stages; in others the layers are divided evenly.

    `drafts` per request are proposed, by a drafter with KV of its own if `has_drafter`; `drafts_under_load` while more
    than two requests run. A request must end within `request_ticks`, and everything else within `recovery_ticks` after
    the last fault. `sync_share` of the requests load from tiers in the step that needs the KV; with `layerwise` these
    loads are awaited layer by layer, by a host that does not run ahead. Tiers have `memory_chunks` blocks per engine,
    and `disk_chunks` together. `block_sizes` are those of the engines, if they differ from `block_size`. With
    `loads_must_succeed` no failed load may end a request.
    """

    topologies: tuple[tuple[int, int], ...] = ((1, 1),)
    windows: tuple[int, ...] = (0,)
    wide_groups: tuple[int, ...] = ()
    stage_layers: tuple[int, ...] = ()
    depth: int = 2
    runs_ahead: bool = False
    block_size: int = 4
    block_sizes: tuple[int, ...] = ()
    lora: LoraConfig | None = None
    max_model_len: int = 56
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 6
    spare_blocks: int = 8
    checkpoint_interval: int = 16
    spare_states: int = 8
    policy: str = "fcfs"
    drafts: int = 0
    drafts_under_load: int = 0
    has_drafter: bool = False
    acceptance: float = 0.7
    tells_gaps: bool = False
    prefix_caching: bool = True
    backing: str = "none"
    load_failure_policy: str = "recompute"
    loads_must_succeed: bool = False
    load_timeout: float = 0.6
    drain: float = 0.05
    sync_share: float = 0.0
    layerwise: bool = False
    memory_chunks: int = 16
    disk_chunks: int = 200
    fault_ticks: int = 250
    request_ticks: int = 1000
    recovery_ticks: int = 1500
    faults: Faults = Faults()
    traffic: Traffic = Traffic()
    disaggregation: Disaggregation | None = None

    def with_one_split(self) -> Setup:
        """Returns the setup with the first engine's stages and ranks for all engines."""
        return replace(self, topologies=self.topologies[:1] * len(self.topologies))

    @property
    def layers(self) -> tuple[OracleLayer, ...]:
        """Returns the layers; every stage has a layer of every group."""
        num_layers = max(self.max_num_stages, sum(self.stage_layers))
        return make_layers(self.windows, num_layers, self.has_drafter, self.wide_groups)

    @property
    def max_num_stages(self) -> int:
        """The maximum of all engines."""
        return max(pp for pp, _ in self.topologies)

    def layers_of_stages(self, num_stages: int) -> tuple[int, ...]:
        """Returns the number of target layers of each stage; nothing if they are divided evenly."""
        if len(self.stage_layers) != num_stages:
            return ()
        return tuple(count * len(self.windows) for count in self.stage_layers)

    @property
    def num_lookahead(self) -> int:
        return self.drafts if self.has_drafter else 0

    def block_size_of(self, engine: int) -> int:
        """Returns the block size of the engine of that number."""
        return self.block_sizes[engine] if self.block_sizes else self.block_size

    def cache(self, block_size: int) -> KVCacheConfig:
        """Returns the smallest cache with which an engine can start, plus the spare blocks and states."""
        groups = cache_config(self.layers, 2, block_size, NUM_HEADS).groups
        num_steps = self.max_num_stages - 1 + self.depth
        in_flight = num_steps * self.max_num_batched_tokens + self.num_lookahead
        num_blocks = 1 + blocks_for_one_request(groups, block_size, self.max_model_len, in_flight) + self.spare_blocks
        cache = cache_config(self.layers, num_blocks, block_size, NUM_HEADS)
        if RECURRENT in self.windows:
            interval = round_up(self.checkpoint_interval, block_size)
            uncertain = self.drafts + self.num_lookahead
            num_states = states_for_one_request(num_steps, in_flight, interval, uncertain // block_size)
            cache = replace(
                cache,
                num_states=num_states + self.spare_states,
                checkpoint_interval=interval,
                num_uncertain_tokens=uncertain,
            )
        return cache

    def scheduler_config(self, num_stages: int) -> SchedulerConfig:
        drafts = ((2, self.drafts), (self.max_num_seqs, self.drafts_under_load)) if self.drafts else ()
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            policy=self.policy,
            num_stages=num_stages,
            max_num_in_flight=num_stages - 1 + self.depth,
            drafts=drafts,
            num_lookahead_tokens=self.num_lookahead,
        )
