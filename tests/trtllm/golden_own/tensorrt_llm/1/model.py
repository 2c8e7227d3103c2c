"""Served by trtspec: the model is in the installed package, its settings in model.yaml beside this file."""

from trtspec.package.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
