"""Tokenizers, from text to ids and back: bytes, or a file of Hugging Face's ``tokenizers``.

Note [special tokens in text]: the special tokens of a tokenizer (`<|endoftext|>`, `<s>`, ...) are
put between texts by programs and are not read from texts: in a document they are characters like
others. So these tokens, and the separator in any case, are renamed before a tokenizer is made, to
names that begin with the zero character, which no text has. Then no rule of a tokenizer gives their
ids for text. When ids are decoded, they get their own names.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hp_base.errors import ConfigError, DataError
from hp_base.folder import read_named, why_not

TokenArray = NDArray[np.unsignedinteger[Any]]
AnyArray: TypeAlias = NDArray[Any]
"""Ids of any integer dtype."""
DType: TypeAlias = "np.dtype[Any]"

_LARGEST_VOCABULARY = 1 << 24
"""Limit of the vocabulary, as every row of the embedding takes memory."""
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
_ALONE = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
"""How an added token is found in a text: as it is."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LISTED = 8


class Tokenizer(Protocol):
    """A map from text to ids and back.

    Attributes:
        vocab_size: One more than the largest id.
        separator: Id between two documents.
        separator_name: Name of the separator in the tokenizer.
        dtype: Narrowest unsigned dtype for all ids.
        path: Path with which `load_tokenizer` makes the same tokenizer, with `separator_name`.
        identity: Digest of the file: tokenizers with the same identity and separator give the same
            ids.
        is_cheap: Whether encoding costs no more than copying, so that results are not worth
            keeping.
    """

    vocab_size: int
    separator: int
    separator_name: str
    dtype: "np.dtype[Any]"
    path: str
    identity: str
    is_cheap: bool

    def encode(self, text: str, *, goes_on: bool = False) -> TokenArray:
        """Return the ids of a text, one-dimensional; see Note [special tokens in text].

        Args:
            text: Text to encode.
            goes_on: Whether the text continues one that was encoded before, after a cut that
                `joins` allows.
        """

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; bytes that are not text are replaced."""

    def joins(self, left: str, right: str) -> bool:
        """Tell whether a text may be cut here: its ids are the ids of both sides."""


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes as ids 0..255, with the zero byte, which no text has, between."""

    vocab_size = 256
    separator = 0
    separator_name = ""
    dtype = np.dtype(np.uint8)
    path = ""
    identity = "bytes"
    is_cheap = True

    def encode(self, text: str, *, goes_on: bool = False) -> TokenArray:  # noqa: ARG002 - bytes are bytes
        """Return the text's UTF-8 bytes, uint8."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Return the text of the bytes."""
        return bytes(ids).decode("utf-8", errors="replace")

    def joins(self, left: str, right: str) -> bool:  # noqa: ARG002 - everywhere
        """Return True: bytes may be cut anywhere."""
        return True


