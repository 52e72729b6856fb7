"""The caches of hp-base where torch looks for its own."""

from pathlib import Path

import pytest

from hp_base.own_caches import CACHES, own_caches


def test_the_folder_of_torch_that_everybody_knows_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from torch._inductor.runtime.cache_dir_utils import (  # noqa: PLC0415 - seconds
        cache_dir,
        default_cache_dir,
    )

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == default_cache_dir()  # what torch does by itself
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    environment: dict[str, str] = {}
    own_caches(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == str(tmp_path / "cache" / "hp-train-compiled" / "inductor")
