"""What is said of configs that are refused."""

from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_trainer.config.options import resolve


def refusal(
    *overrides: tuple[str, object], text: str | None = None, tmp: Path | None = None
) -> str:
    source = None
    if text is not None:
        assert tmp is not None
        path = tmp / "my.toml"
        path.write_text(text)
        source = str(path)
    with pytest.raises(ConfigError) as caught:
        resolve(source, overrides, env={})
    return str(caught.value)
