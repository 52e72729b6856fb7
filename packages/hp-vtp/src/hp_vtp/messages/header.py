"""What both ends of an edge tell each other before a transfer, so that no mistake becomes data.

Gloo takes a bfloat16 message into a float32 buffer of as many bytes, and a short message into a
longer buffer, without an error. Needs no torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

SIZE = 512  # bytes
_DIGEST = 32


@dataclass(frozen=True, slots=True)
class Header:
    """A description of a transfer in readable text; the digest covers all of it.

    Attributes:
        text: Description of the transfer; at most `SIZE - 32` bytes of it travel.
        digest: SHA-256 digest of the whole text, 32 bytes.
    """

    text: str
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Header:
        """Describe a transfer."""
        return cls(text, hashlib.sha256(text.encode()).digest())

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """Read what `encode` wrote."""
        return cls(data[_DIGEST:].rstrip(b"\0").decode(errors="replace"), data[:_DIGEST])

    def encode(self) -> bytes:
        """As exactly `SIZE` bytes."""
        text = self.text.encode()[: SIZE - _DIGEST]
        return self.digest + text.ljust(SIZE - _DIGEST, b"\0")

    def matches(self, other: Header) -> bool:
        """Whether both describe the same transfer."""
        return self.digest == other.digest
