import hashlib
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hp_base.errors import CheckpointError
from hp_checkpoint.runs import Loaded, load_latest, save_checkpoint, verify_checkpoint
from hp_platform.testing import run_distributed

FILES = ["manifest.json", "manifest.sha256", "rank-00000.safetensors", "rank-00001.safetensors"]


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def state(step: int) -> dict[str, Tensor]:
    return {
        "experts.w": torch.arange(2048, dtype=torch.float32).reshape(64, 32) + step,
        "norm": torch.full((700,), 0.5 + step, dtype=torch.bfloat16),
        "frozen": torch.linspace(1, 2, 600, dtype=torch.float64),
        "count": torch.tensor(step),
    }


def rank_saves(path: Path, steps: list[int]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for step in steps:
        tensors = state(step)
        tensors["experts.w"] = distribute_tensor(tensors["experts.w"], mesh, [Shard(0)])
        extra = {"position": step}
        save_checkpoint(path, step=step, tensors=tensors, extra=extra, group=world(), keep=9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by two ranks."""
    path = tmp_path_factory.mktemp("saved")
    run_distributed(rank_saves, path, [1, 2], world_size=2)
    assert names_in(path / "step-00000002") == FILES
    return path


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of them to damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def damage_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def load_after_damage(run: Path) -> Loaded:
    """Load into zeros; the values are those of the step that was taken, none else."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    loaded = load_latest(run, tensors=tensors, group=world())
    assert loaded is not None
    expected = state(loaded.step)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert loaded.extra == {"position": loaded.step}
    return loaded


def test_an_untouched_checkpoint_passes(saved: Path) -> None:
    verify_checkpoint(saved / "step-00000001")
    verify_checkpoint(saved / "step-00000002")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["empty", "half", "one byte less", "one byte more", "deleted"])
@pytest.mark.usefixtures("group")
def test_a_file_of_another_size_is_found_and_the_one_before_is_taken(
    name: str, how: str, run: Path
) -> None:
    file = run / "step-00000002" / name
    size = file.stat().st_size
    if how == "deleted":
        file.unlink()
    elif how == "one byte more":
        file.write_bytes(file.read_bytes() + b"\0")
    else:
        os.truncate(file, {"empty": 0, "half": size // 2, "one byte less": size - 1}[how])
    reason = damage_of(run / "step-00000002")
    assert name in reason or "manifest" in reason
    loaded = load_after_damage(run)
    assert loaded.step == 1
    assert loaded.skipped == [(run / "step-00000002.bad", reason)]
    assert names_in(run) == ["step-00000001", "step-00000002.bad"]


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0] ^ (1 << bit % 8)
        stream.seek(bit // 8)
        stream.write(bytes([byte]))


@pytest.mark.parametrize("name", FILES)
def test_every_single_bit_flip_is_found(name: str, run: Path) -> None:
    file = run / "step-00000002" / name
    bits = 8 * file.stat().st_size
    chosen = random.Random(0).sample(range(bits), min(bits, 250))
    for bit in [0, bits - 1, *chosen]:
        flip(file, bit)
        damage_of(run / "step-00000002")
        flip(file, bit)
    verify_checkpoint(run / "step-00000002")


def test_every_bit_of_a_header_and_its_padding_is_covered(run: Path) -> None:
    file = run / "step-00000002" / FILES[2]
    header = int.from_bytes(file.read_bytes()[:8], "little")
    for byte in range(8 + header):
        flip(file, 8 * byte + byte % 8)
        assert "the header is damaged" in damage_of(run / "step-00000002")
        flip(file, 8 * byte + byte % 8)


def test_a_block_of_zeros_is_found_and_file_and_tensor_are_named(run: Path) -> None:
    file = run / "step-00000002" / FILES[2]
    data = bytearray(file.read_bytes())
    at = data.rfind(torch.tensor([300.0]).numpy().tobytes())
    assert at > 0
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    file.write_bytes(data)
    reason = damage_of(run / "step-00000002")
    expected = r"rank-00000.safetensors: tensor experts.w@0,0 is damaged \(its SHA-256 differs\)"
    assert re.fullmatch(expected, reason)


@pytest.mark.parametrize("name", FILES)
def test_a_file_from_another_step_is_found(name: str, run: Path) -> None:
    shutil.copy(run / "step-00000001" / name, run / "step-00000002" / name)
    assert damage_of(run / "step-00000002")


def test_a_whole_checkpoint_under_the_name_of_another_step_is_found(run: Path) -> None:
    shutil.rmtree(run / "step-00000002")
    (run / "step-00000001").rename(run / "step-00000002")
    assert "step (1) must equal that of the name (2)" in damage_of(run / "step-00000002")


def test_a_file_from_another_save_of_the_same_values_is_found(tmp_path: Path) -> None:
    """Equal sizes and equal tensors; only the identity of the save differs."""
    for name in ("one", "other"):
        run_distributed(rank_saves, tmp_path / name, [1], world_size=2)
    shutil.copy(
        tmp_path / "one/step-00000001" / FILES[3], tmp_path / "other/step-00000001" / FILES[3]
    )
    reason = damage_of(tmp_path / "other/step-00000001")
    assert reason == "rank-00001.safetensors: the header is damaged or of another save"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"position":2', b'"position":3'),
        (b'"position":2', b'"position": 2'),
        (b'"world_size":2', b'"world_size":4'),
        (b'{"format"', b' {"format"'),
        (b'"BF16"', b'"F16"'),
    ],
)
def test_an_edited_manifest_is_found_even_where_json_means_the_same(
    before: bytes, after: bytes, run: Path
) -> None:
    file = run / "step-00000002" / "manifest.json"
    text = file.read_bytes()
    assert before in text
    file.write_bytes(text.replace(before, after, 1))
    assert damage_of(run / "step-00000002") == "manifest.json does not match manifest.sha256"


def test_a_manifest_edited_together_with_its_hash_must_still_agree_with_the_files(
    run: Path,
) -> None:
    path = run / "step-00000002"
    text = (path / "manifest.json").read_bytes()
    for before, after in [
        (rb'"begin":\d+', b'"begin":1'),
        (rb'"F64"', b'"I64"'),
        (rb'"bytes":\d+', b'"bytes":5000'),
        (rb'"step":2', b'"step":3'),
        (rb'"save_id":"[0-9a-f]{4}', b'"save_id":"abcd'),
        (rb'"sha256":"[0-9a-f]{4}', b'"sha256":"abcd'),
        (rb'"norm"', b'"form"'),
    ]:
        edited = re.sub(before, after, text, count=1)
        assert edited != text
        digest = f"{hashlib.sha256(edited).hexdigest()}  manifest.json\n"
        (path / "manifest.json").write_bytes(edited)
        (path / "manifest.sha256").write_text(digest)
        assert damage_of(path)


@pytest.mark.usefixtures("group")
def test_damaged_ones_are_set_aside_under_free_names(run: Path) -> None:
    (run / "step-00000002.bad").mkdir()
    (run / "step-00000002" / FILES[2]).unlink()
    loaded = load_after_damage(run)
    assert loaded.skipped == [(run / "step-00000002.bad-1", f"{FILES[2]} is missing")]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([1, 2], r"step-00000002.bad: rank-00000.* is missing; .*001"),
        ([2], r"step-00000002.bad: rank-00000.* is missing$"),
    ],
    ids=["two", "the only one"],
)
def test_if_every_checkpoint_is_damaged_nothing_is_touched_and_the_next_start_says_so(
    run: Path, steps: list[int], said: str
) -> None:
    for step in (1, 2):
        if step in steps:
            (run / f"step-0000000{step}" / FILES[2]).unlink()
        else:
            shutil.rmtree(run / f"step-0000000{step}")
    tensors = state(7)
    with pytest.raises(CheckpointError, match=said):
        load_latest(run, tensors=tensors, group=world())
    with pytest.raises(CheckpointError, match=r"damaged checkpoints only .* remove them to start"):
        load_latest(run, tensors=tensors, group=world())
    assert all(torch.equal(tensors[name], x) for name, x in state(7).items())


