"""Take out of texts what is nobody's business: names of hosts and users, paths, addresses, secrets.

What the kit says is put together from things that it knows by name; what others say (messages of
errors, tracebacks, tables of drivers) goes through here. No torch.
"""

import os
import pwd
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_LEAST, _LEAST_SECRET = 6, 4
"""Letters of a value of the environment that could not be a common word, and of one that is named
like a secret."""
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CRED|AUTH", re.IGNORECASE)
_NAMES = ("HOSTNAME", "HOST", "USER", "LOGNAME", "USERNAME")
_OURS = ("NCCL_", "TORCH_", "CUDA_", "PYTHON", "OMP_", "HP_", "LC_", "LANG", "TERM")
_WORDS = frozenset({"float32", "bfloat16", "float64"})
_WORD = r"(?<![A-Za-z0-9_-]){}(?![A-Za-z0-9_-])"
_HEX = "[0-9a-f]{1,4}"
_ADDRESSES = (
    (r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", "<address>"),
    (r"\b[\w.+-]+@[\w-]+(\.[\w-]+)+\b", "<address>"),
    (r"\b(?:\d{1,3}\.){3}\d{1,3}\b", "<address>"),
    (rf"\b(?:{_HEX}:){{4,7}}{_HEX}\b", "<address>"),
    (rf"\b{_HEX}(?::{_HEX})*::(?:{_HEX}(?::{_HEX})*)?(?!\w)", "<address>"),
    (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<id>"),
)
_QUOTED = re.compile(r"(?P<quote>[\"'])(?P<path>(?:~|\.{1,2})?/[^\"'\n]*)(?P=quote)")
_BARE = re.compile(r"(?<![\w>./~-])(?P<path>(?:~|\.{1,2})?/[^\s'\",:;()<>]+)")
_ENDING = r"\.(?:py|pyx|so|json|jsonl|toml|txt|cpp|hpp|cu|cuh|h|c)"
_KNOWN_SOURCE = re.compile(rf"(?:^|/)((?:hp_\w+|torch|triton|transformers)/[\w/.-]+{_ENDING})$")
_FILE = re.compile(rf"/([\w.-]+{_ENDING})$")


def cleaner(*, env: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """A function that cleans texts of what it finds out about this process now.

    Args:
        env: Environment whose values are taken out.
    """
    before = list(_replacements(_values(env), "<environment>"))
    before += [(re.compile(pattern, re.IGNORECASE), put) for pattern, put in _ADDRESSES]
    host = os.uname().nodename
    hosts = {host, host.partition(".")[0], env.get("HOSTNAME", ""), env.get("HOST", "")}
    users = {_user(), *(env.get(name, "") for name in ("USER", "LOGNAME", "USERNAME"))}
    after = [*_replacements(hosts, "<host>"), *_replacements(users, "<user>")]

    def clean(text: str) -> str:
        for pattern, put in before:
            text = pattern.sub(put, text)
        text = _QUOTED.sub(lambda m: f"{m['quote']}{_shown(m['path'])}{m['quote']}", text)
        text = _BARE.sub(lambda m: _shown(m["path"]), text)
        for pattern, put in after:
            text = pattern.sub(put, text)
        return text

    return clean


def cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """The same with all texts in it cleaned; keys of tables as well."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): cleaned(item, clean) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(item, clean) for item in value]
    return value


def _shown(path: str) -> str:
    """What helps of a path: a module of a known package, or the name of a source file."""
    if known := _KNOWN_SOURCE.search(path):
        return known[1]
    file = _FILE.search(path)
    return f"<path>/{file[1]}" if file else "<path>"


def _values(env: Mapping[str, str]) -> Iterator[str]:
    """Values that tell something; paths are known by their form."""
    for name, value in env.items():
        least = _LEAST_SECRET if _SECRET.search(name) else _LEAST
        is_plain = value in _WORDS or name in _NAMES or name.startswith(_OURS)
        if len(value) >= least and not is_plain and value[0] not in "/~.":
            yield value


def _replacements(values: Iterable[str], put: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """The longest first; as whole words, since a host may be called `a`."""
    for value in sorted({value for value in values if value}, key=len, reverse=True):
        yield re.compile(_WORD.format(re.escape(value))), put


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
