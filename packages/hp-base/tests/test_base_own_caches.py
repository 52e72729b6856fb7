"""Folders from which code is loaded: nobody else may make or change them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_base.own_caches import (
    CACHES,
    own_caches,
    own_temporary_folder,
    why_not_kept,
    why_unsafe,
)

STRANGER = 65534


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this user that no test shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hp-train-compiled"


def of_a_stranger(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(path, STRANGER, STRANGER)


def test_every_cache_of_code_is_in_a_folder_of_this_user_alone(home: Path) -> None:
    env: dict[str, str] = {}
    own_caches(env)
    for name, folder in CACHES.items():
        assert env[name] == str(home / folder)
        assert (home / folder).stat().st_mode & 0o777 == 0o700
    assert home.stat().st_mode & 0o777 == 0o700
    assert Path(env["TORCH_FR_DUMP_TEMP_FILE"]).parent == home
    assert why_not_kept() == ""


@pytest.mark.parametrize("made", ["given away", "open to all", "a link", "below an open folder"])
def test_a_cache_that_another_user_can_change_is_not_used(made: str, home: Path) -> None:
    home.parent.mkdir()
    if made == "a link":
        (home.parent / "elsewhere").mkdir()
        home.symlink_to(home.parent / "elsewhere")
    else:
        home.mkdir(mode=0o700)
    if made == "given away":
        of_a_stranger(home)
    if made == "open to all":
        home.chmod(0o777)
    if made == "below an open folder":
        home.parent.chmod(0o777)
    env: dict[str, str] = {}
    own_caches(env)
    assert why_not_kept()
    for name in CACHES:
        assert not Path(env[name]).is_relative_to(home.parent)
        assert why_unsafe(Path(env[name])) == ""


@pytest.mark.parametrize("name", CACHES)
def test_a_folder_that_a_variable_names_is_looked_at_alike(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    env = {name: str(folder)}
    own_caches(env)  # which makes it
    assert (env[name], folder.stat().st_mode & 0o777) == (str(folder), 0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    env = {name: str(link)}
    own_caches(env)
    assert env[name] == str(folder)  # whoever changes the link changes nothing
    folder.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        own_caches({name: str(folder)})
    assert str(caught.value) == (
        f'{name} ("{folder}") must be a folder that only this user can change: '
        f"others can write to {folder} (mode 777); unset it, or name another"
    )


def test_a_folder_below_one_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "mine").mkdir(parents=True, mode=0o700)
    of_a_stranger(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=f"theirs belongs to user {STRANGER}"):
        own_caches({"TRITON_CACHE_DIR": str(tmp_path / "theirs" / "mine")})


def test_folders_below_those_of_temporary_files_and_of_a_group_of_ones_own_are_good(
    tmp_path: Path,
) -> None:
    (tmp_path / "sticky" / "group" / "mine").mkdir(parents=True, mode=0o700)
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "sticky" / "group").chmod(0o775)
    assert why_unsafe(tmp_path / "sticky" / "group" / "mine") == ""


@pytest.mark.parametrize("taken", [False, True])
def test_temporary_files_of_known_names_are_in_a_folder_of_this_user(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    usual = shared / f"hp-train-{os.geteuid()}"
    if taken:
        usual.mkdir()
        of_a_stranger(usual)
        monkeypatch.setattr("hp_base.own_caches._OTHERS", ())
    env: dict[str, str] = {}
    own_temporary_folder(env)
    found = Path(env["TMPDIR"])
    assert found.parent == shared
    assert (found == usual) is not taken
    assert why_unsafe(found) == ""
    assert tempfile.gettempdir() == str(found)
    own_temporary_folder(env)  # a command that another one starts has the same
    assert env["TMPDIR"] == str(found)


def test_a_socket_of_multiprocessing_has_a_place_where_paths_are_long(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 200)
    long.mkdir()
    program = (
        "from multiprocessing.connection import Listener; "
        "from hp_base.own_caches import short_temporary_folder; "
        "short_temporary_folder(); Listener(family='AF_UNIX').close()"
    )
    env = os.environ | {"TMPDIR": str(long)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    assert list(long.iterdir()) == []


def test_a_user_without_a_home_has_a_folder_for_as_long_as_the_process(tmp_path: Path) -> None:
    program = (
        "import os; from hp_base.own_caches import own_caches; "
        "own_caches(os.environ); print(os.environ['TRITON_CACHE_DIR'])"
    )
    env = os.environ | {"HOME": "/dev/null", "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout).is_relative_to(tmp_path)
    assert list(tmp_path.iterdir()) == []
