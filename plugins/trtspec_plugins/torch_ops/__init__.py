"""The kernels as PyTorch operators, `torch.ops.trtspec.*`: importing this registers them.

On CUDA tensors an operator runs its Triton kernel, on CPU tensors the float64 reference; with meta tensors it gives
shapes and types, so that `torch.compile` can trace it. Shapes and meanings are those of `signature`. The functions
here are the Triton side alone.
"""

from trtspec_plugins.torch_ops.attention import int4_kv_attention, verify_attention
from trtspec_plugins.torch_ops.tokens import kv_append, kv_compact, ngram_lookup, spec_accept, tree_mask

__all__ = [
    "int4_kv_attention",
    "kv_append",
    "kv_compact",
    "ngram_lookup",
    "spec_accept",
    "tree_mask",
    "verify_attention",
]
