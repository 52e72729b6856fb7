"""The harness itself: ranks start, answer, fail and end as promised."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from hp_platform import all_to_all_lazy, initialize, is_waited, shutdown
from hp_platform.testing import RankError, processes, run_distributed


class Answer(NamedTuple):
    """Something defined here, so that it can only be unpickled once this module is found."""

    rank: int
    total: torch.Tensor


def _sum_of(scale: float, answer: Answer) -> Answer:
    rank = dist.get_rank()
    total = answer.total * scale * (rank + 1)
    dist.all_reduce(total)
    return Answer(rank, total)


def test_results_come_back_by_rank() -> None:
    argument = Answer(0, torch.ones(2, dtype=torch.float64))
    results = run_distributed(_sum_of, 0.5, argument, world_size=3)
    assert [r.rank for r in results] == [0, 1, 2]
    for result in results:
        assert torch.equal(result.total, torch.full((2,), 3.0, dtype=torch.float64))


def test_a_partial_is_a_function_too() -> None:
    function = functools.partial(_sum_of, 1.0)
    assert run_distributed(function, Answer(0, torch.ones(1)), world_size=1)[0].rank == 0


def _parent() -> int:
    return os.getppid()


def test_ranks_of_all_calls_are_forked_from_one_process_that_has_torch() -> None:
    """So that a later call takes a tenth of a second, and not the import of torch."""
    parents = {parent for n in (2, 4, 4) for parent in run_distributed(_parent, world_size=n)}
    assert len(parents) == 1
    assert os.getpid() not in parents
    mapped = Path(f"/proc/{parents.pop()}/maps")
    if mapped.exists():
        assert "libtorch" in mapped.read_text()


def _state() -> tuple[int, str | None, str, str, bool]:
    runtime = initialize()
    same = (runtime.info.rank, runtime.info.world_size) == (dist.get_rank(), dist.get_world_size())
    return (
        torch.get_num_threads(),
        os.environ.get("HP_PLATFORM_TEST"),
        os.environ["LOCAL_RANK"],
        runtime.device.type,
        same,
    )


def test_ranks_see_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HP_PLATFORM_TEST", "set late")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    results = run_distributed(_state, world_size=2, threads=2)
    assert results == [(2, "set late", str(rank), "cpu", True) for rank in range(2)]


def _initialize_anew() -> int:
    shutdown()
    return initialize().info.rank


def test_ranks_can_initialize_from_the_environment() -> None:
    assert run_distributed(_initialize_anew, world_size=2) == [0, 1]


def _fails_in(rank: int) -> None:
    if dist.get_rank() == rank:
        print("the last words")  # noqa: T201
        raise ZeroDivisionError("the cause")
    dist.barrier()


def test_an_exception_names_the_rank_and_brings_its_traceback_and_output() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 of 3 raised ZeroDivisionError: the cause") as e:
        run_distributed(_fails_in, 1, world_size=3, timeout=600)
    assert time.monotonic() - start < 200  # not the time-out; 1 s on a quiet machine
    assert e.value.rank == 1
    assert 'raise ZeroDivisionError("the cause")' in str(e.value)
    assert "the last words" in str(e.value)


def _dies(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exited with status 7"), ("kill", "killed by SIGKILL")]
)
def test_a_dead_rank_is_named_before_those_that_lost_it(how: str, text: str) -> None:
    with pytest.raises(RankError, match=f"^rank 1 of 2 died: {text}") as caught:
        run_distributed(_dies, how, world_size=2, timeout=30)
    assert caught.value.rank == 1


def _hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def test_a_hang_names_the_rank_that_the_others_wait_for_and_where_it_stands() -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 did not finish within 1 s") as caught:
        run_distributed(_hangs, world_size=2, timeout=1)
    assert "in _hangs" in str(caught.value)
    assert caught.value.rank == 1


def _starts_a_process_and(file: str, then: Callable[[], None]) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    Path(file).write_text(f"{os.getpid()} {process.pid}", encoding="utf-8")
    then()
    time.sleep(1000)


def _starts_a_process_and_hangs(file: str) -> None:
    _starts_a_process_and(file, lambda: None)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(_is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_outlives_a_failed_run(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with pytest.raises(RankError, match="did not finish"):
        run_distributed(_starts_a_process_and_hangs, str(file), world_size=1, timeout=1)
    _wait_until_gone([int(pid) for pid in file.read_text(encoding="utf-8").split()])


def _kills_its_caller(file: str, caller: int) -> None:
    _starts_a_process_and(file, lambda: os.kill(caller, signal.SIGKILL))


def _calls_a_killer(file: str) -> None:
    processes._PRELOADED.clear()  # this process needs a server of its own, for one rank
    run_distributed(_kills_its_caller, file, os.getpid(), world_size=1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_die_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with pytest.raises(RankError, match="rank 0 of 1 died: killed by SIGKILL"):
        run_distributed(_calls_a_killer, str(file), world_size=1)
    _wait_until_gone([int(pid) for pid in file.read_text(encoding="utf-8").split()])


def _cannot_be_sent() -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 raised .*(pickle|get local object)"):
        run_distributed(_cannot_be_sent, world_size=1)


def test_a_local_function_is_refused_before_anything_is_started() -> None:
    with pytest.raises(TypeError, match="must be a function at the top level of a module"):
        run_distributed(lambda: None, world_size=2)


def test_at_least_one_rank_is_needed() -> None:
    with pytest.raises(ValueError, match=r"world_size \(0\) must be at least 1"):
        run_distributed(_parent, world_size=0)


def _leaves() -> None:
    raise SystemExit(0)


def test_leaving_is_a_failure_too() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 raised SystemExit: 0"):
        run_distributed(_leaves, world_size=1)


def _prints_and_warns() -> None:
    print(f"rank {dist.get_rank()} was here")  # noqa: T201
    warnings.warn("not for the caller", stacklevel=1)


def test_output_of_ranks_is_printed_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    run_distributed(_prints_and_warns, world_size=2)
    out = capsys.readouterr().out
    assert out.index("rank 0 was here") < out.index("rank 1 was here")


def test_functions_of_a_module_that_is_not_on_the_path_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest's importlib mode loads test modules: under a name that no import leads to."""
    folder = tmp_path / "some-package" / "tests"
    folder.mkdir(parents=True)
    file = folder / "test_elsewhere.py"
    file.write_text("def double(x):\n    return 2 * x\n", encoding="utf-8")
    name = "some-package.tests.test_elsewhere"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "some-package", ModuleType("some-package"))
    monkeypatch.setitem(sys.modules, "some-package.tests", ModuleType("some-package.tests"))
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert run_distributed(module.double, 21, world_size=1) == [42]


def _returns_an_unwaited_tensor() -> torch.Tensor:
    assert dist.group.WORLD is not None
    return all_to_all_lazy(torch.arange(2.0), group=dist.group.WORLD)


def test_an_unwaited_tensor_is_waited_for_on_its_way() -> None:
    first, second = run_distributed(_returns_an_unwaited_tensor, world_size=2)
    assert is_waited(first)
    assert [first.tolist(), second.tolist()] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.sample
def test_ranks_start_where_the_path_of_temporary_files_is_long(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 200)
    long.mkdir()
    program = (
        "import os\n"
        "from hp_platform.testing import run_distributed\n"
        "if __name__ == '__main__':\n"
        "    assert len(run_distributed(os.getpid, world_size=2)) == 2\n"
    )
    (tmp_path / "program.py").write_text(program)
    env = os.environ | {"TMPDIR": str(long)}
    subprocess.run([sys.executable, str(tmp_path / "program.py")], env=env, check=True, timeout=120)
    assert not list(long.glob("pymp-*"))
