"""Files that a person names and that are something else: told in one line, at once."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hp_base.errors import HpError
from hp_packing.costs_file import read_costs
from hp_packing.generators import read_lengths
from hp_plan.costs.routing import parse_skew
from hp_plan.layouts.command import known_machine
from hp_train.cli import main
from hp_trainer.config.options import resolve, shipped
from hp_verify.files.commands import _names
from hp_verify.files.curves import read_curve
from hp_verify.files.manifest import read_listing
from hp_verify.recording import events
from hp_verify.recording.rules import read_rules
from integration_tests.architectures import kept
from integration_tests.architectures.cells import Architecture

CONFIG = resolve(shipped()[0], env={}).config

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": (".toml", lambda path: resolve(str(path), env={})),
    "machine": (".toml", lambda path: known_machine(str(path))),
    "rules": (".toml", read_rules),
    "lengths": (".txt", read_lengths),
    "costs": (".toml", lambda path: read_costs(path, windows=(None,))),
    "skew": (".json", lambda path: parse_skew(str(path), CONFIG.model)),
    "names": (".json", lambda path: _names(str(path))),
    "manifest": (".json", read_listing),
    "curve": (".jsonl", read_curve),
    "table": (".csv", read_curve),
    "log": (".log", read_curve),
    "result": (".json", lambda path: kept.read(path.parent, Architecture)),
}


def nothing(path: Path) -> None:
    """A link that leads nowhere."""
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    """A folder in place of a file."""
    path.mkdir()


def pipe(path: Path) -> None:
    """Whoever opens it waits for somebody who writes."""
    os.mkfifo(path)


def endless(path: Path) -> None:
    """A device without an end."""
    path.symlink_to("/dev/zero")


def empty(path: Path) -> None:
    """A file of no bytes."""
    path.touch()


def nested(path: Path) -> None:
    """Deeper than any parser goes."""
    start = "x = " if path.suffix == ".toml" else ""
    path.write_text(start + "[" * 200_000 + "\n")


def objects(path: Path) -> None:
    """Objects in objects, below a key that nobody knows."""
    start = "x = " if path.suffix == ".toml" else ""
    path.write_text(start + '{"x":' * 200_000 + "\n")


def bits(path: Path) -> None:
    """No text."""
    path.write_bytes(bytes(range(256)) * 40)


def wide(path: Path) -> None:
    """A field longer than readers of tables take, and a number of more digits than Python reads."""
    path.write_text("9" * 200_000 + ",step,loss\n" + "9" * 200_000 + ",1,2\n")


TRAPS = (nothing, folder, pipe, endless, empty, nested, objects, bits, wide)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """End a test that waits for a pipe, or reads what has no end."""

    def end(*_: object) -> None:
        raise TimeoutError("it waits, or has no end")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("trap", TRAPS, ids=[trap.__name__ for trap in TRAPS])
def test_what_is_no_such_file_is_told_in_a_line(
    trap: Callable[[Path], None], reader: str, tmp_path: Path
) -> None:
    suffix, read = READERS[reader]
    path = tmp_path / f"given{suffix}"
    trap(path)
    harmless = {("empty", "config"), ("empty", "rules"), ("empty", "machine")}
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


def test_a_rule_whose_reference_has_no_such_group_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    for name, reference in (("a(.)", r"\\2"), ("(", ""), ("a", r"\\g<x>")):
        path.write_text(f'[[parameter]]\nname = "{name}"\nreference = "{reference}"\n')
        with pytest.raises(HpError, match="--rules"):
            read_rules(path)
    path.write_text('[[parameter]]\nname = "a(.)|b"\nreference = "x.\\\\1"\n')
    found = read_rules(path).of("a7")
    assert found is not None
    assert found[0] == "x.7"


def test_a_result_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_bytes(msgspec.json.encode({"name": 3}))
    with pytest.raises(HpError, match=r"llama.json must be of an architecture"):
        kept.read(tmp_path, Architecture)


def test_a_recording_ends_where_its_last_whole_line_does(tmp_path: Path) -> None:
    log = events.Log(tmp_path, "00000-1")
    log.add({"rank": "0", "ranks": "1"})
    log.flush()
    [path] = tmp_path.glob(f"{events.TENSORS}-*")
    whole = path.read_bytes()
    # A length that no memory has, and one that ends in the middle of a line.
    for rest in ((2**62).to_bytes(8, "little") + b"x", whole[:-3], b"\0\0\0"):
        path.write_bytes(whole + rest)
        assert [line.facts for line in events.read(path)] == [{"rank": "0", "ranks": "1"}]
    for content in (b"\xc1", b"\x91" * 100_000, b"\x81\xa5facts\x01", b""):
        path.write_bytes(len(content).to_bytes(8, "little") + content)
        with pytest.raises(HpError, match="must be a recording"):
            list(events.read(path))


@pytest.mark.parametrize(
    ("command", "message"),
    [
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
    assert main(command.replace("{}", str(tmp_path)).split()) == 2
    out, err = capsys.readouterr()
    assert message.replace("{}", str(tmp_path)) in err
    assert err.count("\n") == 1
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
