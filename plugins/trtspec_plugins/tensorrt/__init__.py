"""The kernels as TensorRT plugins. `registration` needs TensorRT; nothing here imports it by itself."""
