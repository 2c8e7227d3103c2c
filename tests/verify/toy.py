"""Closed-form engines and drafters: everything about decoding can be computed by hand against them.

`ToyEngine` keeps tokens where a real engine keeps keys and values. Its logits are a pure function, the
*rule*, of the token path a row sees, so any mistake in start, parents, commit or copy changes the output; and
it checks the caller's side of the engine contract at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trtspec.drafters.base import Ask, Draft, DrafterSpec
from trtspec.engines.base import EngineSpec, SlotLogits, SlotStep
from trtspec.values import Completion, Delta, GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop, Failure
from trtspec.verify.randomness import PositionRandom, Stream
from trtspec.verify.tree import ROOT, TokenTree

Rule = Callable[[tuple[int, ...]], np.ndarray]  # visible token path → logits float32 [vocab]


def hash_rule(vocab: int, *, seed: int = 0, order: int | None = None, scale: float = 2.0) -> Rule:
    """Normal logits from a hash of the path, or of its last `order` tokens (text then repeats itself)."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def rule(path: tuple[int, ...]) -> np.ndarray:
        key = path if order is None else path[-order:]
        if key not in known:
            entropy = np.random.SeedSequence([seed, *(token + 1 for token in key)])
            known[key] = (scale * np.random.default_rng(entropy).standard_normal(vocab)).astype(np.float32)
        return known[key]

    return rule


