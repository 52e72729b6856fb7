import ast
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hp_checkpoint
import hp_checkpoint.runs
from hp_base.errors import CheckpointError
from hp_checkpoint.runs import load_latest, save_checkpoint, verify_checkpoint

SHARD = "rank-00000.safetensors"
Json = Any


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A good checkpoint in a world of one rank: this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    tensors = {"a": torch.ones(4, 6), "b": torch.zeros(3)}
    yield save_checkpoint(tmp_path, step=1, tensors=tensors, extra={}, group=world, keep=1)
    dist.destroy_process_group()


def sign(path: Path, manifest: bytes) -> None:
    """Put a manifest in place with the hash that belongs to it, as an attacker would."""
    digest = hashlib.sha256(manifest).hexdigest()
    (path / "manifest.json").write_bytes(manifest)
    (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def edit(path: Path, change: Callable[[Json], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest)
    sign(path, json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode())


def refused(path: Path) -> str:
    """Return the error of a verification, which a load raises as well; check the memory used."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = high_water_mark()
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    world = dist.group.WORLD
    assert world is not None
    tensors = {"a": torch.full((4, 6), 9.0), "b": torch.full((3,), 9.0)}
    with pytest.raises(CheckpointError):
        load_latest(path.parent, tensors=tensors, group=world)
    assert all(bool((x == 9).all()) for x in tensors.values())
    assert high_water_mark() - before < 100 << 20
    message = str(caught.value)
    assert "\n" not in message
    return message


def high_water_mark() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def chunk(manifest: Json) -> Json:
    return manifest["tensors"]["a"]["chunks"][0]


def put(target: Json, **values: object) -> Json:
    target.update(values)
    return target


def split(manifest: Json, *parts: tuple[list[int], list[int]]) -> None:
    """Replace the chunk of `a` by some of other offsets and sizes."""
    first = chunk(manifest)
    manifest["tensors"]["a"]["chunks"] = [
        {**first, "offsets": offsets, "sizes": sizes} for offsets, sizes in parts
    ]


CHANGES: dict[str, tuple[Callable[[Json], object], str]] = {
    "parent directory": (
        lambda m: put(m["files"][0], name="../rank-00000.safetensors"), "must be of the form"),
    "absolute path": (lambda m: put(m["files"][0], name="/etc/passwd"), "must be of the form"),
    "line break": (lambda m: put(m["files"][0], name=SHARD + "\n"), "must be of the form"),
    "no such file": (lambda m: put(chunk(m), file=7), r"file \(7\) must be less than"),
    "one file too many": (lambda m: put(chunk(m), file=1), r"file \(1\) must be less than"),
    "file twice": (lambda m: m["files"].append(m["files"][0]), "must be listed once"),
    "unused file": (
        lambda m: m["files"].append({"name": "rank-00009.safetensors", "bytes": 8}), "must hold"),
    "huge shape": (
        lambda m: put(m["tensors"]["a"], shape=[1 << 53, 1 << 53]), "elements of all chunks"),
    "huge chunk": (
        lambda m: [put(m["tensors"]["a"], shape=[1 << 52, 6]), put(chunk(m), sizes=[1 << 52, 6])],
        "must equal"),
    "2^60": (lambda m: put(m["tensors"]["a"], shape=[1 << 60]), "must be numbers from 0 to"),
    "2^100": (lambda m: put(m["tensors"]["a"], shape=[1 << 100]), "must be numbers from 0 to"),
    "negative": (lambda m: put(chunk(m), offsets=[-1, 0]), "must be numbers from 0 to"),
    "many dimensions": (lambda m: put(m["tensors"]["a"], shape=[1] * 10**5), "at most 16 numbers"),
    "other dimensions": (lambda m: put(m["tensors"]["a"], shape=[24]), "must equal those of shape"),
    "outside": (lambda m: put(chunk(m), offsets=[1, 0]), "must lie inside shape"),
    "hole": (lambda m: split(m, ([0, 0], [3, 6])), r"elements of all chunks \(18\)"),
    "overlap": (lambda m: split(m, ([0, 0], [2, 6]), ([1, 0], [2, 6])), "must not overlap"),
    "no elements": (lambda m: split(m, ([0, 0], [4, 6]), ([0, 0], [0, 6])), "must have elements"),
    "gap in the file": (lambda m: put(chunk(m), begin=12), "must equal"),
    "type": (lambda m: put(m["tensors"]["a"], dtype="PICKLE"), "dtype 'PICKLE' must be one of"),
    "float": (lambda m: put(chunk(m), begin=0.0), "0.0' must be <class 'int'>"),
    "hash": (lambda m: put(chunk(m), sha256="A" * 64), "must be of the form"),
    "unknown field": (lambda m: put(m, code="x"), "is not a manifest"),
    "version": (lambda m: put(m, version=2), "is not spelled as it was written in format 1"),
    "no tensors": (lambda m: m.pop("tensors"), "is not a manifest"),
    "reserved name": (lambda m: m["tensors"].update(__metadata__=m["tensors"].pop("a")), "name"),
    "control characters": (
        lambda m: m["tensors"].update({"\x1b[2J": m["tensors"].pop("a")}), "must be printable"),
    "long name": (lambda m: m["tensors"].update({"n" * 10**6: m["tensors"].pop("a")}), "1 to 512"),
    "list": (lambda m: put(m, tensors=[]), "must be dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_signed_manifest_that_lies_is_refused(name: str, path: Path) -> None:
    change, message = CHANGES[name]
    edit(path, change)
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(path)
    assert len(refused(path)) < 2000


def deep(opening: bytes, closing: bytes) -> bytes:
    return opening * 10**6 + closing * 10**6


RAW: dict[str, Callable[[bytes], bytes]] = {
    "deep": lambda _: deep(b"[", b"]"),
    "deep objects": lambda _: deep(b'{"a":', b"}"),
    "deep where anything may be": lambda m: m.replace(
        b'"extra":{}', b'"extra":{"x":' + deep(b"[", b"]") + b"}"
    ),
    "key twice": lambda m: m.replace(b'"step":1', b'"step":1,"step":1'),
    "tensor twice": lambda m: m.replace(
        b'"tensors":{', b'"tensors":{"a":{"dtype":"F32","shape":[0],"chunks":[]},'
    ),
    "key twice in extra": lambda m: m.replace(b'"extra":{}', b'"extra":{"x":1,"x":2}'),
    "not json": lambda _: b"import os",
    "empty": lambda _: b"",
    "not text": lambda m: m.replace(b'"a"', b'"\xff"'),
    "surrogate": lambda m: m.replace(b'"a"', b'"\\ud800"'),
    "extra is a list": lambda m: m.replace(b'"extra":{}', b'"extra":[]'),
    "extra is long": lambda m: m.replace(
        b'"extra":{}', b'"extra":{"x":[' + b"[]," * 2_000_000 + b"0]}"
    ),
    "long number": lambda m: m.replace(b'"extra":{}', b'"extra":{"x":' + b"9" * 5000 + b"}"),
    "nan": lambda m: m.replace(b'"extra":{}', b'"extra":{"x":NaN}'),
    "two documents": lambda m: m + m,
    "line break at the end": lambda m: m + b"\n",
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_a_signed_manifest_that_is_no_plain_json_is_refused(name: str, path: Path) -> None:
    text = (path / "manifest.json").read_bytes()
    changed = RAW[name](text)
    assert changed != text
    sign(path, changed)
    assert "manifest.json" in refused(path)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", SHARD, ".metadata"])
@pytest.mark.parametrize("is_signed", [False, True])
def test_pickles_are_never_executed(name: str, is_signed: bool, path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    payload = pickle.dumps(Bomb(str(marker)))
    (path / name).write_bytes(payload)
    if is_signed and name == "manifest.json":
        sign(path, payload)
    if is_signed and name == SHARD:
        size = len(payload)
        edit(path, lambda m: put(m["files"][0], bytes=size))
    if name == ".metadata":  # not ours: never opened
        verify_checkpoint(path)
    else:
        refused(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", SHARD])
@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "pipe", "device"])
def test_only_regular_files_are_opened(name: str, kind: str, path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (path / name).rename(copy)
    if kind == "directory":
        (path / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        target = {"link": str(copy), "dangling": "missing", "device": "/dev/zero"}[kind]
        (path / name).symlink_to(target)
    assert f"{name} must be a regular file" in refused(path)


def test_a_link_in_place_of_a_checkpoint_is_set_aside_and_its_target_left_alone(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert "must be a directory and no symbolic link" in refused(path)
    verify_checkpoint(elsewhere)


def test_a_file_in_place_of_a_checkpoint_is_refused(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.write_text("")
    assert "must be a directory" in refused(path)


def test_a_leftover_that_is_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "kept").mkdir(parents=True)
    (path.parent / f"step-00000009.tmp-{'0' * 32}").symlink_to(victim)
    world = dist.group.WORLD
    assert world is not None
    tensors = {"a": torch.ones(4, 6), "b": torch.zeros(3)}
    assert load_latest(path.parent, tensors=tensors, group=world)
    assert (victim / "kept").exists()


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sha256", SHARD])
def test_a_file_of_a_terabyte_is_refused_by_its_size(name: str, path: Path) -> None:
    try:
        os.truncate(path / name, 1 << 40)
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    assert "bytes" in refused(path)


def test_nothing_in_the_package_can_execute_what_it_reads() -> None:
    """No module and no call that turns bytes into objects of any type or into code."""
    modules = {"cloudpickle", "ctypes", "dill", "joblib", "marshal", "pickle", "shelve", "yaml"}
    calls = {"__import__", "compile", "eval", "exec"}
    attributes = {"import_module", "load", "load_bytes", "save", "weights_only"}
    packages = [Path(p.__file__ or "").parent for p in (hp_checkpoint.runs, hp_checkpoint)]
    sources = sorted(source for package in packages for source in package.glob("*.py"))
    assert len(sources) > 12
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
                assert not {name.split(".")[0] for name in names if name} & modules, source
            elif isinstance(node, ast.Name):
                assert node.id not in calls, source
            elif isinstance(node, ast.Attribute):
                assert node.attr not in attributes, f"{source}:{node.lineno}"
