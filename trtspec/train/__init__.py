"""Drafts that trtspec makes itself, from the target they are for."""
