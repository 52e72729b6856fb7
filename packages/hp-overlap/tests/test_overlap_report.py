"""The share of communication that a profiler's trace shows to be hidden.

The recorded traces are of one pair of two layers on a slow link, as `benchmarks/bench_overlap.py`
makes them: `overlapped` on the lazy all-to-all, `waiting` on one that waits for its result.
"""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_overlap import OverlapReport, overlap_report
from hp_overlap.__main__ import main

TRACES = Path(__file__).parent / "traces"


def event(cat: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    base = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start}
    return {**base, "pid": 0, "tid": 7, **more}


def kernel(name: str, start: float, end: float, **args: str) -> dict[str, Any]:
    return event("kernel", name, start, end, args=args)


def recorded(name: str) -> list[OverlapReport]:
    return overlap_report(json.loads((TRACES / f"{name}.json").read_text()))


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_a_recorded_pair_hides_most_of_its_transfers_and_one_that_waits_none() -> None:
    (overlapped,) = recorded("overlapped")
    (waiting,) = recorded("waiting")
    assert len(overlapped.transfers) == len(waiting.transfers) == 8
    assert overlapped.fraction == pytest.approx(0.92, abs=0.01)
    assert waiting.fraction < 0.01
    assert overlapped.total > 8 * 20e3
    exposed = sum(transfer.exposed for transfer in overlapped.transfers)
    assert exposed == pytest.approx(overlapped.total - overlapped.hidden)


def test_kernels_of_a_gpu_are_compared_in_its_own_time() -> None:
    (report,) = overlap_report(
        trace(
            event("cpu_op", "aten::mm", 0, 1000, pid=99),  # the host is busy launching
            event("user_annotation", "nccl:all_to_all", 0, 5, pid=99),
            kernel("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long)", 100, 200),
            kernel("ampere_sgemm_128x64_tn", 90, 130),
            kernel("vectorized_elementwise_kernel", 120, 160),
            kernel("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long)", 300, 320),
            kernel("ampere_sgemm_128x64_tn", 320, 400),
        )
    )
    assert report.process == 0
    assert [transfer.exposed for transfer in report.transfers] == [40, 20]
    assert (report.total, report.hidden) == (120, 60)
    assert report.fraction == 0.5


def test_gloo_between_gpus_is_compared_with_their_kernels() -> None:
    (report,) = overlap_report(
        trace(
            event("user_annotation", "gloo:all_to_all", 0, 100, pid=99),
            event("cpu_op", "aten::mm", 0, 100, pid=99),
            kernel("ampere_sgemm_128x64_tn", 50, 150),
        )
    )
    assert (report.process, report.fraction) == (99, 0.5)


def test_other_collectives_count_only_where_they_are_asked_for() -> None:
    of_fsdp = {"Collective name": "_allgather_base", "Process Group Description": "fsdp"}
    events = trace(
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 10, **of_fsdp),
        kernel("ncclDevKernel_SendRecv", 10, 20, **{"Process Group Description": "ep"}),
        kernel("ampere_sgemm_128x64_tn", 0, 10),
    )
    (exchanges,) = overlap_report(events)
    assert exchanges.fraction == 0
    for match in ("AllGather", "FSDP", "allgather_base"):
        (gathers,) = overlap_report(events, match=match)
        assert gathers.fraction == 1
    (everything,) = overlap_report(events, match="nccl")
    assert everything.fraction == 0.5
    assert overlap_report(events, match="broadcast") == []


def test_waiting_in_a_hook_or_for_a_transfer_is_no_compute() -> None:
    (report,) = overlap_report(
        trace(
            event("user_annotation", "gloo:all_to_all", 0, 100, tid=1),
            event("cpu_op", "autograd::engine::evaluate_function: _SyncHookBackward", 0, 40),
            event("cpu_op", "_SyncHookBackward", 0, 40),
            event("cpu_op", "MmBackward0", 40, 100),
            event("cpu_op", "aten::mm", 40, 60),
            event("cpu_op", "_c10d_functional::wait_tensor", 60, 100),
        )
    )
    assert report.hidden == pytest.approx(20)


def test_processes_are_reported_apart() -> None:
    reports = overlap_report(
        trace(
            kernel("ncclDevKernel_SendRecv", 0, 10),
            {**kernel("ncclDevKernel_SendRecv", 0, 10), "pid": 1},
            {**kernel("gemm", 0, 10), "pid": 1},
            {**kernel("gemm", 20, 30), "pid": 0},
        )
    )
    assert {report.process: report.fraction for report in reports} == {0: 0.0, 1: 1.0}


def test_the_command_prints_the_share_and_the_worst_transfers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "trace.json.gz"
    with gzip.open(packed, "wt") as file:
        file.write((TRACES / "overlapped.json").read_text())
    assert main([str(packed), "--worst", "2"]) == 0
    first, *worst = capsys.readouterr().out.splitlines()
    assert first.startswith("process 0: 8 transfers, 182.73 ms, 92.1% hidden, 14.52 ms exposed")
    assert len(worst) == 2
    assert "ms exposed  slow:alltoall_base" in worst[0]


def test_a_trace_without_transfers_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "trace.json"
    plain.write_text(json.dumps(trace(kernel("gemm", 0, 1))))
    assert main([str(plain)]) == 1
    assert "no transfer in" in capsys.readouterr().out


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"traceEvents \(0\) of the trace must be > 0"):
        overlap_report({})
    with pytest.raises(ValueError, match=r"match \('\('\) must be a regular expression"):
        overlap_report(trace(kernel("gemm", 0, 1)), match="(")


WRONG: dict[str, tuple[str, bytes]] = {
    "binary": (".json", bytes(range(256))),
    "nested": (".json", b"[" * 200_000),
    "list": (".json", b"[]"),
    "no list": (".json", b'{"traceEvents": 3}'),
    "no objects": (".json", b'{"traceEvents": [1]}'),
    "no time": (".json", b'{"traceEvents": [{"ph": "X", "dur": null, "name": "a", "pid": 1}]}'),
    "no name": (".json", b'{"traceEvents": [{"ph": "X", "dur": 1, "ts": 2, "pid": 1}]}'),
    "infinite": (".json", b'{"traceEvents": [{"ph":"X","dur":1e999,"ts":2,"name":"a","pid":1}]}'),
    "no archive": (".json.gz", b"\x1f\x8bnot"),
    "half an archive": (".json.gz", gzip.compress(b"{}" * 1000)[:-9]),
    "empty": (".json", b""),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_trace_is_told_in_a_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix, content = WRONG[name]
    path = tmp_path / f"given{suffix}"
    path.write_bytes(content)
    for given in (path, tmp_path, tmp_path / "none.json"):
        assert main([str(given)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert "error: " in err


def test_a_wrong_flag_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(TRACES / "overlapped.json")
    for flags in (["--match", "("], ["--worst", "-1"]):
        assert main([trace, *flags]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_reports_of_traces_need_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['hp_platform'] = None\n"
        "from hp_overlap import HookCoordinator, overlap_report\n"
        "from hp_overlap.__main__ import main\n"
        "sys.exit(main([sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", program, str(TRACES / "overlapped.json")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert "hidden" in found.stdout
