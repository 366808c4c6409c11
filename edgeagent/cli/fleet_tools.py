"""`edgeagent fleet-tools`: certificates for trials, and simulated fleets for sizing a broker."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

from edgeagent.cli.fleet import add_broker_options
from edgeagent.errors import FleetError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", required=True)
    certs = tools.add_parser("gen-certs", help="make a CA for trials, and certificates signed by it")
    certs.add_argument("directory", type=Path, help="where the files go; an existing CA there is used")
    certs.add_argument(
        "--broker",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or address of the broker; may be repeated",
    )
    certs.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NODE",
        help="name of a node, or of another client such as fleet-page; may be repeated",
    )
    certs.add_argument("--days", type=int, default=365, help="how long they are valid (default %(default)s)")
    simulate = tools.add_parser("simulate", help="play a fleet against a broker")
    add_broker_options(simulate)
    simulate.add_argument("--nodes", type=int, default=1000, help="default %(default)s")
    simulate.add_argument(
        "--rate", type=float, help="samples a second over all nodes (default: one a node every 10 s)"
    )
    simulate.add_argument("--sites", type=int, default=20, help="default %(default)s")
    simulate.add_argument(
        "--trouble", type=float, default=0.02, help="part of the nodes that is ill (default %(default)s)"
    )
    simulate.add_argument("--seed", type=int, default=1)
    simulate.add_argument("--connections", type=int, default=4, help="MQTT clients (default %(default)s)")
    simulate.add_argument("--for", dest="for_s", type=float, metavar="SECONDS", help="then end")
    simulate.add_argument(
        "--past",
        type=int,
        default=0,
        metavar="MINUTES",
        help="also send samples of so long ago, one a minute",
    )
    simulate.add_argument("--steady", action="store_true", help="no node falls ill, recovers or is lost")
    simulate.add_argument("--keep", action="store_true", help="leave the retained messages at the broker")


def run(args: argparse.Namespace) -> int:
    return gen_certs(args) if args.tool == "gen-certs" else simulate(args)


def gen_certs(args: argparse.Namespace) -> int:
    from edgeagent.fleet import certs

    if args.days < 1:
        raise FleetError("--days must be at least 1")
    made = [certs.make_ca(args.directory)]
    if args.broker:
        made.append(certs.make_broker(args.directory, args.broker, args.days))
    made += [certs.make_device(args.directory, node, args.days) for node in args.device]
    for pair in made:
        print(f"{pair.cert_file}  {pair.key_file}")
    return 0


def simulate(args: argparse.Namespace) -> int:
    from edgeagent.dashboard import simulation
    from edgeagent.fleet.client import Broker

    if args.nodes < 1 or args.sites < 1 or args.connections < 1 or not 0 <= args.trouble <= 1:
        raise FleetError("--nodes, --sites and --connections must be at least 1, --trouble 0 to 1")
    rate = args.nodes / 10 if args.rate is None else args.rate
    settings = simulation.with_password(
        simulation.BrokerSettings(
            Broker.parse(args.broker[0]),
            args.user,
            ca_file=args.ca,
            cert_file=args.cert,
            key_file=args.key,
            protocol=args.protocol,
        ),
        args.password_file,
    )
    began_s = time.monotonic()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    fleet = simulation.make_fleet(
        args.nodes, sites=args.sites, trouble=args.trouble, seed=args.seed, now_ms=time.time_ns() // 10**6
    )
    player = simulation.Player(fleet, settings, rate=rate, connections=args.connections)
    try:
        _say(f"{args.nodes} nodes are born")
        player.birth(stop)
        _say(
            f"{player.figures.sent} retained messages in {time.monotonic() - began_s:.1f} s; "
            f"{rate:g} samples a second"
        )
        if args.past:
            player.past(stop, min(args.past, 60))
        player.play(stop, args.for_s, changes=not args.steady)
        if not args.keep:
            _say("taking the retained messages away")
            player.clear(threading.Event())
    finally:
        player.close()
    f = player.figures
    print(
        f"sent={f.sent} acknowledged={f.acknowledged} refused={f.refused} samples={f.samples} late={f.late} "
        f"seconds={time.monotonic() - began_s:.1f}"
    )
    return 0 if not f.refused else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
