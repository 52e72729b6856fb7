"""Every number that an option of `hp` takes is checked where it is read, and answered in a line."""

import pytest

from hp_train.cli import main

WHOLE = {
    "verify --steps": 1,
    "verify --generate": 1,
    "verify --seed": 0,
    "plan --gpus": 1,
    "plan --top": 1,
    "plan --vocab-size": 1,
    "plan --node-size": 1,
    "plan --cores": 0,
    "import-dcp a b --step": 0,
    "export-dcp a b --step": 0,
    "export-hf a b --step": 0,
}
"""Options, and the least that each of them takes."""
REAL = (
    "verify --bound",
    "plan --search",
    "plan --flops",
    "plan --memory",
    "plan --memory-bandwidth",
    "plan --layer-seconds",
    "plan --bandwidth",
    "plan --latency",
    "plan --node-bandwidth",
    "plan --node-latency",
)
CASES = [
    *((option, text) for option in WHOLE for text in ("nan", "inf", "1.5", "many", "1e400", "")),
    *((option, str(least - 1)) for option, least in WHOLE.items()),
    *((option, "9" * 30) for option in WHOLE),
    *((option, text) for option in REAL for text in ("nan", "inf", "-inf", "-1", "much", "")),
    *(("verify --bound", text) for text in ("1", "1e9")),
    *(("verify --generate 2 --processes", text) for text in ("8:2", "0:2", "-1:2", "2:9999999")),
    *(("verify --generate 2 --part", text) for text in ("0/4", "5/4", "1/0", "-1/4", "1.5/4")),
]


@pytest.mark.parametrize(("option", "text"), CASES)
def test_a_wrong_number_is_refused_in_one_line(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *command, flag = option.split()
    assert main([*command, f"{flag}={text}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {flag} ({text}) must be ")
    assert captured.err.count("\n") == 1
