"""Folders of strangers, in which nothing is followed or waited for; files whole or not there."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_base import DamageError, Folder, RunDirectoryError, read_named, replace_file, replacing
from hp_base.folder import open_directory, open_file, opened_directory, read_into, read_whole


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


TRAPS: dict[str, Callable[[Path], object]] = {
    "link": link,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path: Path, trap: str) -> None:
    TRAPS[trap](tmp_path / "log")
    with Folder.open(tmp_path) as folder:
        for use in (folder.open_file, folder.require_file, folder.fresh):
            with pytest.raises(RunDirectoryError, match="must be a regular file"):
                use("log")
        with pytest.raises(RunDirectoryError):
            folder.read("log", limit=10)
        with pytest.raises(RunDirectoryError):
            folder.replace("log", b"x")
    assert Path("/etc/passwd").stat().st_size > 1


def test_a_folder_stays_the_same_one_whatever_happens_to_its_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Folder.open(tmp_path / "run") as folder:
        assert folder.is_here
        (tmp_path / "run").rename(tmp_path / "moved")
        assert not folder.is_here
        folder.replace("metrics", b"1")
    assert (tmp_path / "moved" / "metrics").read_bytes() == b"1"


def test_a_file_is_replaced_whole_and_a_hard_link_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")
    os.link(path, tmp_path / "theirs")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert (tmp_path / "theirs").read_bytes() == b"old"


def test_a_writer_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    replace_file(tmp_path / "state", b"old")

    def fail() -> None:
        with opened_directory(tmp_path) as directory, replacing(directory, "state") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"old"


def test_files_are_read_up_to_a_limit_and_from_any_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with opened_directory(tmp_path) as directory:
        assert read_whole(directory, "a", limit=10) == b"0123456789"
        with pytest.raises(DamageError, match=r"a \(10 bytes\) must not exceed 9 bytes"):
            read_whole(directory, "a", limit=9)
        with pytest.raises(DamageError, match="b is missing"):
            open_file(directory, "b")
        descriptor = open_file(directory, "a")
        buffer = bytearray(4)
        assert read_into(descriptor, memoryview(buffer), 3) == 4
        assert buffer == b"3456"
        assert read_into(descriptor, memoryview(buffer), 8) == 2
        os.close(descriptor)


def test_a_folder_that_a_name_leads_to_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to("here")
    with opened_directory(tmp_path) as parent:
        os.close(open_directory("here", parent))
        for name, why in {"there": "no symbolic link", "nowhere": "is missing"}.items():
            with pytest.raises(DamageError, match=why):
                open_directory(name, parent)


def test_words_of_other_systems_for_a_link_and_a_socket_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(number: int) -> Callable[..., int]:
        def fail(*_: object, **__: object) -> int:
            raise OSError(number, os.strerror(number))

        return fail

    monkeypatch.setattr(os, "open", refusing(errno.ELOOP))
    with pytest.raises(DamageError, match="no symbolic link"):
        open_directory(tmp_path)
    monkeypatch.setattr(os, "open", refusing(errno.EOPNOTSUPP))
    with pytest.raises(DamageError, match="must be a regular file"):
        open_file(0, "socket")
    monkeypatch.setattr(os, "open", refusing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        open_directory(tmp_path)


def test_what_a_person_names_may_be_a_link_but_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "b").symlink_to("a")
    os.mkfifo(tmp_path / "c")
    assert read_named(tmp_path / "b") == b"text"
    with pytest.raises(ValueError, match="no regular file"):
        read_named(tmp_path / "c")
