"""Every message that crosses a process boundary is decoded to an equal message, whatever it contains."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.request import Request
from penstock.core.step_plan import StepPlan
from penstock.engine import core_messages
from penstock.messages.kv_transfer import KVConnectorMetadata
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.utils.errors import WireError
from penstock.utils.wire import Codec, OpenMessage, register_kind, registered_kinds
from penstock.worker import messages as worker_messages
from tests.architecture.sources import imports, modules

# Connectors register their kinds where they are defined.
for _name, _tree in modules().items():
    if "penstock.utils.wire.register_kind" in imports(_tree):
        importlib.import_module(f"penstock.{_name}")
for _name in ("tests.integration.recording_connector", "examples.example_connector"):
    importlib.import_module(_name)

CODECS = {"worker": worker_messages.CODEC, "core": core_messages.CODEC}
KINDS = [(codec, kind) for codec in CODECS.values() for kind in codec.kinds]

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_ARRAYS = st.builds(
    lambda rows, width, dtype: np.arange(rows * width).reshape(rows, width).astype(dtype),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([np.int32, np.int64, np.float32, np.bool_]),
)
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**62), 2**62),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-50, 50), max_size=2),
    structured_outputs=st.none() | st.just(StructuredOutputsParams(regex="[a-z]+")),
)
_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=5),
    bool: st.booleans(),
    type(None): st.none(),
    Path: st.sampled_from([Path("/a/b"), Path("c")]),
    np.ndarray: _ARRAYS,
    SamplingParams: _PARAMS,
    Any: _JSON,
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Generates any value that a field of this type may have."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _LEAVES:
        return _LEAVES[hint]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values_of(args[0]), max_size=2).map(tuple)
        return st.tuples(*map(values_of, args))
    if origin is frozenset:
        return st.frozensets(values_of(args[0]), max_size=2)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, OpenMessage) and not issubclass(hint, msgspec.Struct):
        return st.one_of(*(st.deferred(lambda kind=kind: messages(kind)) for kind in kinds_of(hint)))
    return messages(hint)


def kinds_of(base: type) -> list[type]:
    return [kind for kind in registered_kinds() if issubclass(kind, base)]


def messages(kind: type) -> st.SearchStrategy[Any]:
    """Generates any message of a Struct or dataclass type."""
    hints = typing.get_type_hints(kind)
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [f.name for f in dataclasses.fields(kind)]
    return st.builds(kind, **{name: values_of(hints[name]) for name in names})


def same(one: Any, other: Any) -> bool:
    """Tells whether both are equal in value and in type, arrays included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return one == other


def check_copies(codec: Codec, examples: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(examples)
    def check(message: Any) -> None:
        assert same(codec.copy(message), message)

    check()


@pytest.mark.parametrize(("codec", "kind"), KINDS, ids=[kind.__name__ for _, kind in KINDS])
def test_decoded_messages_equal_the_encoded_ones(codec: Codec, kind: type) -> None:
    check_copies(codec, messages(kind))


class Carrier(msgspec.Struct, frozen=True):
    content: OpenMessage


@pytest.mark.parametrize("kind", registered_kinds(), ids=[kind.__name__ for kind in registered_kinds()])
def test_decoded_connector_metadata_equals_the_encoded(kind: type) -> None:
    check_copies(Codec(Carrier), messages(kind).map(Carrier))


def test_the_kinds_of_connector_metadata_are_registered() -> None:
    names = {kind.__name__ for kind in kinds_of(KVConnectorMetadata)}
    assert {"ExampleMetadata", "MultiMetadata", "OffloadMetadata", "SimOffloadMetadata", "StepNumber"} <= names


class Unregistered(KVConnectorMetadata, msgspec.Struct, frozen=True, tag=True):
    number: int = 0


def test_an_unregistered_kind_is_an_error_and_not_an_empty_message() -> None:
    plan = worker_messages.SchedulerOutput(step=1, kv_connector_metadata=Unregistered(3))
    with pytest.raises(WireError, match="'Unregistered' is not a registered kind of KVConnectorMetadata"):
        worker_messages.CODEC.copy(plan)


def test_a_kind_needs_its_own_tag() -> None:
    with pytest.raises(TypeError, match="with a tag"):
        register_kind(type("Untagged", (KVConnectorMetadata,), {}))
    with pytest.raises(TypeError, match=r"taken by penstock\.kv_transfer\.multi"):
        register_kind(msgspec.defstruct("MultiMetadata", [], bases=(Unregistered,), frozen=True, tag="MultiMetadata"))


def test_a_prompt_is_sent_once() -> None:
    """A worker receives a request's tokens without a second copy of its prompt."""
    request = Request(
        EngineRequest(
            request_id="a", prompt_token_ids=(77,) * 1000, sampling_params=SamplingParams(), max_tokens=5, seed=0
        ),
        0,
        16,
    )
    request.admit(1, 0)
    plan = StepPlan(1, 2000, 0)
    plan.add_new(request, ((1,),), 1000)
    frame = worker_messages.CODEC.encode(plan.finish(frozenset(), frozenset()))
    assert frame.count(bytes([77] * 1000)) == 1
    assert frame.count(bytes([77])) < 1010
