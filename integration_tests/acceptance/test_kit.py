"""The acceptance kit as a stranger runs it, on a CPU with Gloo, so that it does not rot."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

KIT_SECONDS = 600.0
NAMES = ("one process", "pp 2, interleaved_1f1b", "plan of moe on 2")
SECRET = "of-nobodys-business-4711"


def kit(out: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        *prefix,
        "-m",
        "integration_tests.acceptance",
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"CLUSTER_TOKEN": SECRET},
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=KIT_SECONDS)
    return process.returncode, output


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a run of two ranks at most."""
    folder = tmp_path_factory.mktemp("kit") / "results"
    status, output = finished(kit(folder, "--ranks", "2", "--only", *NAMES))
    assert status == 0, output
    return folder


def result_of(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def test_cases_pass_and_the_file_says_what_they_showed(out: Path) -> None:
    result = result_of(out)
    cases = {case["name"]: case for case in result["cases"]}
    assert set(cases) == {*NAMES, "rates", "moe on 2"}
    assert result["counts"] == {"passed": 5}
    for name in NAMES[:2]:
        assert cases[name]["figures"]["largest error"] <= cases[name]["figures"]["bound"] == 1e-12
        assert cases[name]["figures"]["numbers"] > 1e6
    speed = cases["moe on 2"]["figures"]
    assert speed["tokens/s"] > 0
    assert speed["MFU"] is None  # of a CPU nobody has a data sheet
    assert speed["longest operations"]
    assert cases["rates"]["figures"]["flops"] > 0
    plan = cases["plan of moe on 2"]["figures"]
    assert plan["measured step seconds"] == speed["step seconds"]
    assert plan["planned bytes"] > 0
    assert result["machine"]["torch"]


def test_the_page_has_every_case(out: Path) -> None:
    page = (out / "result.html").read_text()
    for name in ("one process", "moe on 2", "longest operations", "5 passed"):
        assert name in page


def test_neither_file_tells_whose_machine_it_was(out: Path) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    home = str(Path.home())
    for name in ("result.json", "result.html"):
        text = (out / name).read_text().rpartition("</style>")[2]
        for private in (SECRET, str(out), str(Path.cwd()), home + "/", sys.prefix):
            assert private not in text, f"{name} has {private}"
        words = set("".join(c if c.isalnum() or c in "-_" else " " for c in text).split())
        assert not {user, socket.gethostname()} & words


def test_what_was_done_is_not_done_again(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (out / "work" / "cases").rglob("*")}
    status, output = finished(kit(out, "--ranks", "2", "--only", *NAMES))
    assert status == 0, output
    assert {p: p.stat().st_mtime_ns for p in (out / "work" / "cases").rglob("*")} == before
    assert result_of(out)["counts"] == {"passed": 5}


@pytest.mark.sample
def test_two_machines_run_a_layout_together(tmp_path: Path) -> None:
    """Two agents of torchrun with a kit each, both on this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    flags = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    flags += ["--master-port", str(port), "--max-restarts", "0"]
    kits = [
        kit(
            tmp_path / "out",
            *("--only", "2 nodes, parameters"),
            prefix=("-m", "torch.distributed.run", "--node-rank", str(node), *flags),
        )
        for node in range(2)
    ]
    ends = [finished(process) for process in kits]
    assert [status for status, _ in ends] == [0, 0], ends
    [case] = result_of(tmp_path / "out" / "nodes")["cases"]
    assert case["status"] == "passed"
    assert case["figures"]["largest error"] <= 1e-12
