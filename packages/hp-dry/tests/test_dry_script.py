"""`hp-dry`: scripts of strangers, which know nothing of it and have nothing else of ours."""

import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from hp_dry.cli import main

SCRIPTS = Path(__file__).parent / "scripts"
README = Path(__file__).parent.parent / "README.md"


def test_a_strangers_fsdp_loop_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "2", "--", str(SCRIPTS / "fsdp_loop.py"), "--steps", "2"]) == 0
    assert "no problems" in capfd.readouterr().out


def test_a_strangers_pipeline_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "2", "--", str(SCRIPTS / "pipeline_loop.py")]) == 0
    assert "no problems" in capfd.readouterr().out


@pytest.mark.parametrize(("per_node", "peers"), [(8, 2), (1, 1)])
def test_peers_of_a_script_on_other_machines_share_a_buffer(
    per_node: int, peers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "exchange.py"
    script.write_text(
        "import os, torch\n"
        "import torch.distributed as dist\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "dist.init_process_group('nccl')\n"
        "x = torch.ones(3, device='cuda')\n"
        "dist.all_to_all_single(torch.empty_like(x), x)\n"
    )
    where = "--gpus", "3", "--gpus-per-node", str(per_node)
    assert main([*where, "--json", "--", str(script)]) == 0
    assert json.loads(capfd.readouterr().out)["peers"] == peers


def test_a_rank_that_skips_a_collective_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "2", "--", str(SCRIPTS / "fsdp_loop.py"), "--skip", "1"]) == 10
    out, err = capfd.readouterr()
    assert "fsdp_loop.py" in out
    # What begins with a rank is a warning that torch logs.
    error = next(line for line in err.splitlines() if not line.startswith("[rank"))
    assert error.startswith("error: ")
    assert "all_reduce" in error


def test_a_script_that_fails_is_told_where(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nx = torch.ones(2, device='cuda')\nx @ torch.ones(3)\n")
    assert main(["--", str(script)]) == 10
    assert "script.py:3" in capfd.readouterr().out


TWO_ORDERS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
groups = [dist.new_group(), dist.new_group()]
x = [torch.ones(2, device="cuda"), torch.ones(2, device="cuda")]
works = [
    dist.all_reduce(x[i], group=groups[i], async_op=True)
    for i in ((0, 1) if dist.get_rank() == 0 else (1, 0))
]
for work in works:
    work.wait()
"""


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_orders_of_launches_are_a_fault_where_nccl_keeps_none(
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_ORDERS)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", str(int(is_kept)))
    assert main(["--gpus", "2", "--", str(script)]) == (0 if is_kept else 10)
    assert ("launch order" in capfd.readouterr().out) != is_kept


def test_a_command_line_that_cannot_be_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["debug-qwen3", "--", str(SCRIPTS / "fsdp_loop.py")]) == 2
    assert main([]) == 2
    assert main(["--", "nowhere.py"]) == 2
    assert main(["--gpus", "2", "--rank", "2", "--", str(SCRIPTS / "fsdp_loop.py")]) == 2
    assert main(["--gpus", "64", "--", str(SCRIPTS / "fsdp_loop.py")]) == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == len(told.splitlines()) == 5
    assert "first stands for the others" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--html {}/none/x", "--html ({}/none/x) must be a file that can be written"),
        ("--svg {}/file/x", "--svg ({}/file/x) must be a file that can be written"),
        ("--traces {}/file/x", "--traces ({}/file/x) must be a writable folder"),
        ("--gpus 0", "--gpus (0) must be at least 1"),
    ],
)
def test_what_cannot_be_written_in_the_end_is_refused_at_the_start(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    where = str(tmp_path)
    assert main([*flags.replace("{}", where).split(), "--", str(tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert message.replace("{}", where) in err
    assert (out, err.count("\n")) == ("", 1)


def test_the_command_prints_a_report_and_writes_a_page(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("hp-dry")), "--gpus", "64", "--rank", "0"]
    command += ["--html", str(tmp_path / "page.html"), "--", str(SCRIPTS / "fsdp_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "error: " not in done.stderr
    said, _, printed = done.stdout.partition("fsdp_loop.py: ")
    assert "step 0 loss" in said  # by the script itself
    head, fits, problems, *tables = printed.splitlines()
    assert head.startswith("64 ranks in 1 class")
    assert fits.startswith("NVIDIA H100 80GB HBM3: fits: rank 0 needs ")
    assert problems == "no problems between ranks or on a device"
    assert "reduce_scatter" in "\n".join(tables)
    assert "fsdp_loop.py" in (tmp_path / "page.html").read_text()


def test_the_command_says_what_is_wrong_before_torch_is_imported() -> None:
    program = "import sys, hp_dry.cli; print(hp_dry.cli.main(['--']), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "2 False\n"
    assert done.stderr == "error: -- must be followed by a script: hp-dry --gpus 2 -- train.py\n"


def test_examples_of_the_readme_run(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    said = []
    for example in examples:
        program = tmp_path / "example.py"
        program.write_text(example)
        done = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True
        )
        said.append(done.stdout)
    assert "MiB reserved" in said[0]
    assert said[0].endswith("no GPU\n")


def test_no_trainer_of_ours_is_needed() -> None:
    names = {re.split(r"[<>=\[ ;]", text)[0] for text in requires("hp-dry") or ()}
    assert names == {"hp-base", "hp-platform", "torch", "msgspec"}
