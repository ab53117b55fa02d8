"""What the user is told when something is wrong: one line with what, the values and the fix."""

import difflib
import math
from collections.abc import Iterable
from types import NoneType
from typing import get_args, get_type_hints

_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


class UserError(ValueError):
    """A mistake the user can mend. The command line prints it as one line and exits with 2."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback."""
        return [f"error: {self}"]


class PausedError(UserError):
    """Work stopped before its end, but what is done is kept: the same call goes on from there."""


class StaleError(UserError):
    """Unfinished work that nothing can go on with: it is dropped."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not in `known`, with the nearest one that is."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return UserError(f"unknown {kind} {name!r}: {hint}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among `allowed`."""
    if value not in allowed:
        raise unknown_name(name, value, allowed)


def well_typed(config: object) -> None:
    """Refuse fields whose value is not of their declared type; a float must be finite too."""
    for name, hint in get_type_hints(type(config)).items():
        value, kinds = getattr(config, name), get_args(hint) or (hint,)
        fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
        if isinstance(value, bool):
            fits = bool in kinds
        elif isinstance(value, float):
            fits = fits and math.isfinite(value)
        if not fits:
            words = [_WORDS.get(kind, kind.__name__) for kind in kinds if kind is not NoneType]
            words += ["none"] if NoneType in kinds else []
            raise UserError(f"{name} is {value!r}: it must be {' or '.join(words)}")


def positive(config: object, *names: str) -> None:
    """Refuse fields that are 0 or less; None (off) passes."""
    hints = get_type_hints(type(config))
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            none = " or none" if NoneType in get_args(hints[name]) else ""
            raise UserError(f"{name} is {value}: it must be above 0{none}")


def between(config: object, low: float, high: float, *names: str) -> None:
    """Refuse fields outside [low, high]."""
    for name in names:
        value = getattr(config, name)
        if not low <= value <= high:
            raise UserError(f"{name} is {value}: it must lie between {low:g} and {high:g}")
