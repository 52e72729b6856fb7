"""The command."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_schedule import (
    add_fsdp_reduce_grad,
    add_send_recv,
    from_json,
    interleaved_1f1b,
    load,
    one_f_one_b,
    to_csv,
    to_json,
)
from hp_schedule.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.json"
    arguments = ["generate", "1f1b", "--ranks", "2", "--microbatches", "3", "--communication"]
    assert main([*arguments, "--json", "-o", str(path)]) == 0
    return path


def test_generate_prints_a_timetable(capsys: Capture) -> None:
    assert main(["generate", "1f1b", "--ranks", "2", "--microbatches", "1"]) == 0
    assert capsys.readouterr().out == "rank 0 | F0 .  .  .  B0 -\nrank 1 | .  F0 B0 -\n"


def test_generate_prints_the_public_format(capsys: Capture) -> None:
    arguments = ["--ranks", "2", "--microbatches", "3", "--stages-per-rank", "3", "--json"]
    assert main(["generate", "interleaved_1f1b", *arguments]) == 0
    expected = interleaved_1f1b(2, num_microbatches=3, num_stages_per_rank=3)
    assert from_json(capsys.readouterr().out) == expected


def test_generate_prints_csv(capsys: Capture) -> None:
    assert main(["generate", "1f1b", "--ranks", "2", "--microbatches", "3", "--csv"]) == 0
    assert capsys.readouterr().out == to_csv(one_f_one_b(2, num_microbatches=3))


def test_check_accepts_a_sound_schedule(good: Path, capsys: Capture) -> None:
    assert main(["check", str(good)]) == 0
    assert capsys.readouterr().out == (
        "valid (with messages): 2 ranks, 2 stages, 3 microbatches, 24 steps\n"
    )


def test_check_reports_what_is_wrong_with_status_1(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0B0,0F0\n")
    assert main(["check", str(path)]) == 1
    assert "order: rank 0, cell 0: 0B0 stands before 0F0" in capsys.readouterr().out
    assert main(["check", str(path), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == "order"
    assert (finding["rank"], finding["cell"]) == (0, 0)


def test_check_can_demand_messages(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "compute.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert main(["check", str(path), "--partial"]) == 0
    assert main(["check", str(path), "--communication"]) == 1
    assert "0SEND_F0 is missing" in capsys.readouterr().out


_UNSHARDED = "0UNSHARD,0F0,0B0,{}0RESHARD\n"


@pytest.mark.parametrize(
    ("text", "lacking", "said"),
    [
        ("0F0,0B0\n1F0,1B0\n", ["communication"], "compute steps only: sends and receives"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0\n", ["backward"], "forward only: backwards are missing"),
        ("0F0\n1F0\n", ["backward", "communication"], "forward only"),
        (_UNSHARDED.format(""), ["reduce_grad"], "gradients of sharded stages are never reduced"),
    ],
)
def test_check_says_what_a_file_lacks_with_status_3(
    text: str, lacking: list[str], said: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "part.csv"
    path.write_text(text)
    assert main(["check", str(path)]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith("no mistake, but not runnable as it stands: ")
    assert said in shown
    assert main(["check", str(path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["runnable"]) == (True, False)
    assert found["lacking"] == lacking
    assert main(["check", str(path), "--partial"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("text", "flags", "status", "said"),
    [
        ("0F0,0SEND_F0\n1RECV_F0,1F0\n", "--forward-only", 0, "valid (forward only, with mess"),
        ("0F0,0B0\n", "--forward-only", 1, "belongs to a backward of a schedule that must have"),
        ("0F0\n1F0\n", "--forward-only", 3, "compute steps only"),
        ("0F0,0B0\n", "", 0, "valid (one rank needs no messages)"),
        ("0F0,0B0\n", "--sharded", 1, "stage 0 is sharded and never unsharded"),
        (_UNSHARDED.format(""), "--sharded", 1, "stage 0 never reduces its gradients"),
        (_UNSHARDED.format("0REDUCE_GRAD,"), "--sharded", 0, "valid"),
        ("0B0,0F0\n", "--partial", 1, "order: "),
    ],
)
def test_flags_say_what_a_file_is_for(
    text: str, flags: str, status: int, said: str, capsys: Capture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["check", "-", *flags.split()]) == status
    assert said in capsys.readouterr().out


def test_a_generator_goes_by_the_name_of_its_function_too(capsys: Capture) -> None:
    arguments = ["--ranks", "2", "--microbatches", "3", "--csv"]
    assert main(["generate", "1f1b", *arguments]) == 0
    short = capsys.readouterr().out
    assert main(["generate", "one_f_one_b", *arguments]) == 0
    assert capsys.readouterr().out == short


def test_simulate_prints_numbers_and_writes_pictures(
    good: Path, tmp_path: Path, capsys: Capture
) -> None:
    svg, trace = tmp_path / "a.svg", tmp_path / "a.trace"
    arguments = ["simulate", str(good), "--latency", "0.5", "--svg", str(svg)]
    assert main([*arguments, "--trace", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan"] == 14
    assert found["peak_activations"] == [2, 1]
    assert svg.read_text().startswith("<svg")
    assert "14 units, bubble" in svg.read_text()
    assert "traceEvents" in json.loads(trace.read_text())
    assert main(["simulate", str(good)]) == 0
    assert "makespan 12" in capsys.readouterr().out


def test_simulate_counts_in_shares_of_a_rank(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "four.csv"
    schedule = interleaved_1f1b(8, num_microbatches=16, num_stages_per_rank=4)
    path.write_text(to_csv(add_send_recv(schedule), as_is=True))
    assert main(["simulate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == pytest.approx(53.25)


def test_simulate_takes_the_machine_from_its_options(good: Path, capsys: Capture) -> None:
    def found(*options: str) -> dict[str, Any]:
        assert main(["simulate", str(good), "--latency", "0.5", "--json", *options]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    free = found()
    assert sum(free["exposed_communication"]) > 0
    assert found("--message", "2", "--bandwidth", "4")["makespan"] > free["makespan"]
    assert found("--blocking")["makespan"] > free["makespan"]
    assert found("--channels", "rank")["makespan"] >= free["makespan"]
    assert found("--cores", "1")["makespan"] > free["makespan"]


def test_check_knows_machines_memory_and_gathered_stages(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0UNSHARD,1UNSHARD,0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1,0RESHARD,1RESHARD\n")
    for options in ("--memory 2", "--max-active-stages 2", "--channels edge"):
        assert main(["check", str(path), "--partial", *options.split()]) == 0
    for options, found in (("--memory 1.5", "memory"), ("--max-active-stages 1", "fsdp")):
        assert main(["check", str(path), *options.split()]) == 1
        assert f"{found}: rank 0, cell" in capsys.readouterr().out


def test_a_reader_that_stops_early_is_no_error(good: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hp_schedule.cli", "show", str(good), "--json"]
    with os.fdopen(write, "wb") as pipe:
        found = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=True, timeout=30)
    assert found.stderr == b""


def test_convert_goes_back_and_forth(good: Path, tmp_path: Path, capsys: Capture) -> None:
    csv = tmp_path / "a.csv"
    assert main(["convert", str(good), str(csv), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "csv"
    assert main(["convert", str(csv), "--to", "json"]) == 0
    assert from_json(capsys.readouterr().out).steps == add_fsdp_reduce_grad(load(good)).steps


def test_show_draws_time_or_cells(good: Path, capsys: Capture) -> None:
    assert main(["show", str(good)]) == 0
    assert capsys.readouterr().out.startswith("rank 0 | F0 F1")
    assert main(["show", str(good), "--cells"]) == 0
    assert "0SEND_F0" in capsys.readouterr().out
    assert main(["show", str(good), "--json"]) == 0
    assert from_json(capsys.readouterr().out) == load(good)


def test_a_dash_reads_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("0F0,0B0\n"))
    assert main(["check", "-"]) == 0
    assert "1 ranks, 1 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "/nowhere/at/all"], "No such file"),
        (["generate", "1f1b", "--ranks", "0", "--microbatches", "1"], "num_ranks (0)"),
        (
            ["generate", "gpipe", "--ranks", "2", "--microbatches", "1", "--stages-per-rank", "2"],
            "--stages-per-rank (2) must be left out for gpipe",
        ),
        (
            ["generate", "gpipe", "--ranks", "2", "--microbatches", "1", "--csv", "--json"],
            "--csv must be left out with --json",
        ),
        (
            ["generate", "1f1b", "--ranks", "1000000", "--microbatches", "1000000"],
            "num_ranks (1000000) must be <= 32768",
        ),
        (["convert", "{good}", "a.json", "--waits"], "--waits must be given with CSV"),
        (["convert", "{good}", "a.txt"], "output (a.txt) must end in .csv or .json"),
        (["simulate", "{good}", "--forward", "-1"], "forward (-1.0) must be >= 0"),
        (["simulate", "{bad}"], "no rank can go on"),
        (["show", "{junk}"], "rank 0, cell 1: step ('0B0x')"),
    ],
)
def test_bad_input_is_one_line_with_status_2(
    arguments: list[str], message: str, good: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "bad.csv").write_text("1F0,0F0\n")
    (tmp_path / "junk.csv").write_text("0F0,0B0x\n")
    names = {"good": good, "bad": tmp_path / "bad.csv", "junk": tmp_path / "junk.csv"}
    assert main([argument.format(**names) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("arguments", [["generate", "x"], ["nothing"], []])
def test_bad_arguments_are_one_line_with_status_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_planning_works_where_torch_is_not_installed() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['hp_platform'] = None\n"
        "import hp_schedule\n"
        "from hp_schedule.cli import main\n"
        "sys.exit(main(['generate', '1f1b', '--ranks', '2', '--microbatches', '2']))\n"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout.startswith("rank 0 | F0")


def test_a_program_loads_what_it_uses() -> None:
    program = (
        "import sys\n"
        "from hp_schedule import MetaStep\n"
        "print(*sorted(name for name in sys.modules if name.startswith('hp_schedule')))\n"
        "import hp_schedule\n"
        "for name in hp_schedule.__all__:\n"
        "    getattr(hp_schedule, name)\n"
        "print('hp_schedule.searching.search' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout.splitlines() == ["hp_schedule hp_schedule.steps", "True"]


def test_csv_with_messages_has_the_step_in_which_torch_divides_gradients(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "a.csv"
    words = ["generate", "1f1b", "--ranks", "2", "--microbatches", "3", "--communication", "--csv"]
    assert main([*words, "--output", str(path)]) == 0
    assert "REDUCE_GRAD of every stage added" in capsys.readouterr().err
    assert main(["check", str(path)]) == 0
    document, again = tmp_path / "a.json", tmp_path / "b.csv"
    document.write_text(to_json(add_send_recv(one_f_one_b(2, num_microbatches=3))))
    assert main(["convert", str(document), str(again)]) == 0
    assert again.read_text() == path.read_text()


def test_check_refuses_a_file_without_its_last_microbatch_where_the_number_is_told(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(to_csv(one_f_one_b(2, num_microbatches=3)))
    told = ["--ranks", "2", "--stages", "2", "--microbatches"]
    assert main(["check", str(path), "--partial", *told, "3"]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "--partial", *told, "4"]) == 2
    assert "num_microbatches (3) must be 4, as --microbatches says" in capsys.readouterr().err
    assert main(["check", str(path), "--partial", "--ranks", "3"]) == 2
    assert "num_ranks (2) must be 3" in capsys.readouterr().err
