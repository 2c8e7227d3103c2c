"""Heads that read the target's states, on closed-form engines: which state stands beside which token, what is kept of
a judged draft, and how trees grow. Nothing a head does may show in the text.

The toy target's state at a row is a number made of the whole path up to it. The toy head's scores are a function of
every pair of token and state that a row sees, and of nothing else: one state beside the wrong token, one row that
was left over from a rejected draft, and its drafts are others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.toy import ToyEngine, hash_rule, reference, run
from trtspec.drafters.base import Ask, check_draft
from trtspec.drafters.catalog import spec_of
from trtspec.drafters.eagle import EagleDrafter, PairDrafter, ParallelDrafter
from trtspec.drafters.growth import EAGLE_CHOICES, DynamicGrowth, StaticGrowth, Vocabulary
from trtspec.drafters.mtp import MtpDrafter
from trtspec.drafters.pair_engine import PairStep
from trtspec.drafters.rank_tree import fixed_shape
from trtspec.engines.base import EngineSpec, SlotLogits
from trtspec.values import GenerationRequest, SamplingParams
from trtspec.verify.loop import DecodeLoop
from trtspec.verify.tree import ROOT, TokenTree

WORDS = 12
MASK_TOKEN, MASK_STATE = 3, -1.0

Pair = tuple[int, float]


def number(*parts: object) -> float:
    """A number made of anything, exact in float32."""
    return float(hash(parts) % 65_521)


def state_after(path: Sequence[int]) -> float:
    """The toy target's hidden state at the last row of a path."""
    return float(hash(tuple(path)) % 65_521)


def scores_of(pairs: tuple[Pair, ...]) -> np.ndarray:
    """The toy head's scores after a row that sees these pairs, its own the last."""
    seed = [hash(pair) & 0xFFFF_FFFF for pair in pairs]
    return np.random.default_rng(seed).standard_normal(WORDS).astype(np.float32)


class ToyHead:
    """Keeps pairs where a real head keeps keys and values. calls: rows of every pass so far, by slot."""

    def __init__(
        self, *, max_batch: int = 3, max_rows: int = 16, max_seq_len: int = 64, rule: Callable = scores_of
    ) -> None:
        self.spec = EngineSpec(WORDS, WORDS, max_batch, max_seq_len, max_rows, hidden_size=1, taps=(0,))
        self.calls: list[dict[int, int]] = []
        self.closed = 0
        self._rule = rule
        self._kept: list[list[Pair | None]] = [[None] * max_seq_len for _ in range(max_batch)]
        self._given: list[SlotLogits] = []

    def forward(self, steps: Sequence[PairStep]) -> list[SlotLogits]:
        for old in self._given:  # valid until the next call only
            old.logits[:], old.hidden[:] = np.nan, np.nan
        assert len({step.slot for step in steps}) == len(steps)
        self.calls.append({step.slot: len(step.tokens) for step in steps})
        self._given = [self._run(step) for step in steps]
        return self._given

    def _run(self, step: PairStep) -> SlotLogits:
        count, kept = len(step.tokens), self._kept[step.slot]
        assert 1 <= count <= self.spec.max_rows
        assert step.start + count <= self.spec.max_seq_len
        assert step.states.shape == (count, 1)
        end = step.start + count
        logits, hidden = [], []
        for row, (token, state) in enumerate(zip(step.tokens.tolist(), step.states[:, 0].tolist())):
            kept[step.start + row] = (token, state)
            if step.sees is None:
                seen = kept[: step.start + row + 1]
                assert step.positions is None or step.positions[row] == step.start + row
            else:
                first = end - step.sees.shape[1]  # rows before are committed
                drafted = [kept[first + i] for i in np.flatnonzero(step.sees[row])]
                assert step.positions[row] == first + len(drafted) - 1
                seen = [*kept[:first], *drafted]
            assert None not in seen
            logits.append(self._rule(tuple(seen)))
            hidden.append([number(*seen)])
        kept[end:] = [None] * (self.spec.max_seq_len - end)
        return SlotLogits(np.array(logits[step.logits_from :], np.float32), np.array(hidden, np.float32))

    def close(self) -> None:
        self.closed += 1


VOCABULARY = Vocabulary(WORDS, None, WORDS)


def chain_drafter(head: ToyHead, **options: object) -> EagleDrafter:
    spec = replace(spec_of("eagle3"), shape="chain")
    return EagleDrafter(spec, head, lambda n, d, _b: DynamicGrowth(VOCABULARY, n, d, 1), **options)


