"""Names of modules and parameters: without their wrappers, and in the reference's words."""

import re
from collections import Counter
from collections.abc import Iterable

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(?:module\.)+"
)
"""What torch.compile, FSDP1, checkpoint wrappers, DDP and engines put into a name."""
_LAST = re.compile(r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)$")


def plain(name: str) -> str:
    """Return the name of a module or parameter as its model gave it."""
    name = _LAST.sub("", _WRAPPERS.sub("", f"{name}"))
    return "" if name == "module" else name


class Renaming:
    """Translates names of modules into the reference's, learned from parameters found there.

    Args:
        pairs: Names of parameters: here, there.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        votes: dict[str, Counter[str]] = {}
        for here, there in pairs:
            mine, theirs = here.split("."), there.split(".")
            while mine and theirs and mine[-1] == theirs[-1]:
                mine, theirs = mine[:-1], theirs[:-1]
                votes.setdefault(".".join(mine), Counter())[".".join(theirs)] += 1
        self._prefixes = {here: there.most_common(1)[0][0] for here, there in votes.items()}

    def __call__(self, name: str) -> str:
        """Return the reference's name of a module or parameter; its own where none is known."""
        parts = name.split(".") if name else []
        for end in range(len(parts), -1, -1):
            known = self._prefixes.get(".".join(parts[:end]))
            if known is not None:
                return ".".join([*known.split(".")] * bool(known) + parts[end:])
        return name
