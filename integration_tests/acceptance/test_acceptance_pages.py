"""The acceptance kit: its cases, the processes it runs them in, and what it says of the machine."""

import json
import os
import signal
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hp_base.session import last_lines, status_of
from hp_trainer.layout.schedules import KINDS
from integration_tests.acceptance import command
from integration_tests.acceptance.cases import Case, Place, cases_of, cases_over, chosen, slug
from integration_tests.acceptance.clean import cleaned, cleaner
from integration_tests.acceptance.layouts import config_of
from integration_tests.acceptance.outcome import Outcome
from integration_tests.acceptance.page import page

pytestmark = pytest.mark.usefixtures("forked_programs")

H100S = Place(
    device="cuda",
    name="NVIDIA H100 80GB HBM3",
    num_gpus=8,
    max_ranks=8,
    shares=True,
    capability=(9, 0),
    memory_bytes=80 << 30,
    nccl=(2, 30, 7),
)
TWO_T4S = Place(
    device="cuda",
    name="Tesla T4",
    num_gpus=2,
    max_ranks=4,
    capability=(7, 5),
    memory_bytes=15 << 30,
    nccl=(2, 27, 3),
)
CPU = Place(device="cpu", max_ranks=2, memory_bytes=16 << 30)
PLACES = {"8 H100": H100S, "2 T4": TWO_T4S, "CPU": CPU}


@pytest.mark.parametrize("name", PLACES)
def test_every_layout_is_one_that_the_rules_allow(name: str, tmp_path: Path) -> None:
    place = PLACES[name]
    cases = [*cases_of(place), *cases_over(2, 8)]
    assert len({slug(case.name) for case in cases}) == len(cases)
    for case in cases:
        if case.work == "layout":
            assert config_of(case, place, tmp_path).world_size == case.ranks


def test_everything_that_a_run_can_do_is_among_the_cases() -> None:
    found = [case for case in cases_of(H100S) if not case.left_out]
    keys = {f"{key}={value}" for case in found for key, value in case.keys.items()}
    assert {f"pipeline.schedule={schedule}" for schedule in KINDS} <= keys
    for key in ("dp_replicate", "dp_shard", "tp", "cp", "ep", "etp", "pp"):
        assert any(text.startswith(f"mesh.{key}=") for text in keys), key
    assert {"pipeline.overlap=true", "train.recompute=full", "train.compile=inductor"} <= keys
    assert {"float64", "float32", "bfloat16"} == {case.dtype for case in found}
    assert found[0].name == "one process"
    assert found[1].ranks == 8  # the most at once comes first


def test_a_t4_computes_nothing_in_bfloat16_and_shares_gpus_through_gloo() -> None:
    cases = {case.name: case for case in cases_of(TWO_T4S)}
    assert cases["bfloat16"].left_out == "sm_75 has no bfloat16"
    assert not any(c.dtype == "bfloat16" for c in cases.values() if not c.left_out)
    assert cases["moe on 2"].dtype == "float32"
    assert "through Gloo" in cases["launch order"].left_out
    assert TWO_T4S.backend(2) == "auto"
    assert TWO_T4S.backend(4) == "gloo"
    assert cases["fsdp 8, ep 8"].left_out.startswith("ranks (8) must be at most")


def test_chosen_cases_bring_what_they_need() -> None:
    names = [case.name for case in chosen(cases_of(CPU), ["plan of moe on 2"], quick=False)]
    assert names == ["rates", "moe on 2", "plan of moe on 2"]


def _outcomes(
    cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> tuple[int, dict[str, dict[str, str]]]:
    monkeypatch.setattr(command, "cases_of", lambda _place: cases)
    status = command.main(["--out", str(tmp_path / "out"), "--device", "cpu", *flags])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    return status, {case["name"]: case for case in result["cases"]}


def _case(name: str, work: str = "fork", **rest: object) -> Case:
    return Case(name=name, what="", work=work, needs=(), **rest)  # type: ignore[arg-type]


def test_what_crashes_or_takes_too_long_does_not_end_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        _case("raises", "no such work"),
        _case("dies", env={"PYTHONHASHSEED": "no number"}),
        _case("slow", "reference", seconds=0.3),
        Case(name="after", what="", work="fork", needs=("dies",)),
        _case("elsewhere", left_out="there is no GPU"),
        _case("good", "tests"),
    ]
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--ignore-glob=*")  # nothing of what is good need run
    status, found = _outcomes(cases, tmp_path, monkeypatch)
    statuses = {name: case["status"] for name, case in found.items()}
    assert statuses.pop("good") in ("passed", "left out", "failed")
    assert statuses == {
        "raises": "error",
        "dies": "error",
        "slow": "timed out",
        "after": "not run",
        "elsewhere": "left out",
    }
    assert status == 8
    assert found["raises"]["summary"] == "KeyError: 'no such work'"
    assert "Traceback" in found["raises"]["log"]
    assert found["dies"]["summary"] == "its process ended with status 1"


