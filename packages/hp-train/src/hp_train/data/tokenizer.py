"""Text to token ids and back: bytes by default, a Hugging Face ``tokenizers`` file if given."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hp_train.errors import ConfigError

TokenArray = NDArray[np.unsignedinteger[Any]]

_SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[SEP]",
)
"""What families of models call the end of a document."""


class Tokenizer(Protocol):
    """What the rest of the system needs of a tokenizer.

    Attributes:
        vocab_size: One more than the largest id.
        separator: The id put between two documents.
        dtype: The narrowest unsigned type that holds all ids.
        path: Argument that `load_tokenizer` makes it of again.
        identity: Stands for the ids that it gives: two that agree in it give the same.
        is_cheap: Whether encoding costs no more than copying, so that results are not worth
            keeping.
    """

    vocab_size: int
    separator: int
    dtype: "np.dtype[Any]"
    path: str
    identity: str
    is_cheap: bool

    def encode(self, text: str) -> TokenArray:
        """Ids of a text, one-dimensional."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids; what is not text is shown replaced, never an error."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; the zero byte, which text does not contain, separates."""

    vocab_size = 256
    separator = 0
    dtype = np.dtype(np.uint8)
    path = ""
    identity = "bytes"
    is_cheap = True

    def encode(self, text: str) -> TokenArray:
        """uint8 ids of the text's UTF-8 bytes."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        """Text of the bytes."""
        return bytes(ids).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` read by the ``tokenizers`` library.

    Args:
        path: The file.

    Raises:
        ConfigError: When the file is not a tokenizer, or knows no end of a document.
    """

    is_cheap = False

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - optional extra

        try:
            content = path.read_bytes()
            self._backend = Backend.from_str(content.decode())
            # Settings for the inputs of a model: a text would be cut off or filled up.
            self._backend.no_truncation()
            self._backend.no_padding()
            ids = self._backend.get_vocab().values()
        except Exception as error:  # noqa: BLE001 - the library raises no narrower type
            raise ConfigError(
                f"data.tokenizer ({path}) must be a tokenizers file: {error}"
            ) from None
        self.path = str(path)
        self.identity = hashlib.blake2b(content, digest_size=16).hexdigest()
        # Ids may have gaps.
        self.vocab_size: int = max(ids, default=0) + 1
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        known = (self._backend.token_to_id(name) for name in _SEPARATORS)
        separator: int | None = next((i for i in known if i is not None), None)
        if separator is None:
            names = ", ".join(ascii(name)[1:-1] for name in _SEPARATORS)
            raise ConfigError(f"data.tokenizer ({path}) must have a token among {names}")
        self.separator = separator

    def encode(self, text: str) -> TokenArray:
        """uint16 or uint32 ids, by the size of the vocabulary."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=self.dtype)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a ``data.tokenizer`` value; bytes when it is empty."""
    return HuggingFaceTokenizer(Path(path)) if path else ByteTokenizer()