def byte_tokenizer() -> bytes:
    """Return a `tokenizer.json` whose ids are those of `ByteTokenizer`.

    The library of Hugging Face writes bytes as printable characters. The zero byte has its own name
    and is a special token, which no text is encoded as.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    names = {byte: chr(byte) for byte in plain} | {b: chr(256 + k) for k, b in enumerate(others)}
    names[ByteTokenizer.separator] = MARK
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": MARK, **_ALONE, "special": True}],
        "pre_tokenizer": by_bytes | {"trim_offsets": True},
        "decoder": by_bytes | {"trim_offsets": True},
        "model": {"type": "BPE", "vocab": {names[b]: b for b in range(256)}, "merges": []},
    }
    return json.dumps(content, indent=2).encode()


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` read by the ``tokenizers`` library.

    Args:
        path: Path of the file.
        separator: Name of the token that ends documents; empty: see `separator_of`.

    Raises:
        ConfigError: If the file is not a tokenizer, or the token that ends a document is unknown.
    """

    is_cheap = False

    def __init__(self, path: Path, separator: str = "") -> None:
        content, raw = _read(path)
        self.path = str(path)
        self.identity = hashlib.blake2b(raw, digest_size=16).hexdigest()
        self.separator_name = name = separator_of(path, content, separator)
        self._backend = backend = _backend_of(path, content, name)
        ids = (backend.token_to_id(known) for known in (MARK + name, name))
        self.separator: int = next(id_ for id_ in ids if id_ is not None)
        # Ids may have gaps.
        self.vocab_size: int = max(backend.get_vocab().values(), default=0) + 1
        if self.vocab_size > _LARGEST_VOCABULARY:
            raise ConfigError(
                f"data.tokenizer ({path}): the largest id ({self.vocab_size - 1}) must be below "
                f"{_LARGEST_VOCABULARY}"
            )
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self._is_bpe = content["model"].get("type", "BPE") == "BPE"
        # Such a normalizer puts before any text the character that stands for a space.
        self._begins_words = '"Prepend"' in json.dumps(content.get("normalizer"))

    def encode(self, text: str, *, goes_on: bool = False) -> TokenArray:
        """Return the ids, uint16 or uint32 by the size of the vocabulary."""
        return np.array(self._encoding(text, goes_on=goes_on).ids, dtype=self.dtype)

    def decode(self, ids: list[int]) -> str:
        """Return the text of the ids."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text.replace(MARK, "")

    def joins(self, left: str, right: str) -> bool:
        """Tell whether the text may be cut here.

        It may if its ids are the ids of both sides, and a word ends here: pre-tokenizers depend on
        near characters, and models on one word at a time. Where BPE has no words, no token may
        contain the two characters beside the cut next to each other: then no merge reaches across.
        """
        whole, first = self._encoding(left + right), self._encoding(left)
        at = len(first.ids)
        if not 0 < at < len(whole.ids):
            return False
        if whole.ids != first.ids + self._encoding(right, goes_on=True).ids:
            return False
        if whole.word_ids[at - 1] != whole.word_ids[at]:
            return True
        pair = whole.tokens[at - 1][-1] + whole.tokens[at][0]
        return self._is_bpe and not any(pair in name for name in self._backend.get_vocab())

    def _encoding(self, text: str, *, goes_on: bool = False) -> Any:
        if goes_on and self._begins_words:
            text = text.removeprefix(" ")
        return self._backend.encode(text, add_special_tokens=False)


def load_tokenizer(path: str, separator: str = "") -> Tokenizer:
    """Return the tokenizer of a file, with its token that ends documents; without a path, bytes."""
    return HuggingFaceTokenizer(Path(path), separator) if path else ByteTokenizer()


def vocab_size_of(tokenizer: Tokenizer, rows: int = 0) -> int:
    """Return the number of rows of the embedding for a tokenizer.

    Args:
        tokenizer: Tokenizer of the data.
        rows: Value of `model.vocab_size`; 0: the number of tokens of the tokenizer.

    Raises:
        DataError: If the tokenizer has more tokens than rows.
    """
    rows = rows or tokenizer.vocab_size
    if rows < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab_size ({rows}) must be at least the tokens of the tokenizer "
            f"({tokenizer.vocab_size})"
        )
    return rows


def _read(path: Path) -> tuple[Content, bytes]:
    """Return the content of a file, with checked tokens, and its bytes."""
    try:
        raw = read_named(path)
        content = json.loads(raw.decode())
        content["added_tokens"] = [_token(each) for each in content.get("added_tokens") or ()]
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # of Unigram: pieces and their scores
            content["model"]["vocab"] = [(str(name), float(score)) for name, score in vocab]
        else:
            content["model"]["vocab"] = {str(name): int(id_) for name, id_ in vocab.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise _no_tokenizer(path, error) from None
    except (TypeError, KeyError, AttributeError, OverflowError):
        raise _no_tokenizer(path, ValueError("it has no model with a vocab")) from None
    # Without settings for the input of a model, by which a text would be truncated or padded, or
    # get random ids.
    content |= {"truncation": None, "padding": None}
    content["model"].pop("dropout", None)
    return content, raw


def _token(token: Content) -> Content:
    """Return an added token with checked fields."""
    return {
        **token,
        "content": str(token["content"]),
        "id": int(token["id"]),
        "special": token.get("special") is True,
    }


def _backend_of(path: Path, content: Content, separator: str) -> Any:
    """Return the library's tokenizer, which gives no id of a special token for text."""
    from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - optional extra

    # Special tokens that merges make from text keep their names; the separator must not be one.
    for names in ({*special_of(content), separator}, {separator}, ()):
        try:
            backend = Backend.from_str(json.dumps(without_special(content, names)))
        except Exception as error:  # noqa: BLE001 - the library raises no narrower type
            if not names:
                raise _no_tokenizer(path, error) from None
        else:
            if not names:
                raise ConfigError(
                    f"data.separator ({ascii(separator)[1:-1]}) must not be a token that "
                    f"data.tokenizer ({path}) makes of text; name another"
                )
            backend.encode_special_tokens = True
            return backend
    raise AssertionError("the last one returned or raised")


def _no_tokenizer(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"data.tokenizer ({path}) must be a tokenizers file: {why_not(error)}")


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
