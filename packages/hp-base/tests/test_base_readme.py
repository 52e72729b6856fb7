"""The example of the README runs, in an interpreter that has nothing but this package."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_the_readme_reads_a_file_and_follows_no_link(tmp_path: Path) -> None:
    [example] = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    program = tmp_path / "example.py"
    program.write_text(example)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"TMPDIR": str(tmp_path)},
    )
    content, refusal = done.stdout.splitlines()
    assert content == "b'{}'"
    assert refusal.endswith("log must be a regular file")


COMMAND = """
import sys
from pathlib import Path
from hp_base import ConfigError, Folder, Parser, replace_file, run_command, say

def count(argv):
    parser = Parser(prog="count")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} must be a folder")
    with Folder.open(options.folder) as folder:
        words = len(folder.read("text", limit=100).split())
    replace_file(options.folder / "words", str(words).encode())
    say(f"{words} words")
    return 0

sys.exit(run_command(count))
"""


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = folder / "count.py"
    program.write_text(COMMAND)
    command = [sys.executable, "-I", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_of_a_stranger_ends_in_one_line_whatever_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three")
    done = run(tmp_path, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 words\n", "")
    assert (tmp_path / "words").read_text() == "3"
    for arguments, status in (
        ((str(tmp_path / "nowhere"),), 2),
        ((), 2),
        ((str(tmp_path), "--fast"), 2),
    ):
        done = run(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    (tmp_path / "text").unlink()
    (tmp_path / "text").symlink_to("/etc/passwd")
    done = run(tmp_path, str(tmp_path))
    assert (done.returncode, done.stdout) == (9, "")
    assert "must be a regular file" in done.stderr
