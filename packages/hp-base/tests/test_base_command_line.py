"""Files and numbers that flags name, refused in one line."""

import argparse
from pathlib import Path

import pytest

from hp_base.command_line import Parser, require_files, require_folder, write_named
from hp_base.errors import ConfigError, HpError
from hp_base.numbers import whole


def test_a_named_file_is_written_whole_and_what_is_no_file_is_written_through(
    tmp_path: Path,
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    write_named("--page", str(path), "new")
    assert path.read_text() == "new"
    write_named("--page", "/dev/null", "new")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(HpError, match=r"--page \(.*\) must be a file that can be written: No such"):
        write_named("--page", str(tmp_path / "none" / "x"), "new")


def test_places_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none" / "x", "No such file")):
        with pytest.raises(ConfigError, match=rf"--page \(.*\) must be a file .*: {why}"):
            require_files(argparse.Namespace(page=str(path)), "page")
    with pytest.raises(ConfigError, match=r"--out \(.*\) must be a writable folder"):
        require_folder("--out", str(tmp_path / "file"))
    require_folder("--out", str(tmp_path / "new" / "folder"))
    require_folder("--out", None)
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("text", ["nan", "inf", "1.5", "many", "", "1e400", "0", "9" * 30])
def test_a_wrong_number_is_told_with_its_flag(text: str) -> None:
    parser = Parser(prog="words")
    parser.add_argument("--steps", type=whole("--steps", least=1))
    with pytest.raises(ConfigError) as error:
        parser.parse_args([f"--steps={text}"])
    assert f"--steps ({text}) must be " in str(error.value)
    assert "\n" not in str(error.value)
