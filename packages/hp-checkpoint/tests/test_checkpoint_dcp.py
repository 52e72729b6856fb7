"""Checkpoints of plain torch.distributed.checkpoint: read, damaged, hostile."""

import ast
import contextlib
import io
import os
import pickle
import random
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_states import blank, same, state
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hp_checkpoint.dcp
from hp_base.folder import DamageError
from hp_checkpoint.dcp.metadata import read_metadata
from hp_checkpoint.dcp.tensors import read_box
from hp_platform.testing import run_distributed


def rank_writes(folder: Path) -> None:
    """Write the tensors as torch itself does, on two ranks."""
    tensors = state()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors["model.w"] = distribute_tensor(tensors["model.w"], mesh, [Shard(0)])
    save({**tensors, "lr": 0.1, "schedule": {"kind": "cosine"}}, checkpoint_id=folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "of_torch"
    run_distributed(rank_writes, folder, world_size=2)
    return folder


@pytest.fixture
def plain(made: Path, tmp_path: Path) -> Path:
    """A copy of torch's checkpoint to damage."""
    return Path(shutil.copytree(made, tmp_path / "plain"))


def test_every_tensor_is_read_as_torch_wrote_it(plain: Path) -> None:
    stored = read_metadata(plain)
    found = blank(state())
    for name, tensor in stored.tensors.items():
        for box, place in tensor.boxes.items():
            part = read_box(plain, place, dtype=tensor.dtype, sizes=box[1])
            index = tuple(slice(b, b + n) for b, n in zip(*box, strict=True))
            found[name][index] = part
    assert same(found, state())
    assert {"lr", "schedule.kind"} <= {*stored.left_out}


def everything(folder: Path) -> None:
    """Read all that a folder has."""
    for tensor in read_metadata(folder).tensors.values():
        for box, place in tensor.boxes.items():
            read_box(folder, place, dtype=tensor.dtype, sizes=box[1])


def test_what_torch_itself_does_not_notice_is_found_by_the_checksums(plain: Path) -> None:
    """Every byte of the values of a tensor, one bit at a time; torch's own loader takes them."""
    stored = read_metadata(plain)
    everything(plain)
    tensor = stored.tensors["model.w"]
    (_, sizes), place = next(iter(tensor.boxes.items()))
    file = plain / place.file
    original = file.read_bytes()
    values = state()["model.w"][: sizes[0]].numpy().tobytes()
    at = original.index(values)
    for number, byte in enumerate(range(at, at + len(values), 3)):
        changed = bytearray(original)
        changed[byte] ^= 1 << number % 8
        file.write_bytes(changed)
        with pytest.raises(DamageError, match="Bad CRC-32"):
            read_box(plain, place, dtype=tensor.dtype, sizes=sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = blank({"model.w": state()["model.w"]})
        load(taken, checkpoint_id=plain, no_dist=True)
    assert not torch.equal(taken["model.w"], state()["model.w"])


class Bomb:
    """Runs a command when unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.sign}",)


def described(**changes: Any) -> Metadata:
    """Metadata of one tensor in one box, with something else in places."""
    values: dict[str, Any] = {
        "name": "model.w",
        "size": torch.Size((2, 3)),
        "offsets": torch.Size((0, 0)),
        "sizes": torch.Size((2, 3)),
        "dtype": torch.float32,
        "file": "__0_0.distcp",
        "offset": 0,
        "length": 4096,
        "chunks": None,
        "transforms": None,
    } | changes
    chunk = ChunkStorageMetadata(values["offsets"], values["sizes"])
    info = _StorageInfo(values["file"], values["offset"], values["length"], values["transforms"])
    index = MetadataIndex(values["name"], [0, 0], 0)
    storage = {index: info}
    object.__setattr__(index, "offset", values["offsets"])
    if "index" in values:
        object.__setattr__(index, "fqn", values["index"])
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=values["dtype"]), values["size"], values["chunks"] or [chunk]
    )
    return Metadata({values["name"]: tensor}, None, storage)


def laughs() -> tuple[object, ...]:
    """2^60 strings, by sixty references."""
    value: tuple[object, ...] = ("ha",)
    for _ in range(60):
        value = (value, value)
    return value


LIES: dict[str, dict[str, Any]] = {
    "a file above": {"file": "../secret.distcp"},
    "an absolute file": {"file": "/etc/passwd"},
    "a file of a folder": {"file": "a/b.distcp"},
    "no file's name": {"file": laughs()},
    "a name of another tensor": {"index": laughs()},
    "a name of a control character": {"name": "model.\x1b[2J"},
    "an absurd shape": {"size": (2**60, 3), "sizes": (2**60, 3)},
    "a shape of 2^80 elements": {"size": (2**40, 2**40), "sizes": (2**40, 2**40)},
    "many dimensions": {"size": (1,) * 10_000, "sizes": (1,) * 10_000, "offsets": (0,) * 10_000},
    "a negative size": {"size": (-2, -3), "sizes": (-2, -3)},
    "a size that is no number": {"size": ("2", 3)},
    "a size of a float": {"size": (2.0, 3)},
    "a box outside": {"offsets": torch.Size((1, 0))},
    "a hole": {"size": torch.Size((4, 3))},
    "boxes that overlap": {
        "size": torch.Size((4, 3)),
        "chunks": [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))] * 2,
    },
    "more bytes than stored": {"length": 8},
    "bytes past the end": {"offset": 2**50},
    "a negative offset": {"offset": -4096},
    "an unknown dtype": {"dtype": torch.complex64},
    "a transform": {"transforms": ["zstd"]},
}


def refused(folder: Path, sign: Path) -> str:
    before = high_water_mark()
    with pytest.raises(DamageError) as caught:
        everything(folder)
    assert not sign.exists()
    assert high_water_mark() - before < 100 << 20
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def high_water_mark() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lie_are_refused(lie: str, plain: Path, tmp_path: Path) -> None:
    (plain / ".metadata").write_bytes(pickle.dumps(described(**LIES[lie])))
    refused(plain, tmp_path / "sign")


def torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_are_never_executed(protocol: int, plain: Path, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    for where in (Bomb(sign), {"state_dict_metadata": Bomb(sign)}, [Bomb(sign)]):
        (plain / ".metadata").write_bytes(pickle.dumps(where, protocol))
        refused(plain, sign)
    bombed = described()
    bombed.planner_data = Bomb(sign)
    (plain / ".metadata").write_bytes(pickle.dumps(bombed, protocol))
    refused(plain, sign)


def test_values_that_are_programs_are_not_run(plain: Path, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    for value in (Bomb(sign), [torch.ones(2, 3), Bomb(sign)], {"w": torch.ones(2, 3)}, 3):
        data = torch_file(value)
        (plain / "__0_0.distcp").write_bytes(data)
        (plain / ".metadata").write_bytes(pickle.dumps(described(length=len(data))))
        refused(plain, sign)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64), torch.ones(6)],
    ids=["shape", "dtype", "dims"],
)
def test_another_tensor_than_was_said_is_refused(
    tensor: Tensor, plain: Path, tmp_path: Path
) -> None:
    data = torch_file(tensor)
    (plain / "__0_0.distcp").write_bytes(data)
    (plain / ".metadata").write_bytes(pickle.dumps(described(length=len(data))))
    assert "must equal" in refused(plain, tmp_path / "sign")


def mutated(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(changed))
        how = generator.randrange(4)
        if how == 0:
            changed[at] = generator.randrange(256)
        elif how == 1:
            del changed[at : at + generator.randint(1, 40)]
        elif how == 2:
            changed[at:at] = generator.randbytes(generator.randint(1, 9))
        else:
            changed[at : at + 8] = struct.pack("<Q", generator.randrange(2**64))
    return bytes(changed)


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    generator = random.Random(11)
    for _ in range(count):
        yield mutated(data, generator)


def test_mutated_files_are_read_right_or_refused(plain: Path) -> None:
    """No other exception, whatever the bytes are."""
    metadata = (plain / ".metadata").read_bytes()
    for data in mutations(metadata, 300):
        (plain / ".metadata").write_bytes(data)
        with contextlib.suppress(DamageError):
            read_metadata(plain)
    (plain / ".metadata").write_bytes(metadata)
    stored = read_metadata(plain).tensors["model.w"]
    (_, sizes), place = next(iter(stored.boxes.items()))
    file = plain / place.file
    whole = file.read_bytes()
    right = read_box(plain, place, dtype=stored.dtype, sizes=sizes)
    for data in mutations(whole[place.offset : place.offset + place.length], 300):
        file.write_bytes(whole[: place.offset] + data.ljust(place.length, b"\0"))
        with contextlib.suppress(DamageError):
            found = read_box(plain, place, dtype=stored.dtype, sizes=sizes)
            assert torch.equal(found, right)


def test_nothing_here_can_execute_what_it_reads() -> None:
    forbidden = {"pickle", "importlib", "ctypes", "marshal", "torch.serialization"}
    calls = {"__import__", "compile", "eval", "exec", "getattr"}
    for source in Path(hp_checkpoint.dcp.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
                assert not names & forbidden, source
            elif isinstance(node, ast.Name):
                assert node.id not in calls, source
            elif isinstance(node, ast.Attribute):
                assert node.attr not in {"load", "import_module", "weights_only"}, source
