"""How reports spell numbers; what was not measured is a dash, never 0."""

from __future__ import annotations

NOT_MEASURED = "–"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """`value` with `digits` decimals, thousands separated, and its unit after a narrow space."""
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}" + (f"\u202f{unit}" if unit else "")


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction in percent."""
    return NOT_MEASURED if fraction is None else f"{100 * fraction:.{digits}f}\u202f%"


def ratio(value: float | None, digits: int = 2) -> str:
    """A speed-up, as in 1.83×."""
    return NOT_MEASURED if value is None else f"{value:.{digits}f}×"


def count(value: int | None) -> str:
    """A whole number, thousands separated."""
    return NOT_MEASURED if value is None else f"{value:,}"
