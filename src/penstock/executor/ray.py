"""Ranks on the hosts of a Ray cluster. Ray is used only to place them and to report how they ended.

A placement group reserves a bundle for each rank, and an actor in it becomes the rank's process. The actor connects
back to the executor over TCP, both sides prove that they have the key that the actor received through Ray, and from
then on the messages are the same as for any rank in another process (`executor.remote`). Ranks on the executor's own
host without a GPU communicate through shared memory, others through torch.distributed at an address of the first rank's
host. Neither these connections nor the messages are encrypted: the network between the hosts must be private.

This is the only module that imports ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from typing import Any

from penstock import __version__
from penstock.config import env
from penstock.config.engine import EngineConfig
from penstock.executor.executor import Executor
from penstock.executor.remote import RemoteWorker
from penstock.kv_transfer.authentication import Authentication
from penstock.messages.kv_transfer import ShardId
from penstock.parallel.rank_memory import abort, create_rank_memory
from penstock.parallel.topology import shards
from penstock.utils import logging
from penstock.utils.child_process import SOCKET_BYTES, Parent
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, EngineDeadError, PeerError
from penstock.utils.hosts import free_port, keep_alive
from penstock.utils.interrupts import interrupts_blocked
from penstock.utils.machine import usable_cores
from penstock.worker.messages import LoadWorker, Rendezvous

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"distributed_executor_backend=ray needs Ray ({error}): pip install penstock[ray], or choose mp"
    ) from error

logger = logging.get_logger(__name__)

_KEY_BYTES = 32
_PLACEMENT_SECONDS = 60
_ACTOR_SECONDS = 120.0
_CONNECT_SECONDS = 120.0
_HANDSHAKE_SECONDS = 5.0
# Ranks do not use Ray's object store, so its minimum size is enough.
_OBJECT_STORE_BYTES = 80 << 20
# Ray's message about a dead actor ends with a list of possible causes.
_ADVICE = "Some common causes"


@dataclass(frozen=True, slots=True)
class Place:
    """The location of an actor. `port` was free there when it was chosen."""

    version: str
    node: str
    ip: str
    port: int
    pid: int


def make_ray_executor(config: EngineConfig) -> Executor:
    """Places the ranks and connects to them; nothing is loaded yet. Raises ConfigError if there is no room."""
    cluster = _Cluster(config)
    try:
        return cluster.start(config)
    except BaseException:
        cluster.release()
        raise


class _Cluster:
    """The driver's connection to Ray, a placement group and the actors in it."""

    def __init__(self, config: EngineConfig) -> None:
        self._is_own_connection = not ray.is_initialized()
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        if self._is_own_connection:
            _connect(config.parallel.num_ranks * (config.execution.num_threads or 1))

    def start(self, config: EngineConfig) -> Executor:
        bundle = _bundle(config)
        places = self._place(bundle, config.parallel.num_ranks)
        is_on_gpu = "GPU" in bundle
        rendezvous, abort_ranks = Rendezvous(), _no_abort
        if config.parallel.num_ranks > 1 and not is_on_gpu and _are_all_here(places):
            memory = create_rank_memory(config.parallel.pp, config.parallel.tp)
            rendezvous = Rendezvous(memory=memory.name, num_bytes=len(memory.view))
            abort_ranks = partial(abort, memory)
        elif config.parallel.num_ranks > 1:
            rendezvous = Rendezvous(address=f"{places[0].ip}:{places[0].port}")
        ranks = zip(shards(config.parallel.pp, config.parallel.tp), self._actors, places, strict=True)
        with socket.create_server((ray.util.get_node_ip_address(), 0)) as listener:
            workers = [
                RemoteWorker(LoadWorker(config, shard, rendezvous), *_start_rank(listener, shard, actor, place))
                for shard, actor, place in ranks
            ]
        return Executor(workers, abort_ranks, self.release)

    def release(self) -> None:
        """Ends the actors, frees the reservation and, if it was opened here, the connection. Idempotent."""
        actors, self._actors = self._actors, []
        for actor in actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._is_own_connection:
            self._is_own_connection = False
            ray.shutdown()

    def _place(self, bundle: dict[str, float], num_ranks: int) -> list[Place]:
        self._group = placement_group([bundle] * num_ranks, strategy="PACK")
        if not self._group.wait(_PLACEMENT_SECONDS):
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise ConfigError(
                f"the Ray cluster has no room for {num_ranks} ranks with {bundle} each, it has {free} free: lower "
                "tensor_parallel_size, pipeline_parallel_size or num_threads, or add hosts"
            )
        for number in range(num_ranks):
            options = RankActor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
                runtime_env={"env_vars": env.for_ranks()},
            )
            self._actors.append(options.remote())
        try:
            places: list[Place] = ray.get([actor.place.remote() for actor in self._actors], timeout=_ACTOR_SECONDS)
        except GetTimeoutError:
            raise EngineDeadError(f"the ranks' actors did not start within {_ACTOR_SECONDS:g} s") from None
        except RayError as error:
            raise ConfigError(f"a rank's actor cannot start, is penstock installed on every host? {error}") from error
        others = {place.ip: place.version for place in places if place.version != __version__}
        if others:
            raise ConfigError(f"all hosts must have penstock {__version__}, others have {others}: update them")
        return places


