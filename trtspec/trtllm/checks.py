"""The rules of contract.yaml that take arithmetic: each gives (dotted key, message, what to write) of a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtspec.trtllm.contract import Contract, DecodingType

Fault = tuple[str, str, str]

# More captured graphs than this cost memory that users missed for the KV cache.
MOST_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class Written:
    """A file's values as a version reads them. tree: what is written; decoding: its decoding type, if it has one."""

    contract: Contract
    tree: Mapping[str, Any]
    decoding: DecodingType | None

    def get(self, path: str) -> Any:
        """The value at a dotted path, its default where it is not written, None where there is neither."""
        inside: Any = self.tree
        steps = path.split(".")
        for step in steps:
            if not isinstance(inside, Mapping) or step not in inside:
                fields = self.contract.fields_of(steps[:-1], self.decoding) or {}
                return fields[steps[-1]].default if steps[-1] in fields else None
            inside = inside[step]
        return inside

    def whole(self, path: str) -> int | None:
        """As `get`, None for what is no whole number."""
        value = self.get(path)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def draft_length(self) -> int:
        """The longest draft: under the decoding type's own key, or the one it is remapped from."""
        if self.decoding is None:
            return 0
        for key in (self.decoding.length, "max_draft_len", "num_nextn_predict_layers"):
            if (value := self.whole(f"speculative_config.{key}")) is not None:
                return value
        return 0

    @property
    def schedule(self) -> dict[int, int] | None:
        """draft_len_schedule, keys ascending; None without one or with a malformed one."""
        written = self.get("speculative_config.draft_len_schedule")
        try:
            pairs = {int(batch): int(length) for batch, length in (written or {}).items()}
        except (AttributeError, TypeError, ValueError):
            return None
        return dict(sorted(pairs.items())) or None

    @property
    def step_rows(self) -> int:
        """Query rows of one sequence in a verify step."""
        if self.decoding is None:
            return 1
        if self.get("speculative_config.use_dynamic_tree") is True:
            top_k = self.whole("speculative_config.dynamic_tree_max_topK") or 1
            return (self.whole("speculative_config.max_total_draft_tokens") or top_k * self.draft_length) + 1
        return self.decoding.rows(self.draft_length)


def _prompt_cap(written: Written) -> Iterator[Fault]:
    budget = written.whole("max_num_tokens")
    longest = written.whole("max_input_len") or written.whole("max_seq_len")
    if longest and budget and longest > budget and written.get("enable_chunked_prefill") is not True:
        yield (
            "max_num_tokens",
            f"prompts longer than {budget} tokens are refused, sequences may have {longest}",
            f"enable_chunked_prefill: true, or max_num_tokens: {longest}",
        )


def _token_budget(written: Written) -> Iterator[Fault]:
    batch, budget = written.whole("max_batch_size"), written.whole("max_num_tokens")
    rows = written.step_rows
    if written.decoding and batch and budget and batch * rows > budget:
        yield (
            "max_num_tokens",
            f"{batch} sequences of {rows} rows a verify step are {batch * rows} tokens, the budget is {budget}",
            f"max_num_tokens: {batch * rows} or more, and as much again as a prompt chunk has",
        )


def _schedule_lower(written: Written) -> Iterator[Fault]:
    schedule, longest = written.schedule, written.draft_length
    if schedule is None:
        return
    path = "speculative_config.draft_len_schedule"
    if 1 not in schedule:
        yield path, "its keys are the smallest batch of each range here, and none is 1", f"1: {longest}"
    elif schedule[1] != longest:
        yield path, f"key 1 holds {schedule[1]}, the draft length is {longest}", f"1: {longest}"
    yield from _rising(schedule, longest, path)


def _schedule_upper(written: Written) -> Iterator[Fault]:
    schedule, longest = written.schedule, written.draft_length
    if schedule is None:
        return
    path, first = "speculative_config.draft_len_schedule", min(schedule)
    if schedule[first] != longest:
        yield (
            path,
            f"its keys are the largest batch of each range from 1.3 on; the smallest, {first}, holds "
            f"{schedule[first]} and the draft length is {longest}",
            f"{first}: {longest}",
        )
    yield from _rising(schedule, longest, path)


def _rising(schedule: Mapping[int, int], longest: int, path: str) -> Iterator[Fault]:
    if min(schedule) < 1 or min(schedule.values()) < 0:
        yield path, "batch sizes begin at 1 and lengths at 0", "batch: length"
    elif max(schedule.values()) > longest:
        yield (
            path,
            f"length {max(schedule.values())} is above the draft length {longest}",
            f"{longest} or less",
        )


def _schedule_guided(written: Written) -> Iterator[Fault]:
    schedule = written.schedule
    if schedule is None or written.get("guided_decoding_backend") is None:
        return
    path, batch = "speculative_config.draft_len_schedule", written.whole("max_batch_size")
    if 0 in schedule.values():
        yield (
            path,
            "length 0 with guided decoding crashes when CUDA graphs are captured",
            "1 as the shortest length",
        )
    elif written.contract.schedule_bounds == "upper" and (batch is None or max(schedule) < batch):
        yield (
            path,
            f"beyond batch {max(schedule)} the length is 0, which crashes with guided decoding",
            f"{batch or 'max_batch_size'}: 1 as the last entry",
        )


