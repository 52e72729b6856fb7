"""Token that ends documents, which text is kept from holding.

Note [special tokens in text]: what a tokenizer calls special (`<|endoftext|>`, `<s>`, ...) is put
between texts by programs and never read out of them: where they stand in a document they are
characters like others. So those tokens, and the separator whatever it is, are renamed before a
tokenizer is made: to names that begin with the zero character, which no text has. No rule of any
tokenizer then gives their ids for text. Their own names come back when ids are decoded.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not

CONFIG = "tokenizer_config.json"
"""What stands beside the file of a tokenizer and says which token does what."""
MARK = "\0"
"""What the names of tokens begin with that text cannot give."""

_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOS]",
    "<EOS>",
    "<|eos|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "[SEP]",
)
"""What families of models call the end of a document."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LISTED = 8


def separator_of(path: Path, content: Mapping[str, Any], wanted: str) -> str:
    """Return the name of the token that ends documents.

    That is the one asked for; else the `eos_token` of the file beside; else a special token that is
    called as ends usually are; else, where no token is special, any token that is.

    Args:
        path: File of the tokenizer.
        content: What stands in it.
        wanted: ``data.separator``; empty: not said.

    Raises:
        ConfigError: When there is none, with what could be named.
    """
    special = special_of(content)
    known = {*_vocab_of(content), *(token["content"] for token in content["added_tokens"])}
    if wanted:
        if wanted not in known:
            raise ConfigError(
                f"data.separator ({_shown(wanted)}) must be a token of data.tokenizer ({path})"
                f"{_such_as(special, known)}"
            )
        return wanted
    told = _end_of_config(path.with_name(CONFIG))
    if told in known:
        return told
    among = special or known
    found = next((name for name in _NAMES if name in among), None)
    if found is None:
        raise ConfigError(
            f"data.separator must name the token of data.tokenizer ({path}) that ends documents"
            f"{_such_as(special, known)}"
        )
    return found


def special_of(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the tokens that a file calls special."""
    return [token["content"] for token in content["added_tokens"] if token["special"]]


def without_special(content: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The content of a tokenizer file with some tokens renamed, see Note [special tokens in text].

    Args:
        content: What stands in the file; it stays as it is.
        names: Tokens to rename; those that stand for bytes are what text is made of, and stay.
    """
    model = dict(content["model"])
    new = {name: MARK + name for name in names if not _BYTE.fullmatch(name)}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {new.get(name, name): id_ for name, id_ in vocab.items()}
    else:  # of Unigram: pieces and their scores
        model["vocab"] = [[new.get(name, name), score] for name, score in vocab]
    if "unk_token" in model:
        model["unk_token"] = new.get(model["unk_token"], model["unk_token"])
    added = [
        # A normalizer must not see the mark.
        token | {"content": new[token["content"]], "normalized": False}
        if token["content"] in new
        else token
        for token in content["added_tokens"]
    ]
    return content | {"model": model, "added_tokens": added}


def _vocab_of(content: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of the tokens of a file's model."""
    vocab = content["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else (name for name, _ in vocab)


def _end_of_config(path: Path) -> str:
    """Read the end of a sequence from the config of a tokenizer; empty if it names none."""
    try:
        config = json.loads(read_named(path))
        end = config.get("eos_token")
        end = end.get("content") if isinstance(end, dict) else end
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read eos_token in {path}: {why_not(error)}; mend it, or set data.separator"
        ) from None
    return end if isinstance(end, str) else ""


def _such_as(special: Sequence[str], known: Collection[str]) -> str:
    names = [name for name in special if not _BYTE.fullmatch(name)]
    names = names or [name for name in _NAMES if name in known]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(map(_shown, names[:_LISTED]))
    return f", such as {listed}{more}" if names else ""


def _shown(name: str) -> str:
    return ascii(name)[1:-1][:60]
