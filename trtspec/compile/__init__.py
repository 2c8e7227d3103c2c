"""Compile: a model folder becomes an engine folder of one backend."""

from trtspec.compile.engine import CompileRequest, compile_engine

__all__ = ["CompileRequest", "compile_engine"]
