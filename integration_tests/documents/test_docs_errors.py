"""The pages of errors name every message that their package raises."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["hp-context"]
RAISED = ("ValueError", "TypeError", "PeerError", "ImportError")
LENGTH = 24  # characters of the longest fixed part of a message that the page must have


def messages(package: str) -> Iterator[tuple[str, str]]:
    """Yield the place of each message and its longest part that does not vary."""
    for file in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = getattr(node.exc.func, "id", "")
            if name in RAISED and node.exc.args:
                yield f"{file.name}:{node.lineno}", max(fixed_parts(node.exc.args[0]), key=len)


def fixed_parts(message: ast.expr) -> list[str]:
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    constants = [part.value for part in parts if isinstance(part, ast.Constant)]
    return ["", *(text for text in constants if isinstance(text, str))]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_message_is_on_the_page(package: str) -> None:
    page = (ROOT / "docs" / "reference" / package / "errors.md").read_text()
    found = list(messages(package))
    assert len(found) > 20
    missing = [(place, text) for place, text in found if text.strip()[:LENGTH] not in page]
    assert not missing
