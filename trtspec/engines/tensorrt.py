"""The `Engine` on a TensorRT plan: KV buffers on the device, static shapes, one CUDA graph for each of them.

A plan has profiles, each a fixed number of sequences and rows (see tensorrt_info.py). Rows run on the smallest profile
that holds them, in several runs where none does; rows and sequences a run does not fill are padding, whose keys and
values fall behind what any row may see.

**Exactness.** An exact engine has one profile, so the same kernels compute every row, whatever shares its step: rows
cannot influence each other. The price is that a prompt is read in pieces of a verify step, and that attention does
not divide the keys of a lone sequence over the processors. `numerics: fast` does, and adds a profile of one row and
one of many rows of one sequence, for those that nobody wants logits of; other shapes may run other kernels, so plain
and speculative decoding are then equal to rounding only. Whether an exact engine is exact on a machine is not taken
on trust: see engines/selftest.py.

**Token trees** are masked: all rows of a step lie in one sequence's memory, each sees its ancestors' alone, and the
accepted ones are moved together afterwards. A hidden key still takes a place in the kernel's sums, so a tree's rows
equal a chain's to rounding only.

Memory of a sequence is [layers, keys and values, KV heads, capacity, head_dim] in the plan's dtype, or in FP8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trtspec.engines.base import SlotLogits, SlotStep, check_steps
from trtspec.engines.info import EngineInfo
from trtspec.engines.tensorrt_info import PLAN, BuiltPlan, Profile, TensorRtInfo, mask_words
from trtspec.errors import InternalError, SetupError
from trtspec.verify.tree import TokenTree

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Input = tuple[str, tuple[int, ...], "torch.dtype"]  # name, shape and type


class Runner(Protocol):
    """What computes the graph's outputs from its inputs, both given by name in memory of `device`."""

    device: str

    def run(self, profile: int, inputs: Tensors, outputs: Tensors) -> None:
        """Fill `outputs`. Tensors have the profile's shapes; equal names share memory (the KV cache) across both."""

    def close(self) -> None:
        """Release the runtime."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first … last − 1 of one step, and which of them need logits: those from `wanted` on."""

    step: SlotStep
    first: int
    last: int
    wanted: int

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(slots=True)
class _Answer:
    logits: np.ndarray
    hidden: np.ndarray | None


