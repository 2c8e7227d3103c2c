"""Serve a build with Triton Inference Server until it is stopped; ready when it says so.

Ctrl-C or SIGTERM lets running streams finish and then stops. Addresses and ports come from the build's config
unless given here; port 0 takes a free one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome

if TYPE_CHECKING:
    from trtspec.serve.triton import TritonServer

HELP = "run Triton on a build, on loopback unless its config says otherwise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("build", type=Path, help="a folder that `trtspec build` wrote")
    parser.add_argument("--address", help="what to bind; 0.0.0.0 opens it to the network")
    for kind in ("http", "grpc", "metrics"):
        parser.add_argument(
            f"--{kind}-port", type=_port, metavar="PORT", help=f"{kind} port; 0 takes a free one"
        )
    parser.add_argument(
        "--server", type=Path, metavar="FILE", help="the tritonserver binary; default: the first found"
    )
    parser.add_argument(
        "--drain-timeout", type=_seconds, metavar="SECONDS", help="how long streams may finish"
    )
    parser.add_argument("--server-log", type=Path, metavar="FILE", help="where Triton's own log goes")


def run(arguments: argparse.Namespace, context: Context) -> int:
    from trtspec.serve.supervise import options_from_build, ready_text, serve_forever

    given = {
        "address": arguments.address,
        "http_port": arguments.http_port,
        "grpc_port": arguments.grpc_port,
        "metrics_port": arguments.metrics_port,
        "server": arguments.server,
        "drain_timeout_s": arguments.drain_timeout,
        "log": arguments.server_log,
    }
    changes = {name: value for name, value in given.items() if value is not None}

    def ready(server: TritonServer) -> None:
        result = {
            "build": str(arguments.build),
            "models": list(server.models),
            "http": server.http_url,
            "grpc": server.grpc_url,
            "metrics": server.metrics_url,
            "log": str(server.log),
            "pid": server.pid,
        }
        context.announce(Outcome(result, ready_text(server)))

    return serve_forever(options_from_build(arguments.build, **changes), emit=context.emit, ready=ready)


def _port(text: str) -> int:
    """A TCP port as argparse wants it."""
    if not 0 <= (port := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port (0 to 65535)")
    return port


def _seconds(text: str) -> int:
    if (seconds := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1 second")
    return seconds
