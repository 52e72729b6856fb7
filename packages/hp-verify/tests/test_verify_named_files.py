"""Files that a person names and that are something else: told in one line, at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from traps import TRAPS, within

from hp_base.errors import HpError
from hp_verify.cli import read_names
from hp_verify.files.curves import read_curve
from hp_verify.files.sources import read_listing
from hp_verify.recording import events
from hp_verify.recording.rules import read_rules

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "rules": (".toml", read_rules),
    "names": (".json", read_names),
    "manifest": (".json", read_listing),
    "curve": (".jsonl", read_curve),
    "table": (".csv", read_curve),
    "log": (".log", read_curve),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("trap", TRAPS, ids=[trap.__name__ for trap in TRAPS])
def test_what_is_no_such_file_is_told_in_a_line(
    trap: Callable[[Path], None], reader: str, tmp_path: Path
) -> None:
    suffix, read = READERS[reader]
    path = tmp_path / f"given{suffix}"
    trap(path)
    with within(20):
        if (trap.__name__, reader) == ("empty", "rules"):  # no rule is no mistake
            read(path)
            return
        with pytest.raises(HpError) as error:
            read(path)
    text = str(error.value)
    assert str(tmp_path)[:30] in text
    assert "\n" not in text
    assert len(text) < 700


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


def test_a_recording_ends_where_its_last_whole_line_does(tmp_path: Path) -> None:
    log = events.Log(tmp_path, "00000-1")
    log.add({"rank": "0", "ranks": "1"})
    log.flush()
    [path] = tmp_path.glob(f"{events.TENSORS}-*")
    whole = path.read_bytes()
    # A length that no memory has, and one that ends in the middle of a line.
    for rest in ((2**62).to_bytes(8, "little") + b"x", whole[:-3], b"\0\0\0"):
        path.write_bytes(whole + rest)
        assert list(events.read(path)) == [{"rank": "0", "ranks": "1"}]
    for content in (b"\xc1", b"\x91" * 100_000, b"\x81\xa5facts\x01", b""):
        path.write_bytes(len(content).to_bytes(8, "little") + content)
        with pytest.raises(HpError, match="must be a recording"):
            list(events.read(path))