class TensorRtEngine:
    """Opens `folder` (engine.json, tensorrt.json, model.plan).

    max_batch: fewer slots are used than the plan has. runner: None runs the plan with TensorRT. Raises SetupError
    when TensorRT or the GPU is missing, or is not the one that the plan was built with.
    """

    def __init__(self, folder: Path, *, max_batch: int | None = None, runner: Runner | None = None) -> None:
        import torch

        self._torch = torch
        self.info = EngineInfo.read(folder)
        self.spec = self.info.spec
        if max_batch is not None:
            self.spec = replace(self.spec, max_batch=min(max_batch, self.spec.max_batch))
        self._shapes = TensorRtInfo.read(folder)
        self._runner = runner or PlanRunner(folder, self._shapes)
        slots = max(profile.batch for profile in self._shapes.profiles)
        self._cache = self._open_cache(slots)
        self._buffers = [self._allocate(profile) for profile in self._shapes.profiles]
        self._of_steps = [i for i, p in enumerate(self._shapes.profiles) if p.reads == "steps"]
        self._prompt = next((i for i, p in enumerate(self._shapes.profiles) if p.reads == "prompt"), None)

    def _open_cache(self, slots: int) -> torch.Tensor:
        """Keys and values of all slots, which the graph writes in place."""
        info, torch = self.info, self._torch
        return torch.zeros(
            (info.layers, 2, slots, info.kv_heads, self._shapes.capacity, info.head_dim),
            dtype=getattr(torch, self._shapes.cache_dtype),
            device=self._runner.device,
        )

    def _allocate(self, profile: Profile) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Inputs and outputs of a profile but for the cache; they stay where they are, as a CUDA graph needs."""
        torch, device, spec = self._torch, self._runner.device, self.spec
        inputs = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, shape, dtype in self._inputs_of(profile)
        }
        outputs = {"logits": torch.zeros((profile.logits, spec.vocab_size), device=device)}
        if spec.taps:
            width = len(spec.taps) * spec.hidden_size
            outputs["hidden"] = torch.zeros((profile.batch, profile.rows, width), device=device)
        return inputs, outputs

    def _inputs_of(self, profile: Profile) -> list[Input]:
        """The graph's inputs but for the cache."""
        by_row, by_sequence, torch = (profile.batch, profile.rows), (profile.batch,), self._torch
        inputs = [
            ("input_ids", by_row, torch.int64),
            ("position_ids", by_row, torch.int64),
            ("write_starts", by_sequence, torch.int64),
            ("kv_lengths", by_sequence, torch.int32),
            ("query_lengths", by_sequence, torch.int32),
            ("logit_rows", (profile.logits,), torch.int64),
        ]
        if self._shapes.trees:
            inputs.append(("tree_mask", (*by_row, mask_words(profile.rows)), torch.int32))
        return inputs

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        """See `Engine.forward`. A tree has no more rows than a verify step."""
        check_steps(steps, self.spec)
        self._check_trees(steps)
        spec = self.spec
        width = len(spec.taps) * spec.hidden_size
        answers = {
            step.slot: _Answer(
                np.empty((len(step.tokens) - step.logits_from, spec.vocab_size), np.float32),
                np.empty((len(step.tokens), width), np.float32) if spec.taps else None,
            )
            for step in steps
        }
        done = {step.slot: self._read_prompt(step, answers[step.slot]) for step in steps}
        while waiting := [step for step in steps if done[step.slot] < len(step.tokens)]:
            widest = max(len(step.tokens) - done[step.slot] for step in waiting)
            index = self._smallest(widest)
            most = self._shapes.profiles[index].rows
            pieces = [_piece(step, done[step.slot], most) for step in waiting]
            self._run(index, {piece.step.slot: piece for piece in pieces}, answers)
            done |= {piece.step.slot: piece.last for piece in pieces}
        return [_logits_of(answers[step.slot]) for step in steps]

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """See `Engine.commit`. A chain's accepted rows already lie where they belong."""
        if list(rows) == list(range(len(rows))):
            return
        if not self._shapes.trees:
            raise ValueError(f"rows {list(rows)} are no path of a chain")
        kept = self._torch.as_tensor(rows, device=self._runner.device) + start
        sequence = self._cache[:, :, slot]
        sequence[:, :, :, start : start + len(rows)] = sequence[:, :, :, kept]

    def copy(self, source: int, destination: int, length: int) -> None:
        """See `Engine.copy`."""
        self._cache[:, :, destination, :, :length] = self._cache[:, :, source, :, :length]

    def close(self) -> None:
        """See `Engine.close`."""
        self._runner.close()

    def _read_prompt(self, step: SlotStep, answer: _Answer) -> int:
        """Run the rows that nobody wants logits of on their own profile, if there is one; how many that were."""
        if self._prompt is None or step.parents is not None:
            return 0
        most, done = self._shapes.profiles[self._prompt].rows, 0
        while done < step.logits_from:
            piece = _piece(step, done, min(most, step.logits_from - done))
            self._run(self._prompt, {step.slot: piece}, {step.slot: answer}, offset=step.slot)
            done = piece.last
        return done

    def _check_trees(self, steps: Sequence[SlotStep]) -> None:
        """A tree is one run's: a row of a later one would see all before it, other branches too."""
        most = max(self._shapes.profiles[index].rows for index in self._of_steps)
        for step in steps:
            if step.parents is not None and len(step.tokens) > most:
                raise ValueError(f"slot {step.slot}: a tree of {len(step.tokens)} rows, at most {most} fit")

    def _smallest(self, rows: int) -> int:
        """The profile for all slots that holds this many rows, the largest where none does."""
        profiles = self._shapes.profiles
        return min(self._of_steps, key=lambda i: (profiles[i].rows < rows, abs(profiles[i].rows - rows)))

    def _run(
        self, index: int, pieces: Mapping[int, Piece], answers: Mapping[int, _Answer], offset: int = 0
    ) -> None:
        """Run pieces by slot on one profile, whose first sequence is slot `offset`; write what they want to answers."""
        profile, (inputs, outputs) = self._shapes.profiles[index], self._buffers[index]
        for name, array in self._feeds(profile, pieces, offset).items():
            inputs[name].copy_(self._torch.from_numpy(array))
        cache = self._cache_of(offset, profile.batch)
        past = {f"past_{name}": tensor for name, tensor in cache.items()}
        past |= self._read_only(offset, profile.batch)
        self._runner.run(index, {**inputs, **past}, {**outputs, **cache})
        wanted = [(piece, row) for piece in pieces.values() for row in range(piece.wanted, piece.last)]
        logits = outputs["logits"][: len(wanted)].cpu().numpy()
        for (piece, row), values in zip(wanted, logits):
            answers[piece.step.slot].logits[row - piece.step.logits_from] = values
        if "hidden" in outputs:
            hidden = outputs["hidden"].cpu().numpy()
            for slot, piece in pieces.items():
                answers[slot].hidden[piece.first : piece.last] = hidden[slot - offset, : piece.rows]

    def _read_only(self, slot: int, count: int) -> dict[str, torch.Tensor]:
        """What the graph reads besides of `count` slots from `slot` on, and does not write."""
        return {}

    def _cache_of(self, slot: int, count: int) -> dict[str, torch.Tensor]:
        """The KV of `count` slots from `slot` on, by the names of the graph's outputs."""
        cache = self._cache[:, :, slot : slot + count]
        parts = enumerate(("keys", "values"))
        return {f"{name}.{layer}": cache[layer, i] for i, name in parts for layer in range(self.info.layers)}

    def _feeds(self, profile: Profile, pieces: Mapping[int, Piece], offset: int) -> dict[str, np.ndarray]:
        """The graph's inputs (see compile/export_tensorrt.py)."""
        shape = (profile.batch, profile.rows)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        # Padding is written too: of a sequence behind its own rows, of an idle slot behind the last one it may have.
        starts = np.full(profile.batch, self._shapes.capacity - profile.rows, np.int64)
        keys, queries = np.zeros(profile.batch, np.int32), np.zeros(profile.batch, np.int32)
        trees = {slot: _tree(piece.step) for slot, piece in pieces.items() if piece.step.parents is not None}
        rows: list[int] = []
        for slot, piece in pieces.items():
            lane, start = slot - offset, piece.step.start + piece.first
            tokens[lane, : piece.rows] = piece.step.tokens[piece.first : piece.last]
            places = np.arange(profile.rows)
            if slot in trees:
                places[: piece.rows] = np.array(trees[slot].depths) - 1
            positions[lane] = np.minimum(start + places, self.spec.max_seq_len - 1)
            starts[lane], keys[lane], queries[lane] = start, start + piece.rows, piece.rows
            first = lane * profile.rows - piece.first
            rows += range(first + piece.wanted, first + piece.last)
        feeds = {
            "input_ids": tokens,
            "position_ids": positions,
            "write_starts": starts,
            "kv_lengths": keys,
            "query_lengths": queries,
            "logit_rows": np.array(rows + [0] * (profile.logits - len(rows)), np.int64),
        }
        if self._shapes.trees:
            feeds["tree_mask"] = _tree_mask(profile, {slot - offset: tree for slot, tree in trees.items()})
        return feeds


