"""Numbers in sentences."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> count_of(1, "image"), count_of(1200, "image")
        ('1 image', '1,200 images')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