def scripted_rule(vocab: int, script: Sequence[int], prompt_length: int) -> Rule:
    """Greedy decoding gives `script`, whatever the path holds; its last token for ever after."""

    def rule(path: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(vocab, np.float32)
        logits[script[min(len(path) - prompt_length, len(script) - 1)]] = 5.0
        return logits

    return rule


class ToyEngine:
    """See the module. reserve: rows a slot can hold past max_seq_len. calls: rows of every forward pass so
    far.
    """

    def __init__(
        self,
        rule: Rule,
        vocab: int,
        *,
        padded: int = 0,
        max_batch: int = 4,
        max_seq_len: int = 64,
        max_rows: int = 16,
        reserve: int = 0,
        branches: int = 64,
        hidden: int = 0,
        exact: bool = True,
    ) -> None:
        self.spec = EngineSpec(
            vocab_size=vocab + padded,
            tokenizer_vocab_size=vocab,
            max_batch=max_batch,
            max_seq_len=max_seq_len,
            max_rows=max_rows,
            exact=exact,
            max_branches=branches,
            hidden_size=hidden,
            taps=(0,) if hidden else (),
        )
        self.rule = rule
        self.calls: list[list[int]] = []
        self._capacity = max_seq_len + reserve
        self._kv: list[list[int | None]] = [[None] * self._capacity for _ in range(max_batch)]
        self._last: dict[int, SlotStep] = {}
        self._given: list[SlotLogits] = []

    def forward(self, steps: Sequence[SlotStep]) -> list[SlotLogits]:
        for old in self._given:  # valid until the next call only
            old.logits[:] = np.nan
            old.hidden[:] = np.nan
        slots = [step.slot for step in steps]
        if len(set(slots)) < len(slots) or not set(slots) <= set(range(self.spec.max_batch)):
            raise ValueError(f"slots {slots} are not distinct ones of {self.spec.max_batch}")
        self.calls.append([len(step.tokens) for step in steps])
        self._last = {step.slot: step for step in steps}
        self._given = [self._run(step) for step in steps]
        return self._given

    def _run(self, step: SlotStep) -> SlotLogits:
        count, kv = len(step.tokens), self._kv[step.slot]
        if not 1 <= count <= self.spec.max_rows or step.start + count > self._capacity:
            raise ValueError(f"{count} rows at {step.start} do not fit")
        if step.parents is not None:
            tree = TokenTree(tuple(step.tokens.tolist()), tuple(step.parents.tolist()))
            if len(tree.leaves()) > self.spec.max_branches:
                raise ValueError(f"{len(tree.leaves())} branches, at most {self.spec.max_branches}")
        prefix = tuple(kv[: step.start])
        if None in prefix:
            raise ValueError(f"slot {step.slot} was never written up to {step.start}")
        parents = range(-1, count - 1) if step.parents is None else step.parents
        paths: list[tuple[int, ...]] = []
        for row, (token, parent) in enumerate(zip(step.tokens.tolist(), parents, strict=True)):
            kv[step.start + row] = token
            paths.append((*(prefix if parent < 0 else paths[parent]), token))
        if step.parents is not None:  # where a tree's rows lie before `commit` is the engine's own business
            kv[step.start :] = [None] * (self._capacity - step.start)
        logits = np.full(
            (count - step.logits_from, self.spec.vocab_size), 1e9, np.float32
        )  # padding looks tempting
        for row, path in enumerate(paths[step.logits_from :]):
            logits[row, : self.spec.tokenizer_vocab_size] = self.rule(path)
        width = self.spec.hidden_size
        hidden = np.array([[hash(path) % 65_521] * width for path in paths], np.float32).reshape(count, width)
        return SlotLogits(logits, hidden)

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        step = self._last[slot]
        if list(rows) != sorted(set(rows)) or step.start != start or rows[-1] >= len(step.tokens):
            raise ValueError(f"rows {rows} of slot {slot}")
        kept = [int(step.tokens[row]) for row in rows]
        self._kv[slot][start:] = kept + [None] * (self._capacity - start - len(kept))

    def copy(self, source: int, destination: int, length: int) -> None:
        self._kv[destination] = self._kv[source][:length] + [None] * (self._capacity - length)

    def close(self) -> None:
        pass


@dataclass
class PathDrafter:
    """Asks `guess` for the draft of a known token path; remembers what it was told, to compare with the
    truth.
    """

    guess: Callable[[tuple[int, ...], Ask], Draft]
    shape: str = "tree"
    hidden_states: str = "none"
    seen: list[list[int]] = field(default_factory=list)
    hidden: list[list[float]] = field(default_factory=list)
    released: int = 0

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec("toy", "Toy", None, self.shape, True, ("onnxruntime",), None, self.hidden_states)

    def open(self, request: GenerationRequest, seed: int) -> int:
        self.seen.append(list(request.prompt[:1]))
        self.hidden.append([])
        return len(self.seen) - 1

    def observe(self, state: int, tokens: Sequence[int], hidden: np.ndarray) -> None:
        self.seen[state].extend(tokens)
        if hidden.size:
            assert len(hidden) == len(tokens)
            self.hidden[state].extend(hidden[:, 0].tolist())

    def propose(self, asks: Sequence[Ask], rows: int) -> list[Draft]:
        return [self.guess(tuple(self.seen[ask.state]), ask) for ask in asks]

    def release(self, state: int) -> None:
        self.released += 1

    def close(self) -> None:
        pass


def right_drafter(rule: Rule, vocab: int) -> PathDrafter:
    """Every draft is the greedy continuation."""

    def guess(path: tuple[int, ...], ask: Ask) -> Draft:
        tokens: list[int] = []
        for _ in range(min(ask.nodes, ask.depth)):
            tokens.append(int(np.argmax(rule((*path, *tokens))[:vocab])))
        return Draft.chain(tokens)

    return PathDrafter(guess, "chain")


def wrong_drafter(rule: Rule, vocab: int) -> PathDrafter:
    """Every draft differs from the greedy continuation."""

    def guess(path: tuple[int, ...], ask: Ask) -> Draft:
        first = (int(np.argmax(rule(path)[:vocab])) + 1) % vocab
        return Draft.chain([first] * min(ask.nodes, ask.depth))

    return PathDrafter(guess, "chain")


def random_tree(
    rng: np.random.Generator, vocab: int, nodes: int, depth: int, branches: int = 64
) -> TokenTree:
    """Any valid tree within the limits; siblings may be equal."""
    parents: list[int] = []
    depths: list[int] = []
    for node in range(int(rng.integers(0, nodes + 1))):
        choices = [ROOT, *(n for n in range(node) if depths[n] < depth)]
        leaves = [n for n in range(node) if n not in parents]
        if len(leaves) >= branches:
            choices = [n for n in choices if n in leaves]
        if not choices:
            break
        parent = choices[int(rng.integers(len(choices)))]
        parents.append(parent)
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return TokenTree(tuple(int(t) for t in rng.integers(0, vocab, len(parents))), tuple(parents))


def random_tree_drafter(vocab: int, seed: int = 0) -> PathDrafter:
    """Random trees, the same again for the same path."""

    def guess(path: tuple[int, ...], ask: Ask) -> Draft:
        rng = np.random.default_rng([seed, len(path), *path[-3:]])
        return Draft(random_tree(rng, vocab, ask.nodes, ask.depth, ask.branches))

    return PathDrafter(guess)


@dataclass
class Outcome:
    """Everything a loop said, by request id."""

    completions: dict[str, Completion] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    deltas: dict[str, list[Delta]] = field(default_factory=dict)


def run(loop: DecodeLoop, requests: Sequence[GenerationRequest] = (), *, most_steps: int = 10_000) -> Outcome:
    """Submit all and step until nothing is left."""
    for request in requests:
        loop.submit(request)
    outcome = Outcome()
    for _ in range(most_steps):
        if not loop.has_work:
            return outcome
        result = loop.step()
        for delta in result.deltas:
            outcome.deltas.setdefault(delta.request_id, []).append(delta)
        outcome.completions.update((c.request_id, c) for c in result.completions)
        outcome.failures.update((f.request_id, f) for f in result.failures)
    raise AssertionError(f"still working after {most_steps} steps")


def reference(
    rule: Rule, vocab: int, request: GenerationRequest, *, max_seq_len: int, stop_ids: Sequence[int] = ()
) -> list[int]:
    """The same request decoded one token at a time, by code that shares nothing with the loop but the
    uniforms.
    """
    s, path = request.sampling, list(request.prompt)
    most = max_seq_len - len(path) if s.max_tokens is None else min(s.max_tokens, max_seq_len - len(path))
    stops = {*(() if s.ignore_eos else stop_ids), *s.stop_token_ids}
    out: list[int] = []
    while len(out) < most:
        logits = [float(x) for x in rule(tuple(path))[:vocab]]
        for token in set(path):
            x = logits[token]
            logits[token] = x * s.repetition_penalty if x < 0 else x / s.repetition_penalty
        for token in set(out):
            logits[token] -= s.frequency_penalty * out.count(token)
            logits[token] -= s.presence_penalty
        token = _naive_token(logits, s, PositionRandom(s.seed or 0).uniform(Stream.TARGET, len(out)))
        path.append(token)
        out.append(token)
        if token in stops:
            break
    return out


def _naive_token(logits: list[float], s: SamplingParams, uniform: float) -> int:
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.temperature == 0:
        return ranked[0]
    if s.top_k:
        ranked = ranked[: s.top_k]
    weights = {i: np.exp((logits[i] - logits[ranked[0]]) / s.temperature) for i in ranked}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i] / total
        if mass >= s.top_p:
            break
    total, running = sum(weights[i] for i in kept), 0.0
    for i in sorted(kept):
        running += weights[i] / total
        if uniform < running:
            return i
    return max(kept)
