"""Where a deployment stands: on the roofline, and on the tiles of its attention kernels."""

from __future__ import annotations

from collections.abc import Iterator

from trtspec.checkpoints.attention import AttentionGroup
from trtspec.plan.deployment import Deployment
from trtspec.plan.result import Roofline
from trtspec.plan.roofline import free_rows, memory_bound_s
from trtspec.plan.step_time import RooflineStepTimes


def roofline_of(deployment: Deployment, batch: int, context: int) -> Roofline:
    """The floor of a plain step: weights and cache once at peak bandwidth, and where its rows stand to the ridge."""
    d, device = deployment, deployment.device
    weights = d.read_bytes(batch)
    cache = sum(_cache_bytes(d, shape, context) for shape in d.attention) * d.sequences(batch)
    ideal = memory_bound_s(weights + cache, device.mem_bw_bytes_per_s)
    step = RooflineStepTimes(d).step(batch, 0, context)
    return Roofline(
        weight_bytes=weights,
        cache_bytes=cache,
        ideal_ms=ideal * 1e3,
        ideal_tokens_per_s=batch / ideal,
        rows=batch,
        ridge_rows=d.ridge_rows,
        free_query_rows=free_rows(device.achieved_flops("bf16"), device.achieved_bw, d.kv_element_bytes),
        attention_share=step.attention / step.total,
    )


def _cache_bytes(deployment: Deployment, shape: AttentionGroup, context: int) -> float:
    """Cache that one sequence's plain step reads on one rank."""
    heads = shape.per_rank(deployment.head_ranks)
    if heads is None or not shape.kv_heads:
        return 0.0
    share = heads[1] / shape.kv_heads
    keys = min(context, shape.window or context)
    return (shape.cache_elements_per_token or 0) * share * keys * deployment.kv_element_bytes


def kernel_warnings(deployment: Deployment, draft_length: int) -> list[str]:
    """Warnings about the verify-attention kernels a plan relies on."""
    said: list[str] = []
    for shape in deployment.attention:
        heads = shape.per_rank(deployment.head_ranks)
        if heads is not None:
            said += _shape_warnings(deployment, shape, heads[0], heads[0] // heads[1], draft_length)
    return said


def _shape_warnings(
    deployment: Deployment, shape: AttentionGroup, queries: int, group: int, draft_length: int
) -> Iterator[str]:
    kernel, tile_rows, tiles = deployment.tile_of(shape, draft_length)
    device = deployment.device
    if kernel.assumed:
        yield (
            f"no verify-attention kernel is on record for {deployment.backend} on {device.name} with head_dim "
            f"{shape.head_dim}: {kernel.title}, {tile_rows} rows"
        )
    if kernel.power_of_two_group and group & (group - 1):
        yield (
            f"{kernel.title} takes the logarithm of the group and refuses {group} query heads per KV head: another "
            "path will run, and slower"
        )
    if shape.kind == "mla" and 64 < queries < 128:
        yield (
            f"{queries} MLA query heads on a rank: one backend refuses more than 64 and fewer than 128 with "
            "speculation"
        )
    if tile_rows == 1:
        return
    if group > tile_rows:
        yield (
            f"group {group} is larger than the {tile_rows}-row tile: every token takes "
            f"{kernel.count(group, 0, tile_rows)} tiles"
        )
    free = free_rows(device.achieved_flops("bf16"), device.achieved_bw, deployment.kv_element_bytes)
    if deployment.kv_element_bytes < 2 and free < 128:
        yield (
            f"{deployment.kv_dtype} cache: {free:.0f} query rows per KV head are free of extra cost, so a "
            "128-row tile is "
            f"compute-bound even without drafts; {tile_rows} rows are planned"
        )
    if draft_length and tile_rows == deployment.tile_of(shape, draft_length - 1)[1]:
        before = kernel.count(group, draft_length - 1, tile_rows)
        if before < tiles and group <= tile_rows:
            rows = group * (draft_length + 1)
            yield (
                f"draft length {draft_length} starts another tile ({rows} of {tiles * tile_rows} rows used): "
                f"{draft_length - 1} needs {before}"
            )
