"""Packs: whole, or known not to be."""

import os
import random
from pathlib import Path
from zipfile import ZIP_STORED

import pytest

from hp_base.folder import DamageError
from hp_base.packs import digest_of, new_pack, opened_pack


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "folder" / "a.pack"
    with new_pack(path) as archive:
        archive.writestr("one", b"1" * 100)
        archive.writestr("two", b"22")
    return path


def test_what_is_packed_comes_out_again_and_a_newer_pack_takes_the_place(pack: Path) -> None:
    with opened_pack(pack) as archive:
        assert archive.namelist() == ["one", "two"]
        assert archive.read("one") == b"1" * 100
        assert archive.getinfo("one").compress_type == ZIP_STORED
        with new_pack(pack) as newer:
            newer.writestr("three", b"")
        assert archive.read("two") == b"22"  # of the one that was opened
    with opened_pack(pack) as archive:
        assert archive.namelist() == ["three"]


def test_any_damage_is_found(pack: Path) -> None:
    whole, draw = pack.read_bytes(), random.Random(0)
    for place in range(len(whole)):
        flipped = whole[place] ^ (1 << draw.randrange(8))
        for damaged in (whole[:place], bytes([*whole[:place], flipped, *whole[place + 1 :]])):
            pack.write_bytes(damaged)
            with pytest.raises(DamageError, match=r"a.pack is damaged"), opened_pack(pack):
                pass


def test_a_writer_that_fails_leaves_the_old_one_and_nothing_else(pack: Path) -> None:
    before = pack.read_bytes()
    killed = pack.with_name(f"a.pack.{'0' * 32}.tmp")
    killed.write_bytes(b"half")
    with pytest.raises(ZeroDivisionError), new_pack(pack) as archive:
        archive.writestr("one", str(1 / 0))
    assert pack.read_bytes() == before
    assert list(pack.parent.iterdir()) == [pack]


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_pack(tmp_path / "none"):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"), opened_pack(tmp_path / "pipe"):
        pass
    (tmp_path / "file").write_bytes(b"x")
    assert digest_of(tmp_path / "none") == digest_of(tmp_path / "pipe") == ""
    assert len(digest_of(tmp_path / "file")) == 64
