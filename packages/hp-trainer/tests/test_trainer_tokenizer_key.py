"""What `data.tokenizer` may name."""

from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_trainer.config.options import resolve


def test_a_folder_with_a_tokenizer_is_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text("{}")
    config = resolve(None, [("data.tokenizer", str(tmp_path / "model"))]).config
    assert config.data.tokenizer == str(path)
    with pytest.raises(ConfigError, match=r"must be a file, or a folder with a tokenizer\.json"):
        resolve(None, [("data.tokenizer", str(tmp_path))])
    with pytest.raises(ConfigError, match=r"data\.separator .*needs data\.tokenizer"):
        resolve(None, [("data.separator", "x")])
