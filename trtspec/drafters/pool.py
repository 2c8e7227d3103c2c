"""N-grams of ended requests, shared with all that come after: boilerplate, templates and answers that recur are drafted
from the first token on.

**What sharing gives away.** A draft never changes a text, so no token of one request can reach another's output. Time
can tell, though, and so can the counts of drafted and accepted tokens: a request that goes on as an earlier one did is
answered faster. Whoever may send requests and time the answers can test guesses at what others were told. That is why
sharing is off unless a config asks for it, and only for users who may know each other's texts.

**Structure.** The tokens lie in a ring, the newest in place of the oldest, a separator after each text. As in an LZ77
window (RFC 1951, section 4) a dictionary holds the newest start of every n-gram of one length, and each start the one
before it: a match is extended backwards from there. Memory is a few words a token of the ring's fixed size.

Only the thread that steps the decode loop touches a pool, as it does a drafter; there is no lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

_SEPARATOR = -1
_NOWHERE = -1
_ID_BITS = 32
# Shorter matches in other texts say too little of what follows.
_SHORTEST = 3
# Occurrences that are compared, from the newest on.
_MOST_CANDIDATES = 16


class NgramPool:
    """The last `size` tokens of ended texts. min_ngram, max_ngram: shortest and longest match, in tokens; none is
    shorter than 3 unless max_ngram is. special_ids (end of text, turn markers) are part of no match.

    Raises ValueError for sizes that hold no match.
    """

    __slots__ = ("_key_length", "_longest", "_newest", "_older", "_special", "_tokens", "_written")

    def __init__(
        self, size: int, *, min_ngram: int = 1, max_ngram: int = 8, special_ids: Collection[int] = ()
    ) -> None:
        self._key_length = min(max_ngram, max(min_ngram, _SHORTEST))
        if not 1 <= min_ngram <= max_ngram or size <= self._key_length:
            raise ValueError(
                f"a pool of {size} tokens holds no match of {min_ngram} to {max_ngram} tokens and one that follows"
            )
        self._longest = max_ngram
        self._special = frozenset(special_ids)
        # Positions count all tokens ever written; position p lies in slot p modulo the size until it is overwritten.
        self._tokens = array("q", [_SEPARATOR]) * size
        self._older = array("q", [_NOWHERE]) * size  # by start: the start before it of the same n-gram
        self._newest: dict[int, int] = {}  # n-gram → its newest start
        self._written = 0

    def __len__(self) -> int:
        """Tokens and separators held."""
        return min(self._written, len(self._tokens))

    @property
    def ngrams(self) -> int:
        """Different n-grams that can be found; never more than there are tokens."""
        return len(self._newest)

    def add(self, text: Sequence[int]) -> None:
        """Take in the tokens of an ended request; of a long one what fits, its end."""
        size, run = len(self._tokens), 0
        for token in (*text[-(size - 1) :], _SEPARATOR):
            position = self._written
            if position >= size:
                self._forget(position - size)
            self._tokens[position % size] = token
            self._written += 1
            run = 0 if token == _SEPARATOR or token in self._special else run + 1
            if run >= self._key_length:
                start = position - self._key_length + 1
                key = self._key(start)
                self._older[start % size] = self._newest.get(key, _NOWHERE)
                self._newest[key] = start

    def find(self, context: Sequence[int], count: int) -> tuple[int, list[int]]:
        """Length of the longest match of the end of `context`, 0 where there is none, and up to `count` tokens that
        followed, ending with the first special one or with the text.

        Of equal matches the one with most tokens after it is taken (the newest in a text that repeats itself is at its
        end, where little follows), then the newest.
        """
        context = self._since_special(context)
        best: tuple[int, list[int]] = (0, [])
        if len(context) < self._key_length:
            return best
        start = self._newest.get(_packed(context[-self._key_length :]), _NOWHERE)
        for _ in range(_MOST_CANDIDATES):
            if start < self._written - len(self):  # overwritten since, or nowhere
                break
            length = self._matched(context, start)
            if length >= best[0]:
                following = self._following(start + self._key_length, count)
                if (length, len(following)) > (best[0], len(best[1])):
                    best = length, following
            start = self._older[start % len(self._tokens)]
        return best

    def _following(self, first: int, count: int) -> list[int]:
        copied: list[int] = []
        for position in range(first, min(first + count, self._written)):
            token = self._tokens[position % len(self._tokens)]
            if token == _SEPARATOR:
                break
            copied.append(token)
            if token in self._special:
                break
        return copied

    def _since_special(self, context: Sequence[int]) -> Sequence[int]:
        tail = context[-self._longest :]
        for index in range(len(tail) - 1, -1, -1):
            if tail[index] in self._special:
                return tail[index + 1 :]
        return tail

    def _matched(self, context: Sequence[int], start: int) -> int:
        """Tokens before and in the n-gram at `start` that equal the end of `context`, which holds the n-gram."""
        oldest, length = self._written - len(self), self._key_length
        while length < len(context) and (before := start - length + self._key_length - 1) >= oldest:
            if self._tokens[before % len(self._tokens)] != context[-length - 1]:
                break
            length += 1
        return length

    def _forget(self, start: int) -> None:
        """The n-gram at the oldest position goes with it, unless it has occurred since."""
        key = self._key(start)
        if self._newest.get(key) == start:
            del self._newest[key]

    def _key(self, start: int) -> int:
        size = len(self._tokens)
        return _packed([self._tokens[(start + n) % size] for n in range(self._key_length)])


def _packed(tokens: Sequence[int]) -> int:
    """Tokens as one integer, 32 bits each: exact, no collisions. A separator makes it negative: no n-gram's."""
    packed = 0
    for token in tokens:
        packed = packed << _ID_BITS | token
    return packed
