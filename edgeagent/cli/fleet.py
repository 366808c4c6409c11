"""`edgeagent fleet`: the fleet page."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeagent.errors import FleetError
from edgeagent.fleet.topics import is_name

if TYPE_CHECKING:
    import uvicorn

    from edgeagent.dashboard.server import FleetPage
    from edgeagent.dashboard.store import Expected

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_broker_options(parser)
    page = parser.add_argument_group("the page")
    page.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: %(default)s")
    page.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the password of the page, at least 12 characters (default: a new one, printed at the start)",
    )
    page.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve the page by TLS")
    page.add_argument("--tls-key", type=Path, metavar="FILE")
    page.add_argument(
        "--insecure-http",
        action="store_true",
        help="serve other machines without TLS: only behind a proxy that adds it",
    )
    page.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name under which browsers ask for the page; may be repeated",
    )
    page.add_argument("--read-only", action="store_true", help="no commands from this page")
    page.add_argument(
        "--command-keys",
        type=Path,
        metavar="DIR",
        help="directory with NODE.key for nodes that want signed commands",
    )
    page.add_argument(
        "--telemetry",
        choices=("auto", "all", "opened"),
        default="auto",
        help="of which nodes: of all, of those somebody looks at, or by the fleet's size (default)",
    )
    page.add_argument(
        "--expect",
        metavar="N|FILE",
        help="how many nodes there should be, or a file with site/node a line: the page says what is missing",
    )


def add_broker_options(parser: argparse.ArgumentParser) -> None:
    """What `fleet` and `fleet-tools simulate` need to reach a broker."""
    broker = parser.add_argument_group("the broker")
    broker.add_argument(
        "--broker",
        action="append",
        required=True,
        metavar="URL",
        help="mqtts://HOST[:PORT], also mqtt, ws, wss; further ones are tried in order",
    )
    broker.add_argument("--ca", type=Path, metavar="FILE", help="CA of the broker's certificate")
    broker.add_argument("--cert", type=Path, metavar="FILE", help="client certificate")
    broker.add_argument("--key", type=Path, metavar="FILE", help="its key")
    broker.add_argument("--user", metavar="NAME")
    broker.add_argument("--password-file", type=Path, metavar="FILE", help="of the user at the broker")
    broker.add_argument("--protocol", choices=("5", "3.1.1"), default="5", help="MQTT version")


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from edgeagent.dashboard import link
        from edgeagent.dashboard.server import FleetPage, PageSettings
    except ImportError as e:
        raise FleetError(
            f"the fleet page needs further packages: pip install 'edgeagent[fleet]' ({e.name} is missing)"
        ) from e
    from edgeagent.fleet.client import Broker

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    host, port = _listen(args.listen)
    _check_exposure(host, args)
    secret, told = _secret(args.token_file)
    expected = _expected(args.expect)
    page_id = secrets.token_hex(4)
    page = FleetPage(
        PageSettings(
            secret=secret,
            secure=args.tls_cert is not None,
            host_names=tuple(args.host_name),
            read_only=args.read_only,
            telemetry=args.telemetry,
            expected=expected,
            command_keys=args.command_keys,
        ),
        link.LinkSettings(
            brokers=tuple(Broker.parse(url) for url in args.broker),
            client_id=f"edgeagent-page-{page_id}",
            requester=f"page-{page_id}",
            protocol=args.protocol,
            username=args.user,
            password_file=args.password_file,
            ca_file=args.ca,
            cert_file=args.cert,
            key_file=args.key,
            sites=tuple(sorted(expected.sites)) if expected is not None else (),
        ),
    )
    config = uvicorn.Config(
        page.app,
        host=host,
        port=port,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
        limit_concurrency=256,
        h11_max_incomplete_event_size=16 * 1024,
        ssl_certfile=None if args.tls_cert is None else str(args.tls_cert),
        ssl_keyfile=None if args.tls_key is None else str(args.tls_key),
    )
    scheme = "https" if args.tls_cert else "http"
    shown = f"[{host}]" if ":" in host else host
    # The fragment never leaves the browser: it is in no log and no referrer.
    print(f"fleet page: {scheme}://{shown}:{port}/" + (f"#token={secret}" if told else ""), flush=True)
    return _serve(uvicorn.Server(config), page)


def _serve(server: uvicorn.Server, page: FleetPage) -> int:
    import asyncio

    # uvicorn raises the signal again once it has stopped; that is how it should end.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]

    async def main() -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, setattr, server, "should_exit", True)
        failed = asyncio.create_task(page.failed.wait())
        stopping = asyncio.create_task(_stop_streams(server, page))
        serving = asyncio.create_task(server.serve())
        await asyncio.wait([failed, serving], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        stopping.cancel()
        was_failure = failed.done()
        failed.cancel()
        return 1 if was_failure or not server.started else 0

    try:
        return asyncio.run(main())
    except (OSError, ValueError) as e:  # a port in use ends uvicorn by itself; a bad certificate does not
        raise FleetError(f"cannot serve the page: {e}") from e
    except SystemExit as e:
        raise FleetError(f"cannot listen: see above (exit {e.code})") from e


async def _stop_streams(server: uvicorn.Server, page: FleetPage) -> None:
    """Streams never end by themselves, and uvicorn waits for them."""
    import asyncio

    while not server.should_exit:
        await asyncio.sleep(0.2)
    page.stop()


def _listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FleetError(f"cannot listen on {text!r}: HOST:PORT is needed, such as 127.0.0.1:8080")
    return host, int(port)


def _check_exposure(host: str, args: argparse.Namespace) -> None:
    if (args.tls_cert is None) != (args.tls_key is None):
        raise FleetError("--tls-cert and --tls-key belong together")
    for path in (args.tls_cert, args.tls_key):
        if path is not None and not path.is_file():
            raise FleetError(f"cannot read {path}")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and args.tls_cert is None and not args.insecure_http:
        raise FleetError(
            f"cannot serve {host} in the clear, the password would be readable: give --tls-cert and "
            "--tls-key, or --insecure-http behind a proxy that adds TLS"
        )


def _secret(path: Path | None) -> tuple[str, bool]:
    """The page's password, and whether it is a new one that must be told."""
    if path is None:
        return secrets.token_urlsafe(24), True
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise FleetError(f"cannot read the token file {path}: {e}") from e
    if len(secret) < 12:
        raise FleetError(f"the token in {path} is shorter than 12 characters")
    return secret, False


def _expected(text: str | None) -> Expected | None:
    from edgeagent.dashboard.store import Expected

    if text is None:
        return None
    if text.isdigit():
        return Expected(int(text))
    try:
        lines = Path(text).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise FleetError(f"cannot read the list of expected nodes {text}: {e}") from e
    names = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    for name in names:
        site, _, node = name.partition("/")
        if not is_name(site) or not is_name(node):
            raise FleetError(f"cannot use {name[:60]!r} in {text}: site/node is needed")
    return Expected(len(names), names)
