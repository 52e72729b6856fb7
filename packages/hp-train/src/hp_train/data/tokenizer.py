"""Text to token ids and back: bytes by default, a Hugging Face ``tokenizers`` file if given."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hp_train.errors import ConfigError

TokenArray = NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """What the rest of the system needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of different ids."""
        ...

    @property
    def separator(self) -> int:
        """The id put between two documents."""
        ...

    def encode(self, text: str) -> TokenArray:
        """Ids of a text, one-dimensional."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids; what is not text is shown replaced, never an error."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; the zero byte, which text does not contain, separates."""

    vocab_size = 256
    separator = 0

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
        ConfigError: When the file is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - optional extra

        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises no narrower type
            raise ConfigError(
                f"data.tokenizer ({path}) must be a tokenizers file: {error}"
            ) from None
        self.vocab_size: int = self._backend.get_vocab_size()
        names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
        known = (self._backend.token_to_id(name) for name in names)
        self.separator: int = next((i for i in known if i is not None), 0)

    def encode(self, text: str) -> TokenArray:
        """uint16 or uint32 ids, by the size of the vocabulary."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=dtype)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a ``data.tokenizer`` value; bytes when it is empty."""
    return HuggingFaceTokenizer(Path(path)) if path else ByteTokenizer()