@pytest.mark.usefixtures("group")
def test_the_newest_is_taken_even_if_an_older_one_is_damaged(run: Path) -> None:
    (run / "step-00000001" / FILES[2]).unlink()
    loaded = load_after_damage(run)
    assert (loaded.step, loaded.skipped) == (2, [])


def rank_loads(run: Path) -> list[str]:
    return [f"{path.name}: {reason}" for path, reason in load_after_damage(run).skipped]


def test_all_ranks_fall_back_to_the_same_checkpoint(run: Path) -> None:
    flip(run / "step-00000002" / FILES[3], 8 * 3000)
    one, other = run_distributed(rank_loads, run, world_size=2)
    assert one == other
    assert len(one) == 1
    assert "step-00000002.bad: rank-00001.safetensors: tensor " in one[0]


def rank_one_sees_nothing(run: Path) -> str:
    """The second rank looks into a directory of its own, as without shared storage."""
    if world().rank() == 1:
        real, moved = str(run), str(run) + "-elsewhere"
        original = os.open

        def blind(path: str | Path, *args: int, **kwargs: int) -> int:
            return original(str(path).replace(real, moved), *args, **kwargs)

        os.open = blind  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        load_after_damage(run)
    return str(caught.value)


def test_a_rank_that_cannot_see_the_storage_does_not_condemn_good_checkpoints(run: Path) -> None:
    one, other = run_distributed(rank_one_sees_nothing, run, world_size=2)
    assert one == other
    assert "rank 1" in one
    assert "must be on storage that all ranks share" in one
    assert names_in(run) == ["step-00000001", "step-00000002"]
