"""trtspec: from a model and a draft to a proven, measured speculative-decoding service."""

__version__ = "0.1.0"