def _graph_sizes(written: Written) -> tuple[list[int], int]:
    sizes = written.get("cuda_graph_config.batch_sizes")
    whole = [size for size in sizes if isinstance(size, int)] if isinstance(sizes, list) else []
    return whole, written.whole("cuda_graph_config.max_batch_size") or 0


def _graph_sizes_generated(written: Written) -> Iterator[Fault]:
    sizes, largest = _graph_sizes(written)
    if sizes and largest:
        yield (
            "cuda_graph_config.max_batch_size",
            "batch_sizes and max_batch_size together must equal the list generated from the latter",
            "keep batch_sizes alone",
        )


def _graph_sizes_maximum(written: Written) -> Iterator[Fault]:
    sizes, largest = _graph_sizes(written)
    if sizes and largest and largest != max(sizes):
        yield (
            "cuda_graph_config.max_batch_size",
            f"max_batch_size {largest} is not the largest of batch_sizes, {max(sizes)}",
            f"max_batch_size: {max(sizes)}, or remove it",
        )


def _graph_memory(written: Written) -> Iterator[Fault]:
    sizes, _ = _graph_sizes(written)
    lengths = set((written.schedule or {}).values()) | {written.draft_length}
    graphs = len(sizes) * len(lengths)
    if written.decoding and graphs > MOST_GRAPHS:
        yield (
            "cuda_graph_config.batch_sizes",
            f"{len(sizes)} batch sizes with {len(lengths)} draft lengths capture {graphs} graphs; each holds memory",
            "fewer batch_sizes with enable_padding: true, or a lower kv_cache_config.free_gpu_memory_fraction",
        )


def _dynamic_tree(written: Written) -> Iterator[Fault]:
    base = "speculative_config"
    total = written.whole(f"{base}.max_total_draft_tokens")
    if written.get(f"{base}.use_dynamic_tree") is not True:
        return
    top_k, length = written.whole(f"{base}.dynamic_tree_max_topK"), written.draft_length
    if top_k is None:
        yield (
            f"{base}.use_dynamic_tree",
            "a dynamic tree needs dynamic_tree_max_topK",
            "dynamic_tree_max_topK: 10",
        )
    elif total is not None and not length <= total <= top_k * length:
        yield (
            f"{base}.max_total_draft_tokens",
            f"{total} is not between the depth {length} and topK times depth, {top_k * length}",
            f"max_total_draft_tokens: {top_k * length}",
        )


def _mtp_length(written: Written) -> Iterator[Fault]:
    if written.decoding is None or written.decoding.name != "MTP":
        return
    old = written.whole("speculative_config.num_nextn_predict_layers")
    new = written.whole("speculative_config.max_draft_len")
    inside = written.tree.get("speculative_config", {})
    if {"num_nextn_predict_layers", "max_draft_len"} <= set(inside) and old != new:
        keep = written.decoding.length
        yield (
            f"speculative_config.{keep}",
            f"max_draft_len {new} and num_nextn_predict_layers {old} say different draft lengths",
            f"keep {keep} alone",
        )
    elif written.decoding.length not in inside and "max_draft_len" in inside:
        key = written.decoding.length
        yield (
            "speculative_config.max_draft_len",
            f"max_draft_len is overwritten by {key}, which is {old} where it is not written",
            f"{key}: {new}",
        )


def _draft_length(written: Written) -> Iterator[Fault]:
    decoding = written.decoding
    if decoding is None or decoding.engine_only:
        return
    inside = written.tree.get("speculative_config", {})
    lengths = {"max_draft_len", "num_nextn_predict_layers"}
    free = decoding.method is None or decoding.name == "MTP"
    if not lengths & set(inside) and not free:
        yield (
            "speculative_config.decoding_type",
            f"{decoding.name} needs {decoding.length}",
            f"{decoding.length}: 3",
        )
    elif lengths & set(inside) and written.draft_length < 1:
        yield f"speculative_config.{decoding.length}", "must be at least 1", f"{decoding.length}: 3"
    if decoding.draft and not {"speculative_model", "speculative_model_dir"} & set(inside):
        key = written.contract.draft_key
        yield (
            "speculative_config.decoding_type",
            f"{decoding.name} needs a draft",
            f"{key}: its folder or hub id",
        )


def _moe_parallel(written: Written) -> Iterator[Fault]:
    ranks = written.whole("tensor_parallel_size") or 1
    given = [written.whole(f"moe_{kind}_parallel_size") for kind in ("tensor", "expert", "cluster")]
    product = 1
    for size in given:
        product *= size or 1
    whole = given[0] is not None and given[1] is not None
    if ranks % product or (whole and product != ranks):
        yield (
            "moe_expert_parallel_size",
            f"the experts' parallel sizes multiply to {product}, tensor_parallel_size is {ranks} (derived)",
            "sizes whose product is tensor_parallel_size",
        )


CHECKS: Mapping[str, Callable[[Written], Iterator[Fault]]] = {
    "prompt_cap": _prompt_cap,
    "token_budget": _token_budget,
    "schedule_lower": _schedule_lower,
    "schedule_upper": _schedule_upper,
    "schedule_guided": _schedule_guided,
    "graph_sizes_generated": _graph_sizes_generated,
    "graph_sizes_maximum": _graph_sizes_maximum,
    "graph_memory": _graph_memory,
    "dynamic_tree": _dynamic_tree,
    "mtp_length": _mtp_length,
    "draft_length": _draft_length,
    "moe_parallel": _moe_parallel,
}
