"""Pictures need matplotlib, which a plain install does not have."""

from __future__ import annotations

from importlib.util import find_spec

CURE = "matplotlib is not installed: pip install '.[tools]' in the clone"


def can_draw() -> bool:
    """Whether a picture can be drawn here."""
    return find_spec("matplotlib") is not None


def check_can_draw(flag: str) -> None:
    """Raises ValueError if the picture that `flag` asks for cannot be drawn."""
    if not can_draw():
        raise ValueError(f"{flag}: {CURE}")
