"""Files that a person names and that are something else: told in one line, at once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from traps import TRAPS, within

from hp_base.command_line import run_command
from hp_base.errors import HpError
from hp_packing.costs import read_costs
from hp_packing.generators import read_lengths
from hp_plan.costs.routing import parse_skew
from hp_plan.layouts.command import known_machine
from hp_train.cli import main
from hp_trainer.config.options import resolve, shipped
from integration_tests.jobs.demo.command import run as demo
from integration_tests.models.architectures import kept
from integration_tests.models.architectures.cells import Architecture

CONFIG = resolve(shipped()[0], env={}).config

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": (".toml", lambda path: resolve(str(path), env={})),
    "machine": (".toml", lambda path: known_machine(str(path))),
    "lengths": (".txt", read_lengths),
    "costs": (".toml", lambda path: read_costs(path, windows=(None,))),
    "skew": (".json", lambda path: parse_skew(str(path), CONFIG.model)),
    "result": (".json", lambda path: kept.read(path.parent, Architecture)),
}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """End a test that waits for a pipe, or reads what has no end."""

    with within(20):
        yield


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("trap", TRAPS, ids=[trap.__name__ for trap in TRAPS])
def test_what_is_no_such_file_is_told_in_a_line(
    trap: Callable[[Path], None], reader: str, tmp_path: Path
) -> None:
    suffix, read = READERS[reader]
    path = tmp_path / f"given{suffix}"
    trap(path)
    harmless = {("empty", "config"), ("empty", "machine")}
    if (trap.__name__, reader) in harmless:  # it says nothing else than what holds anyway
        read(path)
        return
    with pytest.raises(HpError) as error:
        read(path)
    text = str(error.value)
    assert str(tmp_path)[:30] in text
    assert "\n" not in text
    assert len(text) < 700


def test_a_machine_has_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    wrong = {
        "flops = inf": "flops (inf) must be a finite number",
        "node_size = 2.5": "node_size (2.5) must be a whole number",
        "compiled = 2": "compiled (2) must be a share, at most 1",
        "like = []": "TypeError",
        'flops = "1e15"': "TypeError",
        "cake = 1": "cake",
    }
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(HpError) as error:
            known_machine(str(path))
        assert message in str(error.value)
    path.write_text('like = "h200"\nnode_size = 4\n')
    assert known_machine(str(path)).node_size == 4


def test_a_result_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_bytes(msgspec.json.encode({"name": 3}))
    with pytest.raises(HpError, match=r"llama.json must be of an architecture"):
        kept.read(tmp_path, Architecture)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("demo --output {}/none/x", "--output ({}/none/x) must be a file that can be written"),
        ("demo --table {}", "--table ({}) must be a file that can be written"),
        ("demo --results {}/file", "--results ({}/file) must be a writable folder"),
        ("dry-run --html {}/none/x", "--html ({}/none/x) must be a file that can be written"),
        ("dry-run --svg {}", "--svg ({}) must be a file that can be written: Is a directory"),
        ("dry-run --traces {}/file/x", "--traces ({}/file/x) must be a writable folder"),
        ("dry-run --documents 129", "--documents (129) must be at most data.seq_len (128)"),
        ("step-plan --plan {}", "--plan ({}) must be a file that can be written: Is a directory"),
        ("step-plan --svg {}/none/x", "--svg ({}/none/x) must be a file that can be written"),
    ],
)
def test_what_cannot_be_written_in_the_end_is_refused_at_the_start(
    command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    program, *arguments = command.replace("{}", str(tmp_path)).split()
    ends = run_command(demo, arguments) if program == "demo" else main([program, *arguments])
    assert ends == 2
    out, err = capsys.readouterr()
    assert message.replace("{}", str(tmp_path)) in err
    assert err.count("\n") == 1
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
