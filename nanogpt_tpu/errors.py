"""What the user is told when something is wrong: one line with what, the values and the fix."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend. The command line prints it as one line and exits with 2."""


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
