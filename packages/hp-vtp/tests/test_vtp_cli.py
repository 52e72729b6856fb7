import subprocess
import sys
from pathlib import Path

import pytest

from hp_vtp.cli import main

EXPLAIN = ["explain", "--from", "2", "--to", "3"]


def run(arguments: list[str]) -> int | str | None:
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def test_explain_prints_the_plan_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPLAIN, "--shape", "4096,1024", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 -> 3 ranks, 4096x1024 of 2 B = 8.00 MiB")
    assert "bound 4.00 MiB (N / 2 links)" in out


def test_explain_takes_placements_lanes_and_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--source", "sharded:0", "--destination", "sharded:0", "--lanes", "2"]
    speeds = ["--cross-gbit", "8", "--cross-us", "0", "--algorithm", "interval"]
    assert main([*EXPLAIN, "--shape", "2000,1000", "--dtype", "uint8", *options, *speeds]) == 0
    out = capsys.readouterr().out
    assert "sharded(0) -> sharded(0)" in out
    assert "bound 1.00 ms" in out


def test_plan_prints_stages_groups_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tp", "1,4,4", "--u-shape", "--shape", "1024,1024"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("9 ranks, 3 stages, chain 0 -> 1 -> 2 -> 0, 1 data-parallel pipeline(s)")
    assert "stage 0: TP 1, ranks 0, logical stage(s) 0 3, boundary replicated" in out
    assert "one activation: 1024 x 1024 of 2 B = 2.00 MiB" in out
    rows = [line.split() for line in out.splitlines() if " -> " in line[:8]]
    assert [row[:3] for row in rows] == [
        *(["0", "->", "1"], ["1", "->", "0"], ["1", "->", "2"], ["2", "->", "1"]),
        *(["2", "->", "3"], ["3", "->", "2"]),
    ]
    assert ("512.00", "KiB") in {tuple(row[-8:-6]) for row in rows}  # 2 MiB over four links


def test_plan_reads_a_layout_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layout.toml"
    file.write_text('tp_sizes = [1, 2]\nshape = "u"\ndp = [1, 2]')
    assert main(["plan", "--layout", str(file), "--shape", "64", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "2 data-parallel pipeline(s)" in out
    assert "stage 1: TP 2, ranks 1 2; 3 4" in out


def test_plan_lists_every_problem_of_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--tp", "1,0", "--dp", "1,2,3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert run(["plan", "--tp", "1,1000000000"]) == 2
    assert "ranks (1000000001) must be at most 1048576" in capsys.readouterr().err


def test_plan_takes_sharded_boundaries_and_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--boundary", "sharded:0", "--lanes", "2", "--dp", "1"]
    assert main(["plan", "--tp", "2,3", "--shape", "600,8", *options]) == 0
    assert "boundary sharded(0), 2 lane(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["plan"], "one of the arguments --tp --layout is required"),
        (["plan", "--tp", "1,x"], "(1,x) must be integers separated by commas"),
        (["plan", "--layout", "/none.toml"], "No such file or directory"),
        (EXPLAIN, "the following arguments are required: --shape"),
        ([*EXPLAIN, "--shape", "4,x"], "shape (4,x) must be integers separated by commas"),
        ([*EXPLAIN, "--shape", "4,-1"], "shape ((4, -1)) must not be negative"),
        ([*EXPLAIN, "--shape", "4", "--source", "odd"], "placement (odd) must be replicated or"),
        ([*EXPLAIN, "--shape", "4", "--source", "sharded:1"], "source.dim (1) must be within"),
        ([*EXPLAIN, "--shape", "4", "--lanes", "0"], "source_lanes (0) must be within 1..number"),
        ([*EXPLAIN, "--shape", "4", "--cross-gbit", "0"], "cross_bandwidth (0.0) must be greater"),
        ([*EXPLAIN, "--shape", "4", "--dtype", "half"], "invalid choice"),
        (["explain", "--from", "0", "--to", "1", "--shape", "4"], "num_sources (0) must be at"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(arguments)
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("content", [b"x = " + b"[" * 200_000, bytes(range(256)), b"x"])
def test_a_layout_that_is_none_is_told_in_a_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layout.toml"
    path.write_bytes(content)
    assert run(["plan", "--layout", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"--layout ({path}) must be TOML: " in err


def test_topology_plan_and_command_do_not_import_torch() -> None:
    code = "import sys, hp_vtp, hp_vtp.topology, hp_vtp.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