def _piece(step: SlotStep, first: int, most: int) -> Piece:
    last = min(first + most, len(step.tokens))
    return Piece(step, first, last, min(max(first, step.logits_from), last))


def _tree(step: SlotStep) -> TokenTree:
    return TokenTree(tuple(step.tokens.tolist()), tuple(step.parents.tolist()))


def _tree_mask(profile: Profile, trees: Mapping[int, TokenTree]) -> np.ndarray:
    """int32 [B, T, words]: the rows each row sees, a bit each. trees: by sequence; the others are chains."""
    mask = np.tile(packed(np.tri(profile.rows, dtype=np.bool_), profile.rows), (profile.batch, 1, 1))
    for lane, tree in trees.items():
        mask[lane, : len(tree)] = packed(tree.ancestor_mask(), profile.rows)
    return mask


def packed(sees: np.ndarray, rows: int) -> np.ndarray:
    """bool [n, m], m at most `rows`, as the bits of int32 [n, words]."""
    packed = np.packbits(sees, axis=1, bitorder="little")
    words = np.zeros((len(sees), 4 * mask_words(rows)), np.uint8)
    words[:, : packed.shape[1]] = packed
    return words.view(np.dtype("<i4"))


def _logits_of(answer: _Answer) -> SlotLogits:
    return SlotLogits(answer.logits) if answer.hidden is None else SlotLogits(answer.logits, answer.hidden)


