"""The token that ends documents, which no text is encoded as.

Note [special tokens in text]: the special tokens of a tokenizer (`<|endoftext|>`, `<s>`, ...) are
put between texts by programs and are not read from texts: in a document they are characters like
others. So these tokens, and the separator in any case, are renamed before a tokenizer is made, to
names that begin with the zero character, which no text has. Then no rule of a tokenizer gives their
ids for text. When ids are decoded, they get their own names.
"""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not

CONFIG = "tokenizer_config.json"
"""File beside that of a tokenizer, with the roles of its tokens."""
MARK = "\0"
"""First character of the names of tokens that no text is encoded as."""
Content: TypeAlias = dict[str, Any]
"""The JSON of a tokenizer file, whose added tokens and vocabulary were checked."""

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
"""Names of the token that ends a document, in families of models."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LISTED = 8


def separator_of(path: Path, content: Content, wanted: str) -> str:
    """Return the name of the token that ends documents.

    It is the configured one; else the `eos_token` of the config beside the file; else a special
    token with a usual name for it; else, if no token is special, any token with such a name.

    Args:
        path: File of the tokenizer.
        content: Content of the file.
        wanted: Value of ``data.separator``; empty: not configured.

    Raises:
        ConfigError: If there is none; suggests some.
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


def special_of(content: Content) -> list[str]:
    """Return the names of the special tokens of a file."""
    return [token["content"] for token in content["added_tokens"] if token["special"]]


def without_special(content: Content, names: Iterable[str]) -> Content:
    """Return a tokenizer file's content with renamed tokens, see Note [special tokens in text].

    Args:
        content: Content of the file; it is not changed.
        names: Tokens to rename, except those that stand for bytes, which text consists of.
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


def _vocab_of(content: Content) -> Iterable[str]:
    """Return the names of the tokens of a file's model."""
    vocab = content["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else (name for name, _ in vocab)


def _end_of_config(path: Path) -> str:
    """Return the `eos_token` in the config of a tokenizer; empty if there is none."""
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
