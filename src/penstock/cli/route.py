"""`penstock route`: one address for several engines (docs/ROUTING.md)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.parser import add_values, count, count_from_zero, number, port
from penstock.cli.startup import announce
from penstock.config import env
from penstock.utils.errors import ConfigError
from penstock.utils.interrupts import interrupts_end_at_once
from penstock.utils.machine import allow_open_files, collect_rarely

if TYPE_CHECKING:
    from penstock.router.service import Listening, RouterConfig

DESCRIPTION = """\
One address for several engines. Instances of --serve compute whole requests,
those of --prefill the prompts and those of --decode the answers of the others."""

_EVENTS = "URL,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT] follows KV events, for each of the three"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock route [--serve URL]... [--prefill URL --decode URL]... [flags]"
    instances = parser.add_argument_group("instances")
    for flag, text in (
        ("--prefill", "computes prompts; URL,bootstrap=URL for MooncakeConnector; may be repeated"),
        ("--decode", "computes answers; may be repeated"),
        ("--serve", f"computes whole requests; may be repeated. {_EVENTS}"),
    ):
        instances.add_argument(flag, action="append", default=[], metavar="URL", help=text)
    instances.add_argument(
        "--policy",
        choices=("prefix-aware", "least-loaded", "round-robin"),
        default="prefix-aware",
        metavar="NAME",
        help="how an instance is chosen: prefix-aware (default; needs KV events), least-loaded, round-robin",
    )
    address = parser.add_argument_group("address")
    address.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add_values(
        address,
        ("--port", port, 8000, "N", "0: a free port (default: 8000)"),
        ("--admin-port", port, None, "N", "loopback port for administration and the status page"),
    )
    address.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="listen beyond loopback: the instances, or a proxy in front, check keys",
    )
    limits = parser.add_argument_group("limits")
    add_values(
        limits,
        ("--max-outstanding", count, 256, "N", "concurrent requests per instance (default: 256)"),
        ("--max-queued-requests", count_from_zero, 1024, "N", "waiting requests; more get a 503 (default: 1024)"),
        ("--queue-timeout", number, 30.0, "N", "seconds that a request waits before a 503 (default: 30)"),
        ("--max-retries", count_from_zero, 2, "N", "other instances to try before the first byte (default: 2)"),
        ("--max-self-prefills", count_from_zero, 4, "N", "concurrent prompts on decode instances (default: 4)"),
        ("--max-local-prefill", count_from_zero, 512, "N", "tokens that a decode instance may compute (default: 512)"),
        ("--max-migrations", count_from_zero, 3, "N", "how often a stream may go on elsewhere (default: 3)"),
        ("--prefill-timeout", number, 60.0, "N", "seconds that a prompt may take (default: 60)"),
        ("--shutdown-timeout", number, 30.0, "N", "seconds that running requests have after SIGTERM (default: 30)"),
    )
    limits.add_argument(
        "--migrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue streams of Penstock's instances elsewhere when theirs dies, drains or stops (default)",
    )
    silent = "seconds without a part from an unhealthy instance until its stream goes on elsewhere (default: 5)"
    add_values(limits, ("--migrate-after", number, 5.0, "N", silent))
    stalled = "seconds without progress despite requests until an instance is unhealthy (default: 60)"
    add_values(
        parser.add_argument_group("health"),
        ("--health-interval", number, 1.0, "N", "seconds between checks (default: 1)"),
        ("--stall-after", number, 60.0, "N", stalled),
        ("--dead-after", number, 30.0, "N", "seconds until an unhealthy instance is dead (default: 30)"),
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with interrupts_end_at_once():
        # Imported here: the help text needs none of it.
        import asyncio

        import uvloop

        from penstock.router.service import route
        from penstock.utils import logging

        allow_open_files()
        logging.configure(env.log_level())
        config = _config(args)

    def on_listening(router: Listening) -> None:
        announce(f"Penstock routes {router.url}/v1 to {len(config.instances)} instances")
        if router.admin_url:
            announce(f"Administration and status at {router.admin_url}")

    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(route(config, on_listening))
    return 0


def _config(args: argparse.Namespace) -> RouterConfig:
    """Raises ConfigError."""
    from penstock.router.dispatcher import Limits, Policy
    from penstock.router.exchange import Timeouts
    from penstock.router.health import HealthConfig
    from penstock.router.instances import Role, parse_instance
    from penstock.router.service import RouterConfig
    from penstock.utils.hosts import is_local_host

    if args.prefill and not args.decode:
        raise ConfigError("--prefill needs --decode: a prefill instance computes prompts and answers nothing")
    if not (args.serve or args.decode or args.admin_port is not None):
        raise ConfigError("name instances with --serve, or with --prefill and --decode, or add them on --admin-port")
    if not is_local_host(args.host) and not args.allow_unauthenticated:
        raise ConfigError(
            f"host={args.host} makes the instances reachable from the network, and the router checks no keys: give the "
            "instances keys (--api-key) or put a proxy that authenticates in front, and pass --allow-unauthenticated"
        )
    instances = [parse_instance(text, role) for role in Role for text in getattr(args, role)]
    urls = [each.url for each in instances]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{url} is named twice: an instance has one role")
    return RouterConfig(
        instances=instances,
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        shutdown_timeout=args.shutdown_timeout,
        limits=Limits(
            max_outstanding=args.max_outstanding,
            max_queued=args.max_queued_requests,
            queue_timeout=args.queue_timeout,
            max_retries=args.max_retries,
            max_self_prefills=args.max_self_prefills,
            max_local_prefill=args.max_local_prefill,
            max_migrations=args.max_migrations,
        ),
        policy=Policy(args.policy),
        health=HealthConfig(args.health_interval, stall_after=args.stall_after, dead_after=args.dead_after),
        timeouts=Timeouts(prefill=args.prefill_timeout, migrate=args.migrate_after if args.migrate else None),
    )