def tree_drafter(head: ToyHead, width: int = 3) -> EagleDrafter:
    return EagleDrafter(
        spec_of("eagle3"), head, lambda n, d, b: DynamicGrowth(VOCABULARY, n, d, b, width=width)
    )


def static_drafter(head: ToyHead) -> EagleDrafter:
    shape = fixed_shape(EAGLE_CHOICES, 5)
    return EagleDrafter(spec_of("eagle"), head, lambda n, d, b: StaticGrowth(VOCABULARY, n, d, b, shape))


def parallel_drafter(head: ToyHead, positions: int = 4) -> ParallelDrafter:
    mask = np.array([MASK_STATE], np.float32)
    return ParallelDrafter(
        replace(spec_of("p_eagle"), shape="chain"),
        head,
        VOCABULARY,
        positions=positions,
        mask_token_id=MASK_TOKEN,
        mask_hidden=mask,
    )


# -- what each mechanism drafts, by its definition and with no cache


def known_pairs(path: Sequence[int]) -> tuple[Pair, ...]:
    """Row i: token i + 1 and the state it was predicted from."""
    return tuple((path[i + 1], state_after(path[: i + 1])) for i in range(len(path) - 1))


def expected_chain(path: Sequence[int], count: int) -> list[int]:
    pairs, tokens = known_pairs(path), []
    for _ in range(count):
        tokens.append(int(np.argmax(scores_of(pairs))))
        pairs = (*pairs, (tokens[-1], number(*pairs)))
    return tokens


def expected_block(path: Sequence[int], count: int) -> list[int]:
    pairs, tokens = known_pairs(path), []
    for _ in range(count):
        tokens.append(int(np.argmax(scores_of(pairs))))
        pairs = (*pairs, (MASK_TOKEN, MASK_STATE))
    return tokens


def expected_modules(path: Sequence[int], count: int, modules: int) -> list[int]:
    """Token by token, every row of every module from scratch."""
    rows, tokens = len(path) - 1, []
    states = [state_after(path[: i + 1]) for i in range(rows)]
    pairs: list[Pair] = []
    for step in range(count):
        text = [*path, *tokens]
        if step < modules:  # the next module, over the same rows, one token further on
            pairs = [(text[i + 1 + step], states[i]) for i in range(rows)]
        else:  # the last one goes on behind them, from its own state
            pairs.append((text[-1], states[-1]))
        states = [number(*pairs[: i + 1]) for i in range(len(pairs))]
        tokens.append(int(np.argmax(scores_of(tuple(pairs)))))
    return tokens


def confidences(path: Sequence[int], tree: TokenTree) -> list[float]:
    """Of every node: the product of the head's probabilities along its path, from scratch."""
    found: dict[int, tuple[tuple[Pair, ...], float]] = {ROOT: (known_pairs(path), 1.0)}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        pairs, above = found[parent]
        p = np.exp(scores_of(pairs).astype(np.float64))
        found[node] = ((*pairs, (token, number(*pairs))), above * p[token] / p.sum())
    return [found[node][1] for node in range(len(tree))]


def propose(drafter: PairDrafter, states: Sequence[object], nodes: int, depth: int, branches: int = 1):
    drafts = drafter.propose([Ask(state, nodes, depth, branches) for state in states], len(states))
    for draft, state in zip(drafts, states):
        check_draft(draft, Ask(state, nodes, depth, branches), WORDS)
    return [draft.tree for draft in drafts]


def feed(drafter: PairDrafter, state: object, path: Sequence[int], new: Sequence[int]) -> None:
    """Tell the drafter of new tokens of a path, with the states they were predicted from."""
    whole = [*path, *new]
    states = [[state_after(whole[: len(path) + i])] for i in range(len(new))]
    drafter.observe(state, new, np.array(states, np.float32).reshape(len(new), 1))


def mtp_drafter(head: ToyHead, modules: int = 1) -> MtpDrafter:
    """Modules after the first are as the first, and differ in nothing but the rows they are given."""
    spec = head.spec
    sizes = {"max_batch": spec.max_batch, "max_rows": spec.max_rows, "max_seq_len": spec.max_seq_len}
    return MtpDrafter([head, *(ToyHead(**sizes, rule=head._rule) for _ in range(modules - 1))], VOCABULARY)


def three_modules(head: ToyHead) -> MtpDrafter:
    return mtp_drafter(head, 3)


