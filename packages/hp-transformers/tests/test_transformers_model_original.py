"""Files of a model that come along with a run, of people and of strangers."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import MOST_BYTES
from hp_data.tokenizer import byte_tokenizer
from hp_trainer.config.options import resolve
from hp_trainer.launch import launcher
from hp_trainer.launch.rundir import LISTING, ORIGINAL
from hp_transformers.original import (
    OTHER_TOKENIZER,
    OTHER_WEIGHTS,
    Original,
    kept_original,
    original_of,
)

FILES = {
    "config.json": b'{"model_type": "llama", "mine": [1]}',
    "generation_config.json": b'{"eos_token_id": [2, 7]}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"chat_template": "x"}',
    "vocab.json": b"{}",
    "README.md": b"# mine\n",
    "additional_chat_templates/tool_use.jinja": b"{{ x }}",
    ".gitattributes": b"*.bin\n",
}


@pytest.fixture(autouse=True)
def _ranks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "hp-trainer" / "tests")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return put(tmp_path / "model", FILES)


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def new_run(tmp_path: Path, **keys: object) -> Path:
    given: dict[str, object] = {"run.output_dir": str(tmp_path), "run.name": "run", "mesh.pp": 1}
    given |= {"launch.max_restarts": 0, "pipeline.stages_per_rank": 1}
    given |= {key.replace("__", "."): value for key, value in keys.items()}
    (tmp_path / "own.toml").write_text("[train]\nsteps = 3\n")
    resolved = resolve(str(tmp_path / "own.toml"), [*given.items()], env={})
    assert launcher.run(resolved, _entry="train_launch_ranks:returns") == 0
    return tmp_path / "run"


def read(original: Original | None) -> dict[str, bytes]:
    assert original is not None
    return {name: content() for name, content in original.files.items()}


def safetensors(header: dict[str, object]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_new_run_keeps_all_files_of_its_model(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    about = {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}
    (model / "model.safetensors").write_bytes(safetensors({"__metadata__": {}, "a": about}))
    (model / "pytorch_model.bin").write_bytes(b"weights")
    (model / "notes.md").symlink_to(tmp_path / "id_rsa")
    (tmp_path / "id_rsa").write_text("mine alone")
    run = new_run(tmp_path, run__init_from=str(model))
    kept = kept_original(run)
    assert read(kept) == FILES
    assert kept is not None
    assert kept.weights == {"model.safetensors": {"a": "F16"}}
    assert kept.left_out == {
        "model.safetensors": OTHER_WEIGHTS,
        "notes.md": "it leads out of the folder",
        "pytorch_model.bin": OTHER_WEIGHTS,
    }
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("note")]
    link, read_as, rate = notes
    assert link == f"note: {model}/notes.md is not kept for exports: it leads out of the folder"
    assert read_as == f"note: text is read as bytes: data.tokenizer does not name that of {model}"
    assert rate.startswith("note: train.learning_rate (0.003) was not given: it is for new weights")
    for path in model.iterdir():
        if path.is_file():
            path.unlink()
    assert read(kept_original(run)) == FILES, "they are the run's own"


def test_a_resumed_run_takes_no_files_that_its_config_names(model: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('init_from = ""', f'init_from = "{model}"'))
    resolved = resolve(None, [("run.resume", str(run))], env={})
    assert resolved.config.run.init_from == str(model)
    assert launcher.run(resolved, _entry="train_launch_ranks:returns") == 0
    assert kept_original(run) is None
    assert not (run / ORIGINAL).exists()


def test_links_of_a_hubs_cache_are_followed_and_no_others(tmp_path: Path) -> None:
    hub = put(tmp_path / "models--a--b", {"blobs/1f": b"one", "refs/main": b"0"})
    secret = put(tmp_path / "mine", {"key": b"secret", "more/key": b"secret"})
    revision = put(hub / "snapshots" / "0", {"LICENSE": b"l", "deep/a/b/c": b"d"})
    put(revision, {".git/config": b"git", "a/b/c/d/e": b"e"})
    (revision / "README.md").symlink_to("../../blobs/1f")
    (revision / "again.md").symlink_to("README.md")
    (revision / "key").symlink_to(secret / "key")
    (revision / "keys").symlink_to(secret / "more")
    (revision / "none").symlink_to("nowhere")
    (revision / "up").symlink_to("../../../mine/key")
    os.mkfifo(revision / "pipe")
    with (revision / "large.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    found = original_of(revision)
    expected = {"README.md": b"one", "again.md": b"one", "LICENSE": b"l", "deep/a/b/c": b"d"}
    assert read(found) == expected
    left_out = {"key", "keys", "up", "none", "pipe", "large.json", "a/b/c/d", ".git"}
    assert {*found.left_out} == left_out
    assert found.left_out[".git"] == "of programs, not of the model"
    plain = tmp_path / "plain"
    revision.rename(plain)  # no revision of a hub any more: links lead out of it
    assert {*original_of(plain).files} == {"LICENSE", "deep/a/b/c"}


def test_what_becomes_a_link_after_it_was_looked_at_is_not_followed(
    model: Path, tmp_path: Path
) -> None:
    found = original_of(model)
    (tmp_path / "id_rsa").write_text("mine alone")
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(Exception, match="must be a regular file"):
        found.files["README.md"]()


def _lists(name: str) -> Callable[[Path, Path], None]:
    def change(run: Path, secret: Path) -> None:
        (run / "config.json").write_text("{}")
        digest = hashlib.sha256(secret.read_bytes()).hexdigest()
        values = {"files": {name: digest}, "left_out": {}, "weights": {}}
        (run / LISTING).write_bytes(msgspec.json.encode(values | {"has_other_tokenizer": False}))

    return change


def _link(where: str) -> Callable[[Path, Path], None]:
    def change(run: Path, secret: Path) -> None:
        (run / where).unlink()
        (run / where).symlink_to(secret)

    return change


def _linked_folder(run: Path, secret: Path) -> None:
    (run / ORIGINAL).rename(run / "away")
    (run / ORIGINAL).symlink_to(run / "away")
    del secret


CHANGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a name above": (_lists("../id_rsa"), "must be the name of a file"),
    "an absolute name": (_lists("/etc/passwd"), "must be the name of a file"),
    "no name": (_lists(""), "must be the name of a file"),
    "a link": (_link(f"{ORIGINAL}/README.md"), "must be a regular file"),
    "a linked list": (_link(LISTING), "must be a regular file"),
    "a linked folder": (_linked_folder, "must be a directory and no symbolic link"),
    "other bytes": (
        lambda run, _: (run / ORIGINAL / "README.md").write_bytes(b"#"),
        "is not what was kept",
    ),
    "no file": (lambda run, _: (run / ORIGINAL / "README.md").unlink(), "is missing"),
    "no list": (lambda run, _: (run / LISTING).write_bytes(b"["), "Expected `object`"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_stranger_put_into_a_run_directory_is_refused(
    change: str, model: Path, tmp_path: Path
) -> None:
    run, secret = new_run(tmp_path, run__init_from=str(model)), tmp_path / "id_rsa"
    secret.write_text("mine alone")
    do, message = CHANGES[change]
    do(run, secret)
    with pytest.raises(CheckpointError, match=message) as raised:
        read(kept_original(run))
    assert "\n" not in str(raised.value)


def test_another_tokenizer_takes_the_place_of_the_models(model: Path, tmp_path: Path) -> None:
    came = original_of(model)
    assert came.with_tokenizer(put(tmp_path / "copy", FILES)) is came
    beside = {"tokenizer.json": b'{"other": 1}', "merges.txt": b"", "notes.txt": b"", "run.py": b""}
    code = {"tokenization_mine.py": b"raise SystemExit", "b.tiktoken": b"YQ== 0"}
    beside |= code
    other = put(tmp_path / "other", beside)
    kept = {n: c for n, c in FILES.items() if "token" not in n and "chat" not in n}
    del kept["vocab.json"]
    for path in (other, other / "tokenizer.json"):
        found = came.with_tokenizer(path)
        assert read(found) == {**kept, "tokenizer.json": b'{"other": 1}', "merges.txt": b"", **code}
        assert {n for n, why in found.left_out.items() if why == OTHER_TOKENIZER} == {
            *("tokenizer_config.json", "vocab.json", "additional_chat_templates/tool_use.jinja")
        }
        assert found.has_other_tokenizer
    (other / "mine.json").write_bytes(b"{}")
    alone = came.with_tokenizer(other / "mine.json")
    assert read(alone) == {**kept, "tokenizer.json": b"{}"}
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        came.with_tokenizer(tmp_path / "none.json")


def test_weights_that_cannot_be_read_are_left_to_who_loads_them(model: Path) -> None:
    for content in (b"", b"\xff" * 8, safetensors({"a": 1}), b"\x01\0\0\0\0\0\0\0["):
        (model / "model.safetensors").write_bytes(content)
        assert original_of(model).weights == {}
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b", "c": 1}}')
    assert original_of(model).weights == {}


def test_a_folder_of_more_files_than_are_listed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hp_transformers.original._MOST_LISTED", 3)
    folder = put(tmp_path / "model", {f"{name}.txt": b"" for name in "abcdef"})
    found = original_of(folder)
    assert {*found.files} == {"a.txt", "b.txt", "c.txt"}
    assert found.left_out == {"d.txt": "it and others come after 3 files"}


def test_a_tokenizer_of_bytes_is_no_tokenizer_that_a_run_should_have_named(tmp_path: Path) -> None:
    plain = Original().with_bytes()
    assert read(plain) == {"tokenizer.json": byte_tokenizer()}
    assert not plain.has_tokenizer
    assert original_of(put(tmp_path / "model", {"tokenizer.model": b"x"})).has_tokenizer
    assert not original_of(put(tmp_path / "none", {"config.json": b"{}"})).has_tokenizer
