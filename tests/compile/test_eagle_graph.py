"""The graphs of autoregressive heads against PyTorch: every option, rows in pieces, drafts as chains and as trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_heads import CAPTURED, HIDDEN, REDUCED, tiny_head
from trtspec.checkpoints import heads
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.checkpoints.head_layouts.head import Head
from trtspec.checkpoints.safetensors_files import TensorFolder
from trtspec.compile import CompileRequest, compile_engine
from trtspec.compile.heads import HeadRequest, compile_head, head_taps
from trtspec.compile.heads.eagle import int8_rows
from trtspec.drafters.head_engine import HEAD_FOLDER, read_info
from trtspec.drafters.pair_engine import OnnxPairEngine, PairStep
from trtspec.errors import ConfigError
from trtspec.train.pair_network_torch import PairNetwork, tensors_of

VARIANTS = {
    "eagle3": ("eagle3", {}),
    "reduced vocabulary": ("eagle3", {"d2t": REDUCED, "bfloat16": True}),
    "own embedding, other width": (
        "eagle3",
        {"hidden_size": 48, "own_embedding": True, "head_dim": 32, "rope_theta": 5e5},
    ),
    "two layers, biases, query norms": ("eagle3", {"num_hidden_layers": 2, "biases": True, "qk_norm": True}),
    "norms": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}),
    "a norm for each layer": ("eagle3", {"fc_norm": True, "captured": (0, 2)}),
    "the target's output layer": ("eagle3", {"own_lm_head": False}),
    "some rows of the target's output layer": ("eagle3", {"own_lm_head": False, "d2t": REDUCED}),
    "eagle": ("eagle", {"own_lm_head": False}),
    "mtp": ("mtp", {"d2t": REDUCED}),
    "p_eagle": ("p_eagle", {}),
}
WIDTHS = {"eagle": HIDDEN, "mtp": HIDDEN}


@pytest.fixture(scope="module")
def target(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's engine, without a head."""
    into = tmp_path_factory.mktemp("engine")
    speculation = {"method": "none", "draft_length": 0}
    compile_engine(
        CompileRequest(target, "tiny", speculation, max_batch=3, max_branches=2, taps=CAPTURED), into
    )
    return into


def written(head: Head, folder: Path) -> Path:
    (mtp if head.method == "mtp" else eagle).write_head(head, folder)
    return folder


def with_head(name: str, target: Path, plain: Path, place: Path) -> tuple[Head, Path]:
    """A variant's head, and the target's engine folder `plain` with that head in it."""
    method, settings = VARIANTS[name]
    head, engine = tiny_head(method, **settings), place / "engine"
    engine.mkdir()
    for file in plain.iterdir():
        (engine / file.name).symlink_to(file)
    compile_head(HeadRequest(method, written(head, place / "head"), target, 4), engine)
    return head, engine


@pytest.fixture(scope="module")
def opened(
    target: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Head, OnnxPairEngine]]:
    """A function from the name of a variant to the head and its engine."""
    made: dict[str, tuple[Head, OnnxPairEngine]] = {}

    def open_variant(name: str) -> tuple[Head, OnnxPairEngine]:
        if name not in made:
            head, engine = with_head(name, target, plain, tmp_path_factory.mktemp("head"))
            made[name] = head, OnnxPairEngine(engine, read_info(engine, head.method))
        return made[name]

    return open_variant