KINDS = {
    "mtp": mtp_drafter,
    "mtp3": three_modules,
    "chain": chain_drafter,
    "tree": tree_drafter,
    "static": static_drafter,
    "parallel": parallel_drafter,
}
CHAINS = ("mtp", "mtp3", "chain", "parallel")


@settings(max_examples=80, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(KINDS)))
def test_states_stand_beside_their_tokens_after_any_history(data: st.DataObject, kind: str) -> None:
    """Sequences come, are drafted for in any company, accept any part of a draft, and go: every proposal is what the
    mechanism's definition gives for the text alone."""
    drafter = KINDS[kind](ToyHead(max_rows=5))
    token = st.integers(0, WORDS - 1)
    live: dict[object, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 10))):
        if len(live) < 3 and data.draw(st.booleans()):
            prompt = data.draw(st.lists(token, min_size=1, max_size=12))
            state = drafter.open(GenerationRequest("r", tuple(prompt)), seed=0)
            known = [*prompt, data.draw(token)]
            cut = data.draw(st.integers(1, len(known)))  # as the loop feeds a prompt: in pieces
            feed(drafter, state, known[:1], known[1:cut])
            feed(drafter, state, known[:cut], known[cut:])
            live[state] = known
        asked = [state for state in live if data.draw(st.booleans())]
        if not asked:
            continue
        depth = data.draw(st.integers(1, 4))
        nodes = depth if kind in CHAINS else data.draw(st.integers(depth, 9))
        trees = propose(drafter, asked, nodes, depth, 3)
        for state, tree in zip(asked, trees):
            if kind.startswith("mtp"):
                modules = 3 if kind == "mtp3" else 1
                assert list(tree.tokens) == expected_modules(live[state], depth, modules)
            elif kind == "chain":
                assert list(tree.tokens) == expected_chain(live[state], depth)
            elif kind == "parallel":
                assert list(tree.tokens) == expected_block(live[state], depth)
            else:
                check_tree(kind, live[state], tree, nodes, depth)
        if data.draw(st.booleans()):
            assert propose(drafter, asked, nodes, depth, 3) == trees, "asking again gives the same answer"
        for state, tree in zip(asked, trees):
            if data.draw(st.integers(0, 6)) == 0:
                drafter.release(state)
                del live[state]
                continue
            node = data.draw(st.integers(-1, len(tree) - 1))
            committed = [*(tree.tokens[n] for n in tree.path(node)), data.draw(token)]
            feed(drafter, state, live[state], committed)
            live[state] += committed


def check_tree(kind: str, path: Sequence[int], tree: TokenTree, nodes: int, depth: int) -> None:
    """The nodes are those the head is surest of, by its scores along each path."""
    found = confidences(path, tree)
    if kind == "static":
        for parent, children in tree.children.items():
            along = [path[-1:]] if parent == ROOT else tree.path(parent)
            pairs = known_pairs(path)
            for node in along if parent != ROOT else ():
                pairs = (*pairs, (tree.tokens[node], number(*pairs)))
            order = np.argsort(-scores_of(pairs), kind="stable")
            assert [tree.tokens[c] for c in children] == order[: len(children)].tolist()
        return
    assert len(tree) == nodes or tree.depth == depth or len(tree.leaves()) == 3
    assert found == sorted(found, reverse=True)
    best = int(np.argmax(scores_of(known_pairs(path))))
    assert tree.tokens[0] == best


def test_a_dynamic_tree_keeps_the_surest_nodes_of_all_that_may_be() -> None:
    """Against every path of the vocabulary down to the depth, without limits of width or branches."""
    drafter = tree_drafter(ToyHead(max_rows=64, max_seq_len=256), width=WORDS)
    for seed in range(6):
        path = np.random.default_rng(seed).integers(0, WORDS, 5).tolist()
        state = drafter.open(GenerationRequest("r", tuple(path[:-1])), seed=0)
        feed(drafter, state, path[:1], path[1:])
        (tree,) = propose(drafter, [state], 8, 3, WORDS)
        drafter.release(state)
        every: list[float] = []
        stack = [((), known_pairs(path), 1.0)]
        while stack:
            tokens, pairs, above = stack.pop()
            p = np.exp(scores_of(pairs).astype(np.float64))
            for token in range(WORDS):
                reached = above * p[token] / p.sum()
                every.append(reached)
                if len(tokens) < 2:
                    stack.append(((*tokens, token), (*pairs, (token, number(*pairs))), reached))
        assert np.allclose(sorted(confidences(path, tree), reverse=True), sorted(every, reverse=True)[:8])


