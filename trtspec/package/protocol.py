"""The one seam between the Triton model and whatever generates: trtspec's own engines, or TensorRT-LLM.

Everything a client can see (tensors, checks, streaming, acceptance, metrics, cancellation) is on this side of it, in
`triton_model`, and the same for all; an adapter only takes token ids and gives deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trtspec.engines.base import EngineSpec
from trtspec.errors import TrtspecError
from trtspec.values import Completion, Delta, GenerationRequest

if TYPE_CHECKING:
    from trtspec.checkpoints.tokenizer import TextTokenizer
    from trtspec.runtime import RuntimeStats


class Described(Protocol):
    """spec: slots and limits. Of an engine that is not trtspec's own, its rows and exactness say nothing."""

    spec: EngineSpec


class GenerationBackend(Protocol):
    """Methods are called from any thread; callbacks come from its own and must not block."""

    info: Described
    tokenizer: TextTokenizer

    def submit(
        self,
        request: GenerationRequest,
        on_delta: Callable[[Delta], None],
        on_done: Callable[[Completion | TrtspecError], None],
    ) -> None:
        """Start a request and return at once.

        on_delta gets every step's delta, the last with a finish_reason, then on_done the completion; or on_done
        gets the error that ended the request. Raises ValueError for a request that cannot be served as it is,
        `Refused` when the queue is full, and TrtspecError when nothing is served any more.
        """

    def cancel(self, request_id: str) -> None:
        """End a request soon, with finish_reason "cancelled"; unknown and finished ids are ignored."""

    def stats(self) -> RuntimeStats:
        """Current load."""

    def close(self) -> None:
        """Cancel what runs and release the engine; calling it twice is harmless."""
