"""Kernel sources in the Triton language, one module each. Importing one imports triton."""
