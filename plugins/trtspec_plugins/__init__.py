"""GPU kernels of a speculative decoding step, in the Triton language, compiled ahead of time for TensorRT.

`signature` says how each kernel is called, `variants` which ones are compiled, `aot` compiles them to PTX on a
machine without a GPU, `index` finds the compiled code. Sources are in `kernels`, float64 references beside them
in `references`. Importing the package loads neither triton nor torch.
"""
