"""A helper process: it maps KV memory and runs an agent of a transfer library over it, in place of the engine.

    python -m penstock.kv_transfer.transports.helper_process SOCKET LIFELINE

Both are inherited (`utils/child_process.py`). The kernel kills this process when the lifeline is closed, whatever call
of the library is in progress. A library that aborts, as when it loses a peer, ends only this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from penstock.kv_transfer.topology.planner import merge
from penstock.kv_transfer.transports.agents import Agent, AgentSettings
from penstock.kv_transfer.transports.flat_memory import AddressSpace, pair_segments
from penstock.kv_transfer.transports.helper import CODEC, Landed, OpenAgent, Read, ServedMemory
from penstock.kv_transfer.transports.mooncake_agent import MooncakeAgent
from penstock.kv_transfer.transports.nixl_agent import NixlAgent
from penstock.utils import logging
from penstock.utils.child_process import Parent
from penstock.utils.errors import WireError
from penstock.utils.shared_memory import attach_memory

_logger = logging.get_logger(__name__)

_AGENTS: dict[str, Callable[[AgentSettings], Agent]] = {"mooncake": MooncakeAgent, "nixl": NixlAgent}


def serve(engine: Parent) -> None:
    """Opens an agent, and answers the messages of the engine. Raises what the agent raises."""
    messages = iter(engine)
    opening = next(messages, None)
    if opening is None:
        return
    if not isinstance(opening, OpenAgent):
        raise WireError(f"a helper expects OpenAgent first, not {type(opening).__name__}")
    memories = [attach_memory(region.path, region.num_bytes) for region in opening.regions]
    regions = tuple((memory.address, len(memory.view)) for memory in memories)
    local, remote = AddressSpace(regions), AddressSpace()
    agent = _AGENTS[opening.settings.library](opening.settings)
    agent.register(regions)
    if opening.peer is not None:
        remote = AddressSpace(opening.peer.regions)
        agent.connect(opening.peer.agent)
    engine.send(ServedMemory(agent.descriptor(), regions))
    for message in messages:
        if not isinstance(message, Read):
            raise WireError(f"a helper does not accept {type(message).__name__}")
        pieces = merge(pair_segments(local, remote, message.runs))
        for start in range(0, len(pieces), agent.max_pieces):
            agent.read(pieces[start : start + agent.max_pieces])
        engine.send(Landed())


def _log(error: Exception) -> None:
    _logger.warning("a helper process ends: %s: %s", type(error).__name__, error)


def main() -> None:
    engine = Parent.of_this_process(CODEC)
    engine.live(lambda: serve(engine), _log)
    # A library's own shutdown may wait for its peers.
    os._exit(0)


if __name__ == "__main__":
    main()