def test_unlikely_paths_are_not_proposed_where_the_config_says_so() -> None:
    head = ToyHead()
    drafter = EagleDrafter(
        spec_of("eagle3"), head, lambda n, d, b: DynamicGrowth(VOCABULARY, n, d, b, width=3, least=0.2)
    )
    state = drafter.open(GenerationRequest("r", (1, 2)), seed=0)
    feed(drafter, state, [1], [2, 7])
    (tree,) = propose(drafter, [state], 9, 4, 9)
    assert all(c >= 0.2 for c in confidences([1, 2, 7], tree))


def test_only_branches_that_can_still_win_are_run() -> None:
    """Two nodes are wanted: only below the surest of the first level may one still lie that beats the second surest."""
    head = ToyHead()
    drafter = tree_drafter(head)
    state = drafter.open(GenerationRequest("r", (1, 2)), seed=0)
    feed(drafter, state, [1], [2, 7])
    propose(drafter, [state], 2, 2, 3)
    assert head.calls == [{0: 2}, {0: 1}]


def test_accepted_rows_are_made_again_from_the_targets_states_and_known_ones_are_not() -> None:
    head = ToyHead()
    drafter = chain_drafter(head)
    state = drafter.open(GenerationRequest("r", (1, 2, 3)), seed=0)
    feed(drafter, state, [1], [2, 3, 4])
    (tree,) = propose(drafter, [state], 4, 4)
    assert head.calls == [{0: 3}, {0: 1}, {0: 1}, {0: 1}]
    head.calls.clear()
    feed(drafter, state, [1, 2, 3, 4], [*tree.tokens[:2], 9])
    propose(drafter, [state], 1, 1)
    assert head.calls == [{0: 3}]
    head.calls.clear()
    propose(drafter, [state], 1, 1)
    assert head.calls == []  # asked again, nothing is run again


def test_all_positions_of_a_parallel_head_come_out_of_one_pass() -> None:
    head = ToyHead()
    drafter = parallel_drafter(head)
    states = [drafter.open(GenerationRequest(str(i), (i, 2)), seed=0) for i in range(3)]
    for i, state in enumerate(states):
        feed(drafter, state, [i], [2, 5])
    head.calls.clear()
    trees = propose(drafter, states, 4, 4)
    assert head.calls == [{0: 5, 1: 5, 2: 5}]
    assert [list(t.tokens) for t in trees] == [expected_block((i, 2, 5), 4) for i in range(3)]


def test_a_long_prompt_is_read_as_it_comes() -> None:
    head = ToyHead(max_rows=4)
    drafter = chain_drafter(head)
    prompt = [i % WORDS for i in range(15)]
    state = drafter.open(GenerationRequest("r", tuple(prompt)), seed=0)
    feed(drafter, state, prompt[:1], prompt[1:11])
    assert [call[0] for call in head.calls] == [4, 4, 2]
    assert not state.pending
    feed(drafter, state, prompt[:11], [*prompt[11:], 5])
    (tree,) = propose(drafter, [state], 3, 3)
    assert list(tree.tokens) == expected_chain([*prompt, 5], 3)


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_draft_lies_past_the_heads_context(kind: str) -> None:
    """8 positions known to the head: after 6 tokens two may be drafted, after 8 none, and never again."""
    drafter = KINDS[kind](ToyHead(max_seq_len=8))
    state = drafter.open(GenerationRequest("r", (1, 2, 3, 4, 5)), seed=0)
    feed(drafter, state, [1], [2, 3, 4, 5, 6])
    assert propose(drafter, [state], 4, 4, 3)[0].depth == 2
    feed(drafter, state, [1, 2, 3, 4, 5, 6], [7, 8])
    assert not len(propose(drafter, [state], 4, 4, 3)[0])
    feed(drafter, state, [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11])
    assert not len(propose(drafter, [state], 4, 4, 3)[0])
    long = drafter.open(GenerationRequest("l", tuple(range(11))), seed=0)
    feed(drafter, long, [0], list(range(1, 11)))
    feed(drafter, long, list(range(11)), [3])
    assert not len(propose(drafter, [long], 4, 4, 3)[0])


