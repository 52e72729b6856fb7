"""Tokens that are held out for evaluation.

The text is one stream of tokens, files in their order. Of every window of it, and of the shorter
window at its end, the last `fraction` is held out. Windows are so long that 8192 tokens are held
out together. The held-out tokens depend only on the text, the tokenizer and the fraction, and one
file is enough. Of a text that does not fill a window, at least 1024 tokens are held out, or a
quarter if that is less. A document that is cut ends in both parts with a separator, like two
documents.
"""

import math

import numpy as np

from hp_data.tokenizer import TokenArray
from hp_data.tokens import TokenWriter

_TOGETHER = 8192
_LARGEST_WINDOW = 1 << 22
_LEAST = 1024


class HoldOut:
    """A split of a stream of tokens into two files.

    Args:
        train: Writer of the training tokens.
        held: Writer of the held-out tokens.
        separator: Token that ends a document.
        fraction: Share to hold out, above 0 and below 1.
    """

    def __init__(
        self, train: TokenWriter, held: TokenWriter, separator: int, *, fraction: float
    ) -> None:
        self._train, self._held, self._fraction = train, held, fraction
        self._separator = separator
        self._window = min(math.ceil(_TOGETHER / fraction), _LARGEST_WINDOW)
        self._parts: list[TokenArray] = []
        self._size = 0
        self._in_document = False

    def write(self, tokens: TokenArray) -> int:
        """Take more of the stream, without a first separator that ends a document without tokens.

        Returns:
            Number of separators left out, 0 or 1.
        """
        num_empty = int(not self._in_document and tokens.size > 0 and tokens[0] == self._separator)
        tokens = tokens[num_empty:]
        if tokens.size:
            self._in_document = bool(tokens[-1] != self._separator)
        while self._size + tokens.size >= self._window:
            missing = self._window - self._size
            self._parts.append(tokens[:missing])
            tokens = tokens[missing:]
            self._deal(math.ceil(self._fraction * self._window))
        if tokens.size:
            self._parts.append(tokens)
            self._size += tokens.size
        return num_empty

    def finish(self) -> None:
        """Write the last tokens of the stream to both files."""
        if self._size:
            least = 0 if self._train.tokens else min(_LEAST, self._size // 4)
            self._deal(max(math.ceil(self._fraction * self._size), least))

    def _deal(self, num_held: int) -> None:
        window = np.concatenate(self._parts)
        self._parts, self._size = [], 0
        for part, writer in zip(
            np.split(window, [-num_held]), (self._train, self._held), strict=True
        ):
            if part.size:
                writer.write(part)
                if part[-1] != self._separator:
                    writer.write(np.full(1, self._separator, dtype=part.dtype))