class Reference:
    """The head in PyTorch, with the target's tables where it shares them."""

    def __init__(self, head: Head, target: Path) -> None:
        stored = TensorFolder(target)
        self.network = PairNetwork(head.method, head.config, len(head.captured_layers))
        self.weights = tensors_of({name: head.array(name) for name in head.tensors})
        self.embedding = self.weights.get("embed_tokens.weight")
        if self.embedding is None:
            self.embedding = torch.from_numpy(stored.array("model.embed_tokens.weight"))
        self.output = self.weights.get("lm_head.weight")
        if self.output is None:
            rows = slice(None) if head.d2t is None else torch.from_numpy(np.arange(len(head.d2t)) + head.d2t)
            self.output = torch.from_numpy(stored.array("lm_head.weight"))[rows]
        self.target_norm = torch.from_numpy(stored.array("model.norm.weight"))
        self.reads_last = not head.captured_layers

    def fuse(self, captured: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(captured)
        if self.reads_last:
            rows = torch.nn.functional.rms_norm(rows, rows.shape[-1:], self.target_norm, 1e-6)
        return self.network.fuse(self.weights, rows)

    def chain(self, tokens: np.ndarray, states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, Vd] and recycled states [T, H] of one sequence, from nothing."""
        rows = torch.arange(len(tokens))
        seen = rows[None, :] <= rows[:, None]
        embedded = self.embedding[torch.from_numpy(tokens)][None]
        scored, recycled = self.network.run(self.weights, embedded, states[None], rows, seen, [])
        return (scored[0] @ self.output.T).numpy(), recycled[0].numpy()


def sequence(head: Head, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and captured states of `length` rows."""
    rng = np.random.default_rng(seed)
    width = WIDTHS.get(head.method, HIDDEN * len(head.captured_layers))
    return rng.integers(0, 320, length), rng.standard_normal((length, width)).astype(np.float32)


def close(one: np.ndarray, other: np.ndarray) -> None:
    assert np.abs(one - other).max() <= 2e-4 * np.abs(other).std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_any_pieces_are_pytorchs(
    opened: Callable[[str], tuple[Head, OnnxPairEngine]], target: Path, variant: str
) -> None:
    head, engine = opened(variant)
    reference = Reference(head, target)
    tokens, captured = sequence(head, 40)
    logits, recycled = reference.chain(tokens, reference.fuse(captured))
    start = 0
    for piece in (17, 1, 2, 20):
        rows = slice(start, start + piece)
        step = PairStep(1, start, tokens[rows], states=captured[rows])
        (output,) = engine.forward([step])
        close(output.logits, logits[rows])
        close(output.hidden, recycled[rows])
        start += piece


@pytest.mark.parametrize("variant", ["eagle3", "norms", "eagle", "mtp"])
def test_a_draft_goes_on_from_the_heads_own_output(
    opened: Callable[[str], tuple[Head, OnnxPairEngine]], target: Path, variant: str
) -> None:
    """Three rows behind the target's, each with the output of the row before, beside a sequence that is read."""
    head, engine = opened(variant)
    reference = Reference(head, target)
    tokens, captured = sequence(head, 12)
    other, other_captured = sequence(head, 30, seed=1)
    known = 9
    states = reference.fuse(captured[:known])
    for _ in range(3):
        states = torch.cat([states, torch.from_numpy(reference.chain(tokens[: len(states)], states)[1][-1:])])
    logits, _ = reference.chain(tokens, states)
    (output,) = engine.forward([PairStep(2, 0, tokens[:known], states=captured[:known])])
    for row in range(known, 12):
        steps = [
            PairStep(0, 5 * (row - known), other[:5], states=other_captured[:5]),
            PairStep(2, row, tokens[row : row + 1], states=output.hidden[-1:].copy(), recycled=True),
        ]
        output = engine.forward(steps)[1]
        close(output.logits[0], logits[row])


@pytest.mark.parametrize("variant", ["eagle3", "two layers, biases, query norms", "eagle"])
def test_a_branch_of_a_tree_sees_its_ancestors_alone(
    opened: Callable[[str], tuple[Head, OnnxPairEngine]], target: Path, variant: str
) -> None:
    """Two levels of two branches, run level by level: each is what the chain of its own path gives."""
    head, engine = opened(variant)
    reference = Reference(head, target)
    tokens, captured = sequence(head, 7)
    fused = reference.fuse(captured)
    (root,) = engine.forward([PairStep(0, 0, tokens, states=captured)])
    state = root.hidden[-1:].copy()
    first = np.array([11, 22])
    twice = np.repeat(state, 2, axis=0)
    branches = PairStep(
        0, 7, first, states=twice, recycled=True, sees=np.eye(2, dtype=bool), positions=np.array([7, 7])
    )
    (level,) = engine.forward([branches])
    outputs = level.hidden.copy()
    for branch in range(2):
        path = np.array([*tokens, first[branch]])
        logits, _ = reference.chain(path, torch.cat([fused, torch.from_numpy(state)]))
        close(level.logits[branch], logits[-1])
    second = np.array([33, 44, 55])  # below the second, the first and the first branch
    parents = [1, 0, 0]
    sees = np.zeros((3, 5), bool)
    for row, parent in enumerate(parents):
        sees[row, [parent, 2 + row]] = True
    deeper = PairStep(
        0, 9, second, states=outputs[parents], recycled=True, sees=sees, positions=np.array([8, 8, 8])
    )
    level = engine.forward([PairStep(1, 0, tokens, states=captured), deeper])[1]
    for row, parent in enumerate(parents):
        path = np.array([*tokens, first[parent], second[row]])
        states = torch.cat([fused, torch.from_numpy(state), torch.from_numpy(outputs[parent : parent + 1])])
        logits, _ = reference.chain(path, states)
        close(level.logits[row], logits[-1])


def test_int8_weights_are_rounded_as_modelopt_rounds_them() -> None:
    import modelopt.torch.quantization as mtq

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    weight = layer[0].weight.detach().numpy().copy()
    weight[3] = 0
    with torch.no_grad():
        layer[0].weight[3] = 0
    mtq.quantize(layer, mtq.INT8_WEIGHT_ONLY_CFG, lambda m: m(torch.zeros(1, 64)))
    theirs = layer[0].weight_quantizer(layer[0].weight).detach().numpy()
    ours = int8_rows(weight).dequantized()
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(weight).max()


def test_an_int8_head_scores_nearly_as_the_float_one(target: Path, plain: Path, tmp_path: Path) -> None:
    head = tiny_head("eagle3", d2t=REDUCED, intermediate_size=128)
    engines = []
    for quantization in ("none", "int8_weight_only"):
        engine = tmp_path / quantization / "engine"
        engine.mkdir(parents=True)
        for file in plain.iterdir():
            (engine / file.name).symlink_to(file)
        folder = written(head, tmp_path / quantization / "head")
        compile_head(HeadRequest("eagle3", folder, target, 4, quantization=quantization), engine)
        engines.append(OnnxPairEngine(engine, read_info(engine, "eagle3")))
    tokens, captured = sequence(head, 30)
    step = PairStep(0, 0, tokens, states=captured)
    exact, rounded = (engine.forward([step])[0].logits.copy() for engine in engines)
    error = np.abs(exact - rounded).std() / exact.std()
    assert 1e-4 < error < 0.05
    weights = [
        sum(f.stat().st_size for f in (tmp_path / q / "engine" / HEAD_FOLDER).glob("*.data"))
        for q in ("none", "int8_weight_only")
    ]
    assert weights[1] < 0.5 * weights[0]


def test_a_head_without_tables_keeps_none(
    opened: Callable[[str], tuple[Head, OnnxPairEngine]], plain: Path
) -> None:
    """The embedding is mapped from the target's own weights."""
    _, engine = opened("eagle3")
    assert isinstance(engine._table, np.memmap)
    assert Path(engine._table.filename).resolve() == (plain / "model.onnx.data").resolve()


def test_a_head_for_another_width_is_refused(target: Path, plain: Path, tmp_path: Path) -> None:
    head = tiny_head("eagle3", target_hidden_size=32)
    with pytest.raises(ConfigError, match="32 wide, the target's are 64"):
        compile_head(HeadRequest("eagle3", written(head, tmp_path), target, 4), plain)
    with pytest.raises(ConfigError, match="a head for eagle3, not p_eagle"):
        compile_head(HeadRequest("p_eagle", written(tiny_head("eagle3"), tmp_path), target, 4), plain)
    assert not (plain / HEAD_FOLDER).exists()


def test_the_target_captures_what_the_head_reads(tmp_path: Path) -> None:
    head = tiny_head("eagle3", captured=(0, 2))
    assert head_taps("eagle3", heads.read_head(written(head, tmp_path)), 3) == (0, 2)
    assert head_taps("eagle", heads.read_head(written(tiny_head("eagle"), tmp_path / "1")), 3) == (2,)
    assert head_taps("mtp", heads.read_head(written(tiny_head("mtp"), tmp_path / "m")), 3) == (2,)
