"""Numbers as people read them."""

from __future__ import annotations


def size(count: int, digits: int = 3) -> str:
    """Bytes as people read them, in powers of 1000, as sizes of flags are written (`48GB`).

    Args:
        digits: that are shown; more where two sizes are to be compared.
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while float(f"{value:.{digits}g}") >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.{digits}g} {units[0]}"


def count(number: int) -> str:
    """A number of parameters, short."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)