class PlanRunner:
    """A TensorRT plan on the current CUDA device. The first run of a profile over some memory is captured as a CUDA
    graph, and later ones replay it."""

    device = "cuda"

    def __init__(self, folder: Path, info: TensorRtInfo) -> None:
        self._trt, self._torch = modules()
        plan = (folder / PLAN).read_bytes() if (folder / PLAN).is_file() else b""
        check_plan(folder, plan, info.built, self._trt.__version__, current_sm(self._torch))
        logger = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime = self._trt.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise SetupError(
                f"TensorRT {self._trt.__version__} refuses the plan", where=str(folder / PLAN), hint=_AGAIN
            )
        self._stream = self._torch.cuda.Stream()
        self._contexts = [self._context(i) for i in range(len(info.profiles))]
        self._graphs: dict[tuple[int, ...], Any] = {}

    def _context(self, profile: int) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        context = self._engine.create_execution_context(strategy)
        context.set_optimization_profile_async(profile, self._stream.cuda_stream)
        return context

    def run(self, profile: int, inputs: Tensors, outputs: Tensors) -> None:
        """See `Runner.run`; returns when the outputs are there."""
        tensors = [*inputs.items(), *outputs.items()]
        key = (profile, *(tensor.data_ptr() for _, tensor in tensors))
        self._stream.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(self._stream):
            if graph := self._graphs.get(key):
                graph.replay()
            else:
                self._enqueue(profile, inputs, outputs)
                self._stream.synchronize()  # TensorRT's first run of a shape does work that no graph may hold
                self._graphs[key] = self._captured(profile)
        self._stream.synchronize()

    def _enqueue(self, profile: int, inputs: Tensors, outputs: Tensors) -> None:
        context = self._contexts[profile]
        for name, tensor in inputs.items():
            context.set_input_shape(name, tuple(tensor.shape))
        for name, tensor in (*inputs.items(), *outputs.items()):
            context.set_tensor_address(name, tensor.data_ptr())
        self._execute(context)

    def _captured(self, profile: int) -> Any:
        """A CUDA graph of the run just made: its shapes and addresses are still set."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            self._execute(self._contexts[profile])
        return graph

    def _execute(self, context: Any) -> None:
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise InternalError("TensorRT could not run the plan; what it says is above")

    def close(self) -> None:
        """See `Runner.close`."""
        self._graphs.clear()
        self._contexts.clear()
        self._engine = self._runtime = None


_AGAIN = "build the plan again on this machine: `trtspec build --resume BUILD`"


def modules() -> tuple[Any, Any]:
    """(tensorrt, torch). Raises SetupError where one of them or the GPU is missing."""
    try:
        import tensorrt
        import torch
    except ImportError as error:
        raise SetupError(
            f"{error.name or 'tensorrt'} is not installed", hint="pip install tensorrt torch"
        ) from error
    if not torch.cuda.is_available():
        raise SetupError(
            "TensorRT runs on an NVIDIA GPU, and PyTorch sees none",
            hint="`trtspec doctor --backend tensorrt`",
        )
    return tensorrt, torch


def current_sm(torch: Any) -> str:
    """Architecture of the current CUDA device, as "sm_90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def check_plan(folder: Path, plan: bytes, built: BuiltPlan | None, version: str, sm: str) -> None:
    """Raise SetupError, saying what differs, for a plan that is absent or that another machine built."""
    where = str(folder / PLAN)
    if built is None or not plan:
        raise SetupError("no TensorRT plan was built here yet", where=where, hint=_AGAIN)
    if hashlib.sha256(plan).hexdigest() != built.sha256:
        raise SetupError("the plan's bytes are not those that were built", where=where, hint=_AGAIN)
    for name, made, here in (("TensorRT", built.version, version), ("GPU", built.sm, sm)):
        if made != here:
            raise SetupError(
                f"the plan was built for {name} {made}, here is {here}", where=where, hint=_AGAIN
            )
