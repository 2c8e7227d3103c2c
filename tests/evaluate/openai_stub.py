"""An OpenAI-compatible server that answers every chat with one known run of drafts, and reports it in one way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

from aiohttp import web

Step = tuple[int, int]
"""(drafted, accepted) of a verify step."""


class OpenAIStub:
    """Streams one event a step on a loopback port, until `close`. Its model has one token a character.

    reports: where acceptance is told: "histogram" or "steps" (vLLM's field), "choice" (TensorRT-LLM's), "sglang" (its
    field, where the request asks for it), "counters" (vLLM's /metrics), or None. merge: how many steps share an event.
    usage: whether it counts tokens. thinks: the answer up to its first step is a reasoning model's thought.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        reports: str | None = None,
        draft_length: int = 3,
        merge: int = 1,
        usage: bool = True,
        ends: str = "length",
        step_s: float = 0.002,
        thinks: bool = False,
    ) -> None:
        self.steps, self._reports, self._draft_length = list(steps), reports, draft_length
        self._merge, self._usage, self._ends, self._step_s = merge, usage, ends, step_s
        self._thinks = thinks
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.refuse: tuple[int, str] | None = None
        self.break_off = False
        self.readings = 0
        self._served = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def tokens(self) -> int:
        """Tokens of an answer: the prefill token, and what each step emits."""
        return 1 + sum(accepted + 1 for _, accepted in self.steps)

    @property
    def text(self) -> str:
        return ("abcdefghij" * self.tokens)[: self.tokens]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app)

        async def start() -> None:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}/v1"
            self._ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.refuse:
            return web.json_response({"error": {"message": self.refuse[1]}}, status=self.refuse[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        def part(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        await send(part({"role": "assistant", "content": ""}))
        await send(part({"reasoning_content" if self._thinks else "content": self.text[0]}))
        at = 1
        for first in range(0, len(self.steps), self._merge):
            await asyncio.sleep(self._step_s)
            size = sum(accepted + 1 for _, accepted in self.steps[first : first + self._merge])
            await send(part({"content": self.text[at : at + size]}))
            at += size
            if self.break_off:
                request.transport.close()
                return response
        last = part({}, self._ends)
        if self._reports == "choice":
            last["choices"][0]["speculative_decoding"] = self._totals("total_draft_tokens")
        await send(last)
        closing: dict[str, Any] = {"choices": []}
        if self._usage:
            # a stop id is a token that no text shows
            counted = self.tokens + (self._ends == "stop")
            details = {"cached_tokens": 5}
            closing["usage"] = {
                "prompt_tokens": 17,
                "completion_tokens": counted,
                "prompt_tokens_details": details,
            }
        if self._reports in ("histogram", "steps"):
            found = self._totals("num_draft_tokens")
            if self._reports == "steps":
                drafted, accepted = zip(*self.steps, strict=True)
                found |= {"per_step_drafted": drafted, "per_step_accepted": accepted}
            closing["metrics"] = {"speculative_decoding": found}
        if self._reports == "sglang" and self.asked[-1].get("return_spec_tokens_details"):
            told = self._totals("spec_num_proposed_drafts")
            histogram = told["acceptance_histogram"]
            while not histogram[-1]:  # it ends with the most that was accepted
                histogram.pop()
            await send(
                {
                    "choices": [],
                    "sglext": {"spec_tokens_details": {**told, "spec_correct_drafts_histogram": histogram}},
                }
            )
        await send(closing)
        await response.write(b"data: [DONE]\n\n")
        self._served += 1
        return response

    def _totals(self, drafted: str) -> dict[str, Any]:
        histogram = [0] * (self._draft_length + 1)
        for _, accepted in self.steps:
            histogram[accepted] += 1
        return {
            "acceptance_histogram": histogram,
            drafted: sum(d for d, _ in self.steps),
            "num_spec_steps": len(self.steps),
        }

    async def _models(self, _request: web.Request) -> web.Response:
        owner = "sglang" if self._reports == "sglang" else "vllm"
        return web.json_response({"data": [{"id": "toy", "owned_by": owner}]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.readings += 1
        if self._reports != "counters":
            return web.Response(status=404, text="vllm:nothing_here_total 1\n")
        drafts = [step for step in self.steps if step[0]]
        labels = '{engine="0",model_name="toy"'
        lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
        for name, value in (
            ("num_drafts", len(drafts)),
            ("num_draft_tokens", sum(d for d, _ in drafts)),
            ("num_accepted_tokens", sum(a for _, a in drafts)),
        ):
            lines.append(f"vllm:spec_decode_{name}_total{labels}}} {100 + value * self._served}.0")
        for i in range(self._draft_length):
            reached = sum(a > i for _, a in drafts) * self._served
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="{i}"}} {7 + reached}.0'
            )
        return web.Response(text="\n".join(lines) + "\n")
