"""Numbers as people read them."""

from __future__ import annotations


def size(count: int) -> str:
    """Bytes as people read them, in powers of 1000."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"


def count(number: int) -> str:
    """A number of parameters, short."""
    for unit, factor in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)
