"""Serve a build with Triton Inference Server until it is stopped; ready when it says so.

Ctrl-C or SIGTERM lets running streams finish and then stops. Addresses and ports come from the build's config
unless given here; port 0 takes a free one. With --openai, OpenAI's clients can use it at http://HOST:PORT/v1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError

if TYPE_CHECKING:
    from trtspec.serve.openai.front import OpenAIFront
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
        "--openai", action="store_true", help="an OpenAI-compatible front beside Triton's own endpoints"
    )
    parser.add_argument("--openai-port", type=_port, metavar="PORT", help="its port; 0 takes a free one")
    parser.add_argument(
        "--openai-address", metavar="ADDRESS", help="what it binds, where that differs from --address"
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

    if not arguments.openai and (arguments.openai_port is not None or arguments.openai_address):
        raise ConfigError(
            "--openai-port and --openai-address are the front's", where="command line", hint="add --openai"
        )
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
    options = options_from_build(arguments.build, **changes)
    open_front = _front(arguments, context) if arguments.openai else None
    front: OpenAIFront | None = None

    def opened(server: TritonServer) -> OpenAIFront:
        nonlocal front
        front = open_front(server)
        return front

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
        text = ready_text(server)
        if front is not None:
            result["openai"] = f"{front.url}/v1"
            text = f"{text}\n\n{_example(front.url, server.models[0])}"
        context.announce(Outcome(result, text))

    return serve_forever(options, emit=context.emit, ready=ready, open_front=opened if open_front else None)


def _front(arguments: argparse.Namespace, context: Context) -> Callable[[TritonServer], OpenAIFront]:
    """What puts the front before a running server; a build it cannot serve is refused before one is started."""
    from trtspec.serve.openai.front import FrontOptions, OpenAIFront

    given = {"address": arguments.openai_address or arguments.address, "port": arguments.openai_port}
    options = FrontOptions.from_build(
        arguments.build, **{name: value for name, value in given.items() if value is not None}
    )
    return lambda server: OpenAIFront.before(server.grpc_url, server.metrics_url, options, context.emit)


def _example(url: str, model: str) -> str:
    message = '{"role": "user", "content": "Tell me a story."}'
    return (
        f"OpenAI's clients: base_url {url}/v1, model {model}\n"
        f"curl -N -H 'Content-Type: application/json' {url}/v1/chat/completions \\\n"
        f"""  -d '{{"model": "{model}", "messages": [{message}], "stream": true, "max_tokens": 32}}'"""
    )


def _port(text: str) -> int:
    """A TCP port as argparse wants it."""
    if not 0 <= (port := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port (0 to 65535)")
    return port


def _seconds(text: str) -> int:
    if (seconds := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1 second")
    return seconds
