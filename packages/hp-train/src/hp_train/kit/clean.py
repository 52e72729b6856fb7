"""Take out of texts what is nobody's business: names of hosts and users, paths, addresses, secrets.

What the kit says is put together from things that it knows by name; what others say (messages of
errors, tracebacks, tables of drivers) goes through here. No torch.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_LEAST = 6  # letters of a value of the environment that could not be a common word
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CRED|AUTH", re.IGNORECASE)
_WORD = r"(?<![A-Za-z0-9_.-])({})(?![A-Za-z0-9_-])"
_HEX = "[0-9a-f]{1,4}"
_ENDINGS = "py|pyx|so|json|jsonl|toml|txt|cpp|hpp|cu|cuh|h|c"
_PATTERNS = (
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE), "<address>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(\.[\w-]+)+\b"), "<address>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (re.compile(r"\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b", re.IGNORECASE), "<address>"),
    (
        re.compile(rf"\b{_HEX}(?::{_HEX})*::(?:{_HEX}(?::{_HEX})*)?(?!\w)", re.IGNORECASE),
        "<address>",
    ),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    # Of a path the packages and modules below it, or the name of a source file.
    (
        re.compile(
            rf"(?:~|\.{{0,2}})/[^\s'\",:;()<>]*?/((?:hp_\w+|torch|triton)/[\w/.-]+\.(?:{_ENDINGS})\b)"
        ),
        r"\1",
    ),
    (
        re.compile(rf"(?:~|\.{{0,2}})/(?:[^\s'\",:;()<>/]+/)+([\w.-]+\.(?:{_ENDINGS})\b)"),
        r"<path>/\1",
    ),
    (re.compile(r"(?<![\w>./])(?:~|\.{1,2})?/[^\s'\",:;()<>/]+(?:/[^\s'\",:;()<>]*)*"), "<path>"),
)


def cleaner(*, env: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """A function that cleans texts of what it finds out about this process now.

    Args:
        env: Whose values are taken out.
    """
    known = sorted(set(_known(env)), key=lambda pair: -len(pair[0]))

    def clean(text: str) -> str:
        for value, instead in known:
            if value.isalnum() and len(value) < 2 * _LEAST:
                text = re.sub(_WORD.format(re.escape(value)), instead, text)
            else:
                text = text.replace(value, instead)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
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


def _known(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    host = os.uname().nodename
    for name in {host, host.partition(".")[0], env.get("HOSTNAME", "")}:
        if name:
            yield name, "<host>"
    for name in {env.get("USER", ""), env.get("LOGNAME", ""), _user()}:
        if name:
            yield name, "<user>"
    for path in {env.get("HOME", ""), str(Path.cwd()), str(Path.home())}:
        if len(path) > 1:
            yield path, "<path>"
    for name, value in env.items():
        is_plain = value.replace(".", "").isdigit() or value in ("float32", "bfloat16", "float64")
        least = 4 if _SECRET.search(name) else _LEAST
        if (
            len(value) >= least
            and not is_plain
            and not name.startswith(("NCCL_", "TORCH_", "CUDA_L"))
        ):
            yield value, "<environment>"


def _user() -> str:
    import pwd  # noqa: PLC0415 - not everywhere

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