def _connect(num_cpus: int) -> None:
    """Connects to the cluster of RAY_ADDRESS or the one on this host, else starts a new one on this host."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with interrupts_blocked():
        try:
            ray.init(address="auto", logging_level=WARNING)
        except ConnectionError as error:
            if env.ray_address() is not None:
                raise ConfigError(f"there is no Ray cluster at RAY_ADDRESS={env.ray_address()}: {error}") from None
            ray.init(
                address="local",
                num_cpus=max(num_cpus, usable_cores()),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=WARNING,
            )
    if threading.current_thread() is threading.main_thread():
        # Ray has installed its own handler for SIGTERM: restore ours.
        signal.signal(signal.SIGTERM, on_sigterm)


def _bundle(config: EngineConfig) -> dict[str, float]:
    """Returns each rank's reservation: the CPUs of its threads, or a GPU."""
    has_gpus = ray.cluster_resources().get("GPU", 0) >= config.parallel.num_ranks
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        return {"CPU": 1, "GPU": 1}
    return {"CPU": config.execution.num_threads or 1}


def _are_all_here(places: list[Place]) -> bool:
    here = ray.get_runtime_context().get_node_id()
    return all(place.node == here for place in places)


def _no_abort() -> None:
    """Does nothing: with torch.distributed the connections of a dead rank end, which the others notice."""


# ---- The two ends of a connection ----


def _purpose(shard: ShardId) -> bytes:
    return f"penstock rank {shard[0]} {shard[1]}".encode()


def _start_rank(listener: socket.socket, shard: ShardId, actor: Any, place: Place) -> tuple[socket.socket, RayProcess]:
    """Makes the actor connect, and accepts no other connection for it."""
    key = os.urandom(_KEY_BYTES)
    host, port = listener.getsockname()[:2]
    life = actor.run.remote(host, port, key, shard)
    clock = SystemClock()
    deadline = clock.now() + _CONNECT_SECONDS
    while (left := deadline - clock.now()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(TimeoutError):
            connection, address = listener.accept()
            try:
                _authenticate(connection, Authentication(key, is_client=False, purpose=_purpose(shard)))
            except (PeerError, OSError) as error:
                connection.close()
                logger.warning("a connection from %s is refused: %s", address[0], error)
                continue
            return connection, RayProcess(actor, life, place)
    raise EngineDeadError(f"worker {shard} on {place.ip} did not connect to {host}:{port}: is that port reachable?")


def _authenticate(connection: socket.socket, side: Authentication) -> None:
    """Makes both sides prove that they have the key. Raises PeerError or OSError."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.sendall(side.greeting())
    while not side.is_done:
        data = connection.recv(side.num_missing)
        if not data:
            raise PeerError("the other side closed the connection before it was authenticated")
        connection.sendall(side.receive(data))
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    keep_alive(connection)


@ray.remote(max_restarts=0)
class RankActor:
    """One rank's process. It does not outlive its driver."""

    def place(self) -> Place:
        ip = ray.util.get_node_ip_address()
        return Place(__version__, ray.get_runtime_context().get_node_id(), ip, free_port(ip), os.getpid())

    def run(self, host: str, port: int, key: bytes, shard: ShardId) -> None:
        """Returns when the executor disconnects. A rank that fails reports why over the connection and ends the
        process.
        """
        # Imported here: the driver needs no torch, and Ray cannot send a codec with this class.
        from penstock.worker.messages import CODEC
        from penstock.worker.worker_process import live

        # Ray forwards it to the program, whose output libraries must not mix with.
        sys.stdout = sys.stderr
        connection = socket.create_connection((host, port), _CONNECT_SECONDS)
        _authenticate(connection, Authentication(key, is_client=True, purpose=_purpose(shard)))
        live(Parent(connection, CODEC))


class RayProcess:
    """An actor that runs a rank (`RankProcess`). `life` is the result of its `run`."""

    def __init__(self, actor: Any, life: Any, place: Place) -> None:
        self._actor = actor
        self._life = life
        self._place = place

    @property
    def pid(self) -> int:
        return self._place.pid

    def ended(self, seconds: float) -> str | None:
        if not ray.is_initialized():
            return "ended with the connection to Ray"
        if not ray.wait([self._life], timeout=seconds)[0]:
            return None
        where = f"(process {self._place.pid} on {self._place.ip})"
        try:
            ray.get(self._life)
        except RayError as error:
            *_, reason = str(error).partition(_ADVICE)[0].strip().splitlines()
            return f"{where} died: {reason.strip()}"
        return f"{where} ended"

    def kill(self) -> None:
        if not ray.is_initialized() or self.ended(0) is not None:
            return
        if _are_all_here([self._place]):
            # Ray asks the process to end itself, which a stopped process does not do.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._place.pid, signal.SIGKILL)
            return
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
