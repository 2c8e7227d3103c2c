"""Triton model repositories: written, linted, and the model that runs inside them."""

from trtspec.package.lint import Finding, lint_repository
from trtspec.package.triton import PackageReport, PackageRequest, package_triton

__all__ = ["Finding", "PackageReport", "PackageRequest", "lint_repository", "package_triton"]
