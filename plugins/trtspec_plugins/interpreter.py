"""Runs a kernel on the CPU, program by program, in Triton's interpreter: what the tests compare with references.

Triton decides at import whether it compiles or interprets, so the interpreter has a process of its own. Tensors
travel there and back through pipes; grid, scalars and tensors are exactly those of a launch.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor

MODULES: Mapping[str, str] = {"verify_combine": "verify_attention", "spec_accept_combine": "spec_accept"}


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: its name. arguments: tensor, int or None for each parameter before the constants, in order."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[Tensor | int | None, ...]
    constants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """arguments: those of the launch, written by the kernel. products: (M, N, K) of every `tl.dot`, in order."""

    arguments: tuple[Tensor | int | None, ...]
    products: tuple[tuple[int, int, int], ...]


class Interpreter:
    """A process that interprets launches. Use as a context manager."""

    def __enter__(self) -> Interpreter:
        folder = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trtspec_plugins.interpreter"],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, launch: Launch) -> Outcome:
        """Raises RuntimeError with the interpreter's own traceback where the kernel fails."""
        _send(launch, self._process.stdin)
        outcome = _receive(self._process.stdout)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome


def _interpret(launch: Launch) -> Outcome:
    from importlib import import_module

    from triton.runtime import interpreter

    module = import_module(f"trtspec_plugins.kernels.{MODULES.get(launch.kernel, launch.kernel)}")
    products: list[tuple[int, int, int]] = []
    create_dot = interpreter.InterpreterBuilder.create_dot

    def counted(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        products.append((a.data.shape[-2], b.data.shape[-1], a.data.shape[-1]))
        return create_dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = counted
    try:
        getattr(module, launch.kernel)[launch.grid](*launch.arguments, **launch.constants)
    finally:
        interpreter.InterpreterBuilder.create_dot = create_dot
    return Outcome(launch.arguments, tuple(products))


def launch_of(
    kernel: str, values: Mapping[str, int], tensors: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> Launch:
    """A launch by name: `values` holds dimensions and scalars; tensors that are left out are passed as None."""
    from trtspec_plugins.signature import SIGNATURES, Scalar, cdiv

    signature = SIGNATURES[kernel]
    arguments: Sequence[Any] = [
        values[argument.name] if isinstance(argument, Scalar) else tensors.get(argument.name)
        for argument in (*signature.inputs, *signature.scalars, *signature.outputs)
    ]
    return Launch(kernel, signature.grid(values, constants, cdiv), tuple(arguments), constants)


def _send(message: Any, stream: BinaryIO) -> None:
    import torch

    buffer = io.BytesIO()
    torch.save(message, buffer)  # plain pickles of 8-bit floats cannot be read back
    pickle.dump(buffer.getvalue(), stream)
    stream.flush()


def _receive(stream: BinaryIO) -> Any:
    import torch

    return torch.load(io.BytesIO(pickle.load(stream)), weights_only=False)


def _serve() -> None:
    """Answer launches from stdin until it closes. What kernels print goes to stderr."""
    import traceback

    from trtspec_plugins import interpreter  # pickles name the module, not __main__

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            launch = _receive(requests)
        except EOFError:
            return
        try:
            answer: Outcome | str = interpreter._interpret(launch)
        except Exception:  # whatever a kernel does wrong is the caller's to see
            answer = traceback.format_exc()
        _send(answer, answers)


if __name__ == "__main__":
    _serve()