def test_when_the_minutes_are_up_both_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = _outcomes(
        [_case("any", "reference")], tmp_path, monkeypatch, "--minutes", "0.001"
    )
    assert status == 0
    assert found["any"]["summary"] == "the minutes were up"
    assert (tmp_path / "out" / "result.html").exists()


def test_results_of_another_machine_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _outcomes([_case("any")], tmp_path, monkeypatch, "--minutes", "0.001")
    arguments = ["--out", str(tmp_path / "out"), "--device", "cpu", "--ranks", "3"]
    assert command.main(arguments) == 2
    assert "has results of another machine" in capsys.readouterr().err


def test_what_a_rank_raised_is_told_where_its_launcher_says_more(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    raised = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "job.py", line 1, in <module>',
        "[rank1]:     train()",
        "[rank1]: ValueError: no data",
    ]
    log.write_text("\n".join([*raised, *("of the launcher" for _ in range(60))]))
    assert last_lines(log).startswith("\n".join([*raised, "...", "of the launcher", ""]))
    log.write_text("\n".join(raised))
    assert last_lines(log) == "\n".join(raised)


def test_a_process_that_is_late_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", script]
    status = status_of(arguments, tmp_path / "log.txt", seconds=2.0, env=os.environ)
    assert status is None
    child = int(last_lines(tmp_path / "log.txt"))
    deadline = time.monotonic() + 60
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)  # a signal is sent, and a process ends a little later
    assert not _lives(child)
    died = [sys.executable, "-c", "import os; os.abort()"]
    assert status_of(died, tmp_path / "log.txt", seconds=60, env=os.environ) == -signal.SIGABRT


def _lives(pid: int) -> bool:
    """Whether a process is neither gone nor a zombie that nobody has collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


SECRET = "hunter2-of-the-cluster"
ENV = {
    "HOME": "/home/maria",
    "USER": "maria",
    "HOSTNAME": "gpu-node17",
    "WANDB_API_KEY": "0123abcd",
    "MY_SETTING": SECRET,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("failed on gpu-node17: maria may not", "failed on <host>: <user> may not"),
        (f"it said {SECRET} and 0123abcd.", "it said <environment> and <environment>."),
        (
            'File "/home/maria/x y/hp/src/hp_trainer/training/train.py", line 3',
            'File "hp_trainer/training/train.py", line 3',
        ),
        (
            'File "/opt/v/lib/hp_train/dry_run/x.py", line 3',
            'File "hp_train/dry_run/x.py", line 3',
        ),
        ("cannot open /data/secret-project/tokens", "cannot open <path>"),
        ("see ~/notes/a.txt: 3", "see <path>/a.txt: 3"),
        ("at 10.3.0.17:29500 or fe80::1ff:fe23", "at <address>:29500 or <address>"),
        ("tcp://node3:29500 from maria@lab.example.org", "<address> from <address>"),
        ("GPU-1b2c3d4e-0000-1111-2222-333344445555", "GPU-<id>"),
        (
            "c10d::allreduce_ 1,293 tokens/s and/or GB/s 2/3",
            "c10d::allreduce_ 1,293 tokens/s and/or GB/s 2/3",
        ),
        ("/home/maria/thesis/run.py:3 and '/home/maria/my thesis'", "<path>/run.py:3 and '<path>'"),
        ("driver 580.65.06, torch 2.13.0+cpu", "driver 580.65.06, torch 2.13.0+cpu"),
    ],
)
def test_what_is_nobodys_business_is_taken_out(text: str, expected: str) -> None:
    assert cleaner(env=ENV)(text) == expected


def test_keys_and_nested_texts_are_cleaned_too() -> None:
    found = cleaned({"maria": [("gpu-node17", 3.5), {"x": None}]}, cleaner(env=ENV))
    assert found == {"<user>": [["<host>", 3.5], {"x": None}]}


def test_the_page_stands_alone_and_escapes_what_it_shows() -> None:
    outcome = Outcome(
        name="a <b>", what="w", status="failed", summary="1 < 2", figures={"f": {"g": [1.5, 2]}}
    )
    case = json.loads(json.dumps({"log": "<script>", **_builtins(outcome)}))
    text = page({"machine": {"torch": "2", "none": None}, "counts": {"failed": 1}, "cases": [case]})
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.extend([tag, *(k for k, _ in attrs)])  # type: ignore[method-assign]
    parser.feed(text)
    assert "a &lt;b&gt;" in text
    assert not {"script", "src", "href", "b"} & set(tags)
    assert "details" in tags


def _builtins(outcome: Outcome) -> dict[str, object]:
    found = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    return found | {"log": "<script>"}
