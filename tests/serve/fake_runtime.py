"""A runtime with the real one's contract and no model: it answers by a rule a test can compute by itself.

Tokens are bytes. The answer to a prompt is its bytes reversed, over and over, until `max_tokens`. The first
step emits the prefill token, each later one 0..DRAFT accepted tokens and one more. Slots, queue, cancellation
and the engine thread are real. Two prompts are special: `break` ends that request with an engine error.
"""

from __future__ import annotations

import codecs
import threading
import time
from collections import deque
from dataclasses import dataclass

from trtspec.engines.base import EngineSpec
from trtspec.errors import StageFailed
from trtspec.runtime import Refused
from trtspec.values import Delta, GenerationRequest

VOCABULARY = 256
DRAFT = 3
SLOTS, QUEUE = 4, 6  # of the server that tests share


@dataclass(frozen=True)
class Info:
    spec = EngineSpec(VOCABULARY, VOCABULARY, max_batch=4, max_seq_len=4096, max_rows=DRAFT + 1)


@dataclass(frozen=True)
class Stats:
    active: int
    queued: int


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


def answer(prompt: bytes, max_tokens: int) -> bytes:
    backwards = prompt[::-1]
    return (backwards * (max_tokens // len(backwards) + 1))[:max_tokens]


class _Slot:
    def __init__(self, request, on_delta):
        self.request, self.on_delta = request, on_delta
        limit = request.sampling.max_tokens or Info.spec.max_seq_len - len(request.prompt)
        self.rest = answer(bytes(request.prompt), min(limit, Info.spec.max_seq_len - len(request.prompt)))
        self.step = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


class FakeRuntime:
    def __init__(self, slots: int, max_queue: int, step_s: float = 0.002):
        self.info, self.tokenizer = Info(), ByteTokenizer()
        self.slots, self.max_queue, self.step_s = slots, max_queue, step_s
        self.lock = threading.Lock()
        self.waiting: deque[_Slot] = deque()
        self.active: list[_Slot] = []
        self.cancelled: set[str] = set()
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="engine")
        self.thread.start()

    def submit(self, request: GenerationRequest, on_delta, on_done) -> None:
        if bytes(request.prompt) == b"break":
            on_done(StageFailed("the engine dropped this request"))
            return
        with self.lock:
            if len(self.waiting) + len(self.active) >= self.slots + self.max_queue:
                raise Refused(
                    f"{self.slots} requests run and {self.max_queue} wait: max_queue_size is reached"
                )
            self.waiting.append(_Slot(request, on_delta))

    def cancel(self, request_id: str) -> None:
        with self.lock:
            self.cancelled.add(request_id)

    def stats(self) -> Stats:
        with self.lock:
            return Stats(len(self.active), len(self.waiting))

    def close(self) -> None:
        self.closed = True
        self.thread.join()

    def _run(self) -> None:
        while not self.closed:
            with self.lock:
                while self.waiting and len(self.active) < self.slots:
                    self.active.append(self.waiting.popleft())
                active, cancelled = list(self.active), set(self.cancelled)
                dropped = [slot for slot in self.waiting if slot.request.request_id in cancelled]
                self.waiting = deque(slot for slot in self.waiting if slot not in dropped)
            for slot in active + dropped:
                self._advance(slot, slot.request.request_id in cancelled)
            time.sleep(self.step_s)

    def _advance(self, slot: _Slot, cancelled: bool) -> None:
        if cancelled:
            delta = Delta(slot.request.request_id, slot.step, (), "", finish_reason="cancelled")
        else:
            accepted = 0 if slot.step == 0 else min(slot.step % (DRAFT + 1), len(slot.rest) - 1)
            emitted, slot.rest = slot.rest[: accepted + 1], slot.rest[accepted + 1 :]
            last = not slot.rest
            delta = Delta(
                slot.request.request_id,
                slot.step,
                tuple(emitted),
                slot.decoder.decode(emitted, final=last),
                drafted=0 if slot.step == 0 else DRAFT,
                accepted=accepted,
                finish_reason="length" if last else None,
            )
        slot.step += 1
        if delta.finish_reason:
            with self.lock:
                if slot in self.active:
                    self.active.remove(slot)
                self.cancelled.discard(slot.request.request_id)
        slot.on_delta(delta)
