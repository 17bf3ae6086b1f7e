"""Reports of an engine's ranks about a small model, for any division of it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.messages.kv_transfer import ShardId
from penstock.messages.memory_budget import MemoryBudget
from penstock.messages.tensor_rows import TensorRows
from penstock.utils.math import interval
from penstock.worker.messages import WorkerFacts

NUM_HEADS = 4
HEAD_SIZE = 8
# Stages of this model have only sliding-window layers, only full ones, or both.
WINDOWS = (32, 32, 32, 0, 32, 0, 0)
DRAFT = {"draft.model.layers.0.self_attn": 32}
PLENTY = MemoryBudget(total=1 << 40, in_use=0)


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn"


def stages_of(pp: int, counts: Sequence[int] | None = None) -> list[range]:
    """Divides the layers as equally as possible, or into stages with these numbers of layers."""
    if counts is None:
        return [range(*interval(len(WINDOWS), stage, pp)) for stage in range(pp)]
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(pp)]


def heads_of(num_heads: int, rank: int, tp: int) -> tuple[int, int]:
    """Returns an equal share of the heads, or one of them if there are more ranks than heads."""
    if tp <= num_heads:
        return interval(num_heads, rank, tp)
    head = rank * num_heads // tp
    return head, head + 1


def make_rank(shard: ShardId, read: Sequence[TensorRows] = (), arithmetic: str = "generic") -> WorkerFacts:
    """Returns the facts of a rank without layers."""
    return WorkerFacts(
        shard=shard,
        device="cpu",
        kv_cache_specs={},
        draft_kv_cache_specs={},
        num_tokens_ahead=0,
        memory=PLENTY,
        arithmetic=arithmetic,
        read=tuple(read),
        kernels="generic",
        device_name="",
        num_threads=1,
    )


def make_facts(
    pp: int,
    tp: int,
    counts: Sequence[int] | None = None,
    num_heads: int = NUM_HEADS,
    memory: dict[ShardId, MemoryBudget] | None = None,
    has_drafter: bool = True,
) -> list[WorkerFacts]:
    """Returns the facts of all ranks. The drafter has half as many heads, and its layer is on the last stage, in the
    sliding windows' group."""

    def spec(total: int, rank: int, window: int) -> KVCacheSpec:
        first, end = heads_of(total, rank, tp)
        return KVCacheSpec.keys_and_values(end - first, HEAD_SIZE, "bfloat16", window, first, total)

    facts: list[WorkerFacts] = []
    for stage, layers in enumerate(stages_of(pp, counts)):
        drafts = DRAFT if has_drafter and stage == pp - 1 else {}
        for rank in range(tp):
            each = structs.replace(
                make_rank((stage, rank)),
                kv_cache_specs={layer_name(number): spec(num_heads, rank, WINDOWS[number]) for number in layers},
                draft_kv_cache_specs={name: spec(num_heads // 2, rank, window) for name, window in drafts.items()},
                num_tokens_ahead=1 if drafts else 0,
                memory=(memory or {}).get((stage, rank), PLENTY),
            )
            facts.append(each)
    return facts


def make_engine_config(**given: float | str) -> EngineConfig:
    """Returns the configuration of the built-in model; planning uses only its limits."""
    args = {"max_model_len": 64, "max_num_batched_tokens": 64, **given}
    return resolve(EngineArgs(**args)).on_device("cpu")  # pyright: ignore[reportArgumentType]
