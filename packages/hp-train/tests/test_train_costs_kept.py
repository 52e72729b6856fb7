"""Costs that were learned are taken by other runs, where nothing of what decides has changed."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from hp_expert import deduplication_pays, dispatch_bytes, expected_rows_per_token
from hp_plan.costs import cache as module
from hp_plan.costs.cache import FOLDER, cached
from hp_plan.costs.dispatch import RowCosts, row_costs
from hp_plan.costs.modules import StoredKernels, _kernels, _model, _stage, _stages
from hp_plan.costs.work import ModelWork
from hp_platform.testing import run_distributed
from hp_trainer.config import ModelConfig


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where costs are kept: empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / FOLDER


def _never() -> RowCosts:
    raise AssertionError("it was kept")


def test_what_was_learned_is_taken_and_what_was_damaged_is_learned_again(folder: Path) -> None:
    learned = RowCosts({})
    assert cached([1, "a"], RowCosts, lambda: learned) is learned
    assert cached([1, "a"], RowCosts, _never) == learned
    with pytest.raises(AssertionError, match="it was kept"):
        cached([2, "a"], RowCosts, _never)
    (entry,) = folder.iterdir()
    for content in (b"{", b'{"by_ranks": 3}', b"\xff"):
        entry.write_bytes(content)
        assert cached([1, "a"], RowCosts, lambda: learned) is learned
        assert cached([1, "a"], RowCosts, _never) == learned


def test_what_others_have_written_into_an_entry_is_learned_again(folder: Path) -> None:
    key = (ModelConfig(num_dense_layers=1, num_mtp_modules=1), 256, 64, "bfloat16", 1, 1)
    _model.cache_clear()
    learned = _model(key)
    assert cached([1], ModelWork, lambda: learned) is learned
    name = module._name(ModelWork.__name__, [1])
    entry = folder / name
    text = json.loads(entry.read_text())
    deep = '{"again":' * 100_000
    for content in (
        json.dumps(text | {"before": 3}),
        json.dumps(text | {"loss": text["loss"] | {"flops": "1"}}),
        json.dumps(text | {"blocks": {"layers.0": [0, 0, 99999]}}),
        f'{{"before": {deep}',
        f'{{"x": {"[" * 1_000_000}',
    ):
        entry.write_text(content)
        assert cached([1], ModelWork, lambda: learned) is learned
    for trap in ("folder", "pipe", "link"):
        entry.unlink()
        if trap == "folder":
            entry.mkdir()
        elif trap == "pipe":
            os.mkfifo(entry)
        else:
            entry.symlink_to("/dev/zero")
        assert cached([1], ModelWork, lambda: learned) is learned
        if trap == "folder":
            entry.rmdir()
            entry.touch()


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody has it
    learned = RowCosts({})
    for _ in range(2):
        assert cached([1], RowCosts, lambda: learned) is learned


def test_a_source_that_was_changed_is_not_answered_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_package"
    (package / "room").mkdir(parents=True)
    for file in ("__init__.py", "room/code.py"):
        (package / file).write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "_SOURCES", ("some_package",))
    module._code.cache_clear()
    cached([1], RowCosts, lambda: RowCosts({}))
    cached([1], RowCosts, _never)
    (package / "room" / "code.py").write_text("x = 12\n")
    module._code.cache_clear()
    with pytest.raises(AssertionError, match="it was kept"):
        cached([1], RowCosts, _never)
    monkeypatch.undo()
    module._code.cache_clear()


def test_the_sources_of_every_package_that_costs_are_learned_by_are_looked_at() -> None:
    files = [*Path(module.__file__).parent.glob("*.py")]
    pattern = re.compile(r"^(?:from|import) (hp_\w+)", re.MULTILINE)
    imported = {name for file in files for name in pattern.findall(file.read_text())}
    assert {"hp_dry", "hp_expert", "hp_trainer"} <= imported <= set(module._SOURCES)


def test_a_folder_that_others_may_write_is_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    cached([1], RowCosts, lambda: RowCosts({}))
    assert not [*folder.iterdir()]


def test_only_so_many_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENTRIES", 3)
    for number in range(5):
        cached([number], RowCosts, lambda: RowCosts({}))
        for entry in folder.iterdir():  # clocks of file systems are coarse
            age = entry.stat().st_mtime_ns - 10**9
            os.utime(entry, ns=(age, age))
    assert len([*folder.iterdir()]) == 3
    for number in (2, 3, 4):
        cached([number], RowCosts, _never)


def test_models_and_kernels_are_the_same_when_they_were_kept() -> None:
    key = (ModelConfig(num_dense_layers=1, num_mtp_modules=1), 256, 64, "bfloat16", 1, 1)
    first = _model(key), _kernels(key)
    for function in (_model, _kernels, _stage, _stages):
        function.cache_clear()
    again = _model(key), _kernels(key)
    assert again[0] is not first[0]
    # Works are told apart by identity: layers of a kind have one and the same, as before.
    assert again[0] != first[0]
    assert repr(again[0]) == repr(first[0])
    assert _same(again[0]) == _same(first[0])
    assert StoredKernels.of(again[1]) == StoredKernels.of(first[1])
    assert again[1] == first[1]


def _same(model: ModelWork) -> list[set[str]]:
    """Return the names of blocks that are one and the same, for each block."""
    blocks = model.blocks.items()
    return [{name for name, other in blocks if other is block} for _, block in blocks]


def test_rows_of_experts_are_those_of_the_dispatcher() -> None:
    found = row_costs(48, 4, 128, 4)
    assert set(found) == {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}
    for ep, one in found.items():
        cost = dispatch_bytes(48, 4, ep, row_bytes=128, weight_bytes=4)
        assert (one.plain, one.deduplicated) == cost
        assert one.rows == expected_rows_per_token(48, 4, ep)
        assert one.pays == deduplication_pays(48, 4, ep, row_bytes=128, weight_bytes=4)


def _learn_slowly(asked: int, log: Path) -> RowCosts:
    with log.open("a") as file:
        file.write(f"{asked}\n")
    time.sleep(0.5)
    return RowCosts({})


def _ask(log: Path) -> None:
    for asked in (1, 2):
        cached([asked], RowCosts, partial(_learn_slowly, asked, log))


def test_ranks_that_ask_at_once_wait_for_the_one_that_learns(tmp_path: Path) -> None:
    run_distributed(_ask, tmp_path / "log", world_size=3)
    assert sorted((tmp_path / "log").read_text().split()) == ["1", "2"]


def test_one_that_never_ends_is_not_waited_for_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.1)
    folder.mkdir(mode=0o700)
    holder = os.open(folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    learned = RowCosts({})
    assert cached([1], RowCosts, lambda: learned) is learned
    os.close(holder)


def test_a_second_plan_does_not_import_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hp_train", "plan", "debug-qwen3-moe"]
    command += ["--gpus", "2", "--json", "--vocab-size", "256"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    first, second = (
        subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=240
        )
        for _ in range(2)
    )
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert "| torch\n" in first.stderr.replace(" ", "").replace("|", "| ")
    assert "torch" not in second.stderr