def test_slots_are_taken_once_and_given_back() -> None:
    head = ToyHead(max_batch=2)
    drafter = chain_drafter(head)
    first, _ = (drafter.open(GenerationRequest(str(i), (1,)), seed=0) for i in range(2))
    with pytest.raises(ValueError, match="2 slots"):
        drafter.open(GenerationRequest("x", (1,)), seed=0)
    drafter.release(first)
    assert drafter.open(GenerationRequest("x", (1,)), seed=0).slot == 0
    drafter.close()
    assert head.closed


def test_an_engine_that_captures_nothing_is_named() -> None:
    drafter = chain_drafter(ToyHead())
    state = drafter.open(GenerationRequest("r", (1, 2)), seed=0)
    with pytest.raises(ValueError, match="0 hidden states came with 1 tokens"):
        drafter.observe(state, (2,), np.empty((0, 0), np.float32))


def test_a_text_is_not_drafted_past_its_end() -> None:
    path = [1, 2, 3]
    whole = expected_chain(path, 5)
    drafter = chain_drafter(ToyHead(), special_ids=[whole[2]])
    state = drafter.open(GenerationRequest("r", (1, 2)), seed=0)
    feed(drafter, state, [1], [2, 3])
    (tree,) = propose(drafter, [state], 5, 5)
    assert list(tree.tokens) == whole[: whole.index(whole[2]) + 1]


# -- vocabularies


def test_a_reduced_vocabulary_drafts_target_ids_and_never_padding() -> None:
    d2t = np.array([0, 2, 4, 6])  # draft ids 0, 1, 2, 3 are the target's 0, 3, 6, 9
    scores = np.array([[0.5, 2.0, 1.0, 9.0]], np.float32)
    ids, logs = Vocabulary(WORDS, d2t, 4).likeliest(scores, 3)
    assert ids.tolist() == [[9, 3, 6]]
    assert np.allclose(np.exp(logs[0]), np.exp(scores[0, [3, 1, 2]]) / np.exp(scores).sum())
    ids, logs = Vocabulary(9, d2t, 4).likeliest(scores, 9)  # 9 is padding of the target's table
    assert ids.tolist() == [[3, 6, 0]]
    assert np.isclose(np.exp(logs).sum(), 1)


def test_ties_fall_to_the_lowest_id() -> None:
    scores = np.array([[1.0, 3.0, 3.0, 3.0, 0.0]], np.float32)
    for count in (1, 2, 3):
        ids, _ = Vocabulary(5, None, 5).likeliest(scores, count)
        assert ids.tolist() == [[1, 2, 3][:count]]


# -- in the loop


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_text_is_the_plain_one(kind: str, sampling: dict[str, float]) -> None:
    rule = hash_rule(WORDS, order=2)
    requests = [
        GenerationRequest(
            str(n),
            tuple(np.random.default_rng(n).integers(0, WORDS, 2 + 5 * n).tolist()),
            SamplingParams(max_tokens=20 + n, seed=n, **sampling),
        )
        for n in range(6)
    ]
    drafter = KINDS[kind](ToyHead())
    engine = ToyEngine(rule, WORDS, max_batch=3, max_rows=9, branches=3, hidden=1)
    outcome = run(DecodeLoop(engine, drafter, draft_length=5, max_queue=6), requests)
    assert not outcome.failures
    for r in requests:
        assert list(outcome.completions[r.request_id].token_ids) == reference(rule, WORDS, r, max_seq_len=64)
    assert len(drafter._free) == 3, "a slot was not given back"


@pytest.mark.parametrize("kind", ["mtp", "chain", "tree", "static", "parallel"])
def test_a_head_that_knows_the_target_is_accepted_whole(kind: str) -> None:
    """Its scores are the target's own of the tokens it sees: with tokens and rows aligned, nothing is rejected."""
    target = hash_rule(WORDS, order=1)

    def of_the_last_token(pairs: tuple[Pair, ...]) -> np.ndarray:
        token = next((t for t, s in reversed(pairs) if s != MASK_STATE))
        for _ in range(sum(s == MASK_STATE for _, s in pairs)):
            token = int(np.argmax(target((token,))))
        return target((token,))

    drafter = KINDS[kind](ToyHead(rule=of_the_last_token))
    engine = ToyEngine(target, WORDS, max_rows=9, branches=3, hidden=1)
    outcome = run(
        DecodeLoop(engine, drafter, draft_length=4),
        [GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=31))],
    )
    steps = outcome.completions["r"].steps
    if kind in CHAINS:
        assert all(step.accepted == step.drafted == 4 for step in steps)
    else:
        assert all(step.accepted >= 2 for step in steps[:-1])  # four nodes on at most three paths
