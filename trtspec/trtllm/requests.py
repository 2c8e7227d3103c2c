"""One request as TensorRT-LLM takes it: what a version would ignore of it is refused, the rest becomes keywords."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trtspec.trtllm.contract import Contract, DecodingType
from trtspec.values import SamplingParams

# Decoding types that leave a request's sampling to the Torch sampler. The others draw inside the target's step, with a
# sampler that knows less; a draft model is one of those in some versions.
_TORCH_SAMPLER = ("NGram", "UserProvided", "AUTO")


def refusal(
    sampling: SamplingParams, contract: Contract, speculative: Mapping[str, Any] | None
) -> str | None:
    """What this version would silently ignore of a request, in words for its sender; None when it honours all of it.

    speculative: the deployment's speculative_config.
    """
    speculative = speculative or {}
    decoding = contract.type_called(str(speculative.get("decoding_type")))
    in_step = decoding is not None and _draws_in_step(contract, decoding)
    with_it = f"TensorRT-LLM {contract.version}" + (f" with {decoding.name}" if decoding and in_step else "")
    if in_step and sampling.logprobs:
        return f"log probabilities are not available: {with_it} does not return them"
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    if penalties != (0, 0, 1) and not (
        speculative.get("enable_penalty") if in_step else contract.has("penalties")
    ):
        switch = in_step and "enable_penalty" in contract.speculative_fields
        unless = ", unless speculative_config.enable_penalty is true" if switch else ""
        return f"penalties are not available: {with_it} does not apply them{unless}"
    if sampling.temperature == 0:
        return None
    if in_step and not contract.has("sampled_speculation"):
        return f"temperature must be 0: {with_it} takes the likeliest token whatever a request says"
    if sampling.seed is not None and not contract.has("request_seed"):
        return f"seed is not available for sampled requests: {with_it} does not seed requests one by one"
    return None


def sampling_keywords(
    sampling: SamplingParams, *, limit: int, stop_ids: Collection[int], seed: int
) -> dict[str, Any]:
    """Keywords of TensorRT-LLM's `SamplingParams`. limit: tokens. stop_ids: each ends the text and is its last.

    Stop strings are not among them: it would look for their own ids, which a text that shows them need not have.
    """
    keywords: dict[str, Any] = {
        "max_tokens": limit,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "include_stop_str_in_output": True,  # of stop ids too: usage counts them
    }
    if stop_ids:
        keywords["stop_token_ids"] = sorted(stop_ids)
    if sampling.logprobs:
        keywords["logprobs"] = (
            1  # the likeliest and, where that is another one, the chosen token; 0 is none in 1.2
        )
    penalties = {
        "presence_penalty": (sampling.presence_penalty, 0),
        "frequency_penalty": (sampling.frequency_penalty, 0),
        "repetition_penalty": (sampling.repetition_penalty, 1),
    }
    keywords |= {name: value for name, (value, off) in penalties.items() if value != off}
    if sampling.temperature > 0:  # without these three it is greedy in every version
        # top_p is always said: some versions take one that is missing for 0.
        keywords |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
        if sampling.top_k:
            keywords["top_k"] = sampling.top_k
    return keywords


def _draws_in_step(contract: Contract, decoding: DecodingType) -> bool:
    if decoding.name == "DraftTarget":
        return contract.has("one_model_draft_target")
    return decoding.name not in _TORCH_SAMPLER
