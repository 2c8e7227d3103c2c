"""The `trtspec` command line: parse, run one command, print one answer, choose the exit code.

stdout carries the answer alone (with --json: one object); progress, notes and whatever libraries print go to
stderr. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NoReturn, TextIO

import trtspec
from trtspec.commands import Context, Outcome
from trtspec.errors import ConfigError, InternalError, SetupError, TrtspecError
from trtspec.reporters import LOG_STYLES, make_reporter

COMMANDS = (
    "build",
    "plan",
    "train",
    "inspect",
    "serve",
    "eval",
    "report",
    "datastore",
    "convert",
    "validate",
    "translate",
    "doctor",
    "cache",
    "schema",
    "init",
)

_INTERRUPTED = 130
_READER_LEFT = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Raises only SystemExit, from --help and --version."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # Bars of libraries beneath would cut through ours and fill log files.
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        return _run(argv)
    except BrokenPipeError:
        # The reader of stdout left (`| head`): nothing to say, and nothing to flush at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT


def _run(argv: list[str]) -> int:
    as_json, debug = "--json" in argv, "--debug" in argv
    command = next((word for word in argv if word in COMMANDS), None)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        arguments = make_parser().parse_args(argv)
        return _answer(arguments)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        error, code = (
            {"kind": "interrupted", "message": "interrupted", "where": None, "hint": None},
            _INTERRUPTED,
        )
        text = "interrupted; the same command continues from what is finished"
    except Exception as caught:
        if debug:
            traceback.print_exc(file=sys.stderr)
        known = _as_trtspec_error(caught)
        error, code, text = known.as_json(), known.exit_code, _for_reader(known)
    if as_json:
        _print(sys.stdout, json.dumps({"ok": False, "command": command, "error": error}))
    else:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed: the exit code still tells
            _print(sys.stderr, text)
    return code


def _answer(arguments: argparse.Namespace) -> int:
    """Run the command and print its outcome; returns its exit code."""
    reporter = make_reporter(arguments.log, sys.stderr)
    with _stdout_for_answers() as stdout:

        def announce(outcome: Outcome) -> None:
            answer = {"ok": True, "command": arguments.command, "result": outcome.result}
            if text := json.dumps(answer) if arguments.json else outcome.text:
                _print(stdout, text)

        try:
            outcome = _module(arguments.command).run(arguments, Context(reporter, announce))
        finally:
            reporter.close()
        if isinstance(outcome, int):  # it announced its outcome itself
            return outcome
        announce(outcome)
        return outcome.exit_code


def _as_trtspec_error(error: Exception) -> TrtspecError:
    if isinstance(error, TrtspecError):
        return error
    if isinstance(error, MemoryError):
        return SetupError(
            "out of memory", hint="close other programs, or lower max_batch_size or max_seq_len"
        )
    first = re.sub(r"\s+", " ", str(error)).strip()[:300]
    return InternalError(
        f"{type(error).__name__}: {first}" if first else type(error).__name__,
        hint="this is a defect of trtspec: run the same command with --debug and report what it prints",
    )


def _for_reader(error: TrtspecError) -> str:
    return str(error) if isinstance(error, ConfigError) and error.problems else f"error: {error}"


def _print(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before Python started
        return
    stream.write(text if text.endswith("\n") else text + "\n")
    stream.flush()


@contextlib.contextmanager
def _stdout_for_answers() -> Iterator[TextIO]:
    """Yields the real stdout; meanwhile whatever else prints there, native code included, reaches stderr."""
    real = sys.stdout
    try:
        native = real.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):
        native = False
    with contextlib.redirect_stdout(sys.stderr):
        if not native:
            yield real
            return
        saved = os.dup(1)
        os.dup2(2, 1)
        try:
            with open(saved, "w", encoding=real.encoding, errors="replace", closefd=False) as answers:
                yield answers
        finally:
            os.dup2(saved, 1)
            os.close(saved)


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in trtspec's form and with the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        hint = f"{self.prog} --help"
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"'([^']*)'", wrong[2]), 1)
            hint = f"did you mean {near[0]!r}?" if near else hint
        if wrong := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            near = difflib.get_close_matches(wrong[1], self._options(), 1)
            hint = f"did you mean {near[0]}?" if near else hint
        raise ConfigError(message, where="command line", hint=hint)

    def _options(self) -> set[str]:
        """The options of this parser and of all its commands."""
        nested = (
            action.choices or {} for action in self._actions if isinstance(action, argparse._SubParsersAction)
        )
        parsers = [self, *(parser for choices in nested for parser in choices.values())]
        return {option for parser in parsers for option in parser._option_string_actions}


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = common.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    group.add_argument(
        "--log", choices=LOG_STYLES, help="progress on stderr: bars or lines (auto), or as named"
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(prog="trtspec", description=trtspec.__doc__.partition(": ")[2], parents=[common])
    parser.set_defaults(json=False, log="auto", debug=False)
    parser.add_argument("--version", action="version", version=f"trtspec {trtspec.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name in COMMANDS:
        module = _module(name)
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, parents=[common], allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
    return parser


def _module(command: str):
    return import_module(f"trtspec.commands.{command}")


if __name__ == "__main__":
    sys.exit(main())
