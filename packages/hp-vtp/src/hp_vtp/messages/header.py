"""Headers that both ends of an edge exchange before a transfer, so that no mistake becomes data.

Gloo takes a bfloat16 message into a float32 buffer of as many bytes, and a short message into a
longer buffer, without an error. Needs no torch.
"""

import hashlib

SIZE = 512  # bytes
_DIGEST = 32


def to_header(text: str) -> bytes:
    """Return the description of a transfer as exactly `SIZE` bytes: different texts differ.

    Args:
        text: Readable description; at most `SIZE - 32` bytes of it travel, behind the SHA-256
            digest of all.
    """
    data = text.encode()
    return hashlib.sha256(data).digest() + data[: SIZE - _DIGEST].ljust(SIZE - _DIGEST, b"\0")


def text_of(header: bytes) -> str:
    """Return the readable text of a header."""
    return header[_DIGEST:].rstrip(b"\0").decode(errors="replace")
