"""The search itself: what ranks see becomes an outcome, and every report is shown and told of."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from integration_tests.jobs.search.cases import DIFFERENT, EQUAL, REFUSED, Case, Errors, Outcome
from integration_tests.jobs.search.causes import CAUSES
from integration_tests.jobs.search.running import outcomes
from integration_tests.jobs.search.table import table
from integration_tests.jobs.search.tensors import error_of

FOUND = Path(__file__).parents[3] / "docs" / "found"
REPORTS = sorted(FOUND.glob("*-*.md"))


def _scanned(dim: int) -> Errors:
    plain = torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
    spread = distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Shard(0)])
    return {"output": error_of(spread.cumsum(dim), plain.cumsum(1))}


def _wrong_on_one_rank() -> Errors:
    return {"output": float(dist.get_rank())}


def _refused() -> Errors:
    raise ValueError("no such layout")


def _refused_by_one_rank() -> Errors:
    if dist.get_rank() == 1:
        raise ValueError("not here")
    dist.barrier()
    return {}


def test_what_ranks_see_becomes_an_outcome_and_what_follows_is_not_lost() -> None:
    cases = [
        Case("equal", lambda: _scanned(1)),
        Case("refused", _refused),
        Case("refused by one rank", _refused_by_one_rank),
        Case("different", _wrong_on_one_rank),
    ]

    found = {one.name: one for one in outcomes("test", cases)}

    states = {name: one.state for name, one in found.items()}
    assert states["equal"] == EQUAL
    assert states["different"] == DIFFERENT
    assert found["different"].error == 1.0
    assert states["refused"] == states["refused by one rank"] == REFUSED
    assert found["refused"].reason == "ValueError: no such layout"
    assert "not here (of 1 of 2 ranks)" in found["refused by one rank"].reason


def test_the_table_counts_all_and_tells_causes() -> None:
    some = [
        Outcome(family="operators", name="cumsum_minus even S1", state=DIFFERENT, error=0.5),
        Outcome(family="operators", name="cumsum even S1", state=EQUAL),
        Outcome(family="operators", name="odd even S1", state=DIFFERENT, error=None),
        Outcome(family="operators", name="sort even S1", state=REFUSED, reason="it | fails"),
    ]

    text = table({"operators": ({"torch": "2.13.0"}, some)})

    assert "| together | 4 | 1 | 1 | 2 |" in text
    assert "(torch-scan-of-a-negative-dim.md)**: operators: cumsum_minus even S1 (5.0e-01)" in text
    assert "**Not looked into:** operators: odd even S1 (not finite)" in text
    assert "1 x `it / fails`" in text


def test_every_cause_has_a_report_or_is_known_and_every_report_a_cause() -> None:
    assert all(bool(cause.report) != bool(cause.known) for cause in CAUSES)
    assert {cause.report for cause in CAUSES if cause.report} == {page.name for page in REPORTS}


@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.stem)
def test_a_report_says_all_and_its_script_is_short(page: Path) -> None:
    text = page.read_text()
    [script] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    compile(script, page.name, "exec")
    assert len(script.splitlines()) <= 35
    assert all(part in text for part in ("| versions |", "Seen:", "**Likely cause.**"))
    assert "**Looked up.**" in text


@pytest.mark.sample
@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.stem)
def test_a_report_shows_what_it_says(page: Path, tmp_path: Path) -> None:
    """Numbers of uninitialized memory are others each time, and lines of two ranks may mix.

    What DeepSpeed prints of its operator, which it builds once, is left out. Torch with Gloo aborts
    now and then at the end of a script that leaves its groups to it.
    """
    text = page.read_text()
    [script] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [seen] = re.findall(r"Seen:\n\n```text\n(.*?)```", text, re.DOTALL)
    if page.name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
        if shutil.which("c++") is None:
            pytest.skip("DeepSpeed builds an operator at its start, and there is no C++ compiler")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    if "`torchrun --nproc-per-node 2 script.py`" in text:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        command[1:1] = launcher
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    of_memory = re.compile(
        r"(?<=stage 1 norm.running_)(mean|var) .*|^(DeepSpeed |\[\d).*", re.MULTILINE
    )
    printed, told = (sorted(of_memory.sub("", some).split()) for some in (done.stdout, seen))
    assert sorted("".join(printed)) == sorted("".join(told)), done.stderr
