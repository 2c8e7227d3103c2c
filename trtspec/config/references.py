"""Strings that name something outside the config: models, hub commits, quantization formats."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from trtspec.quantize.formats import FORMATS

PACKAGE_PREFIX = "package:"

_PACKAGE = re.compile(r"package:[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~/")


def is_path(reference: str) -> bool:
    """Whether a model or data reference is written as a path (whatever exists on this machine)."""
    return reference.startswith(_PATH_STARTS) or reference in (".", "..", "~")


def is_hub_id(reference: str) -> bool:
    """Whether a model reference is neither a path nor shipped inside an installed package."""
    return not is_path(reference) and not reference.startswith(PACKAGE_PREFIX)


def _model_reference(reference: str) -> str:
    if reference.startswith(PACKAGE_PREFIX):
        if not _PACKAGE.fullmatch(reference):
            raise PydanticCustomError(
                "reference", "package: is followed by the name of an installed Python package"
            )
    elif not is_path(reference) and not _HUB_ID.fullmatch(reference):
        raise PydanticCustomError(
            "reference",
            "is neither an existing path nor a hub id (org/name); write package:NAME for a model shipped "
            "in a Python package, ./folder for a folder that does not exist yet",
        )
    return reference


def quantization_formats() -> tuple[str, ...]:
    """Names that a `quantization` field takes, "none" first."""
    return ("none", *(name for name in FORMATS if name != "none"))


def _quantization_format(name: str) -> str:
    if name not in quantization_formats():
        raise PydanticCustomError("quantization", "is not a quantization format")
    return name


ModelReference = Annotated[
    str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_model_reference)
]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z._/-]*$", max_length=200)]
Quantization = Annotated[
    str,
    AfterValidator(_quantization_format),
    WithJsonSchema({"type": "string", "enum": list(quantization_formats())}),
]
