"""``hp doctor``: what this machine can run, and what is missing."""

import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from hp_base.command_line import say
from hp_base.environment import usable_cores
from hp_base.errors import HpError
from hp_base.own_caches import CACHES, own_caches, why_not_kept
from hp_train import __version__
from hp_trainer.config import Config, MeshConfig
from hp_trainer.launch.launcher import run_entry
from hp_trainer.launch.task import Worker

_LOWEST_TORCH = (2, 11)
_LEAST_DISK = 1 << 30
_EXTRAS = {"tensorboard": "TensorBoard events", "tokenizers": "Hugging Face tokenizer files"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Subject of the check.
        status: ``missing`` keeps training from working, ``optional`` does not.
        value: Finding, for people.
        advice: Advice on the finding; empty: none is needed.
    """

    name: str
    status: Literal["ok", "optional", "missing"]
    value: str
    advice: str = ""


def main(*, as_json: bool = False) -> int:
    """Print the checks.

    Args:
        as_json: Whether to print one JSON object instead of lines.

    Returns:
        0 if this machine can train, else 1.
    """
    checks = diagnose()
    ok = all(check.status != "missing" for check in checks)
    if as_json:
        say(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            advice = f" -> {check.advice}" if check.advice else ""
            say(f"{check.status:<9}{check.name:<16}{check.value}{advice}")
        say("this machine can train" if ok else "this machine cannot train yet")
    return 0 if ok else 1


def diagnose() -> list[Check]:
    """Look at everything; nothing that goes wrong in one check keeps the others from running."""
    found: list[Check] = []
    for group in (_software, _ranks, _devices, _machine, _extras):
        try:
            found.extend(group())
        except Exception as error:  # noqa: BLE001 - a doctor reports what it meets
            name = group.__name__.removeprefix("_")
            found.append(Check(name, "missing", f"{type(error).__name__}: {error}"))
    return found


def _software() -> Iterator[Check]:
    yield Check("hp-train", "ok", __version__)
    yield Check("Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")
    for requirement in _requirements():
        name = requirement.partition(";")[0].strip()
        bare = "".join(c if c.isalnum() or c in "-_" else " " for c in name).split()[0]
        if "extra ==" not in requirement and not _installed(bare):
            yield Check(bare, "missing", "not installed", f"pip install '{name}'")
    import torch  # noqa: PLC0415 - its absence is a finding

    new_enough = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _LOWEST_TORCH
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    lowest = ".".join(map(str, _LOWEST_TORCH))
    yield Check(
        "torch",
        "ok" if new_enough else "missing",
        f"{torch.__version__}, {build}",
        "" if new_enough else f"pip install 'torch>={lowest}'",
    )


def _ranks() -> Iterator[Check]:
    """Yield whether ranks start and find each other: two of them, as a run starts its own."""
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_available() or not dist.is_gloo_available():
        yield Check("Gloo", "missing", "not in this torch", "install a torch with distributed")
        return
    said = io.StringIO()
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        what = "no folder can be written to"
        yield Check("temporary files", "missing", what, "set TMPDIR to one that can")
        return
    with tempfile.TemporaryDirectory(prefix="hp-doctor-") as folder, redirect_stderr(said):
        config = replace(Config(), mesh=MeshConfig(pp=1, dp_replicate=2, ep=1))
        try:
            status, reason = run_entry(config, Path(folder), entry=f"{__name__}:meet"), ""
        except HpError as error:
            status, reason = error.exit_code, str(error)
    if status:
        reason = reason or " ".join(said.getvalue().split())
        yield Check("Gloo", "missing", reason[:300])
    else:
        yield Check("Gloo", "ok", "works: ranks start and find each other")


def meet(_config: Config, *, worker: Worker) -> int:
    """Be a rank that only looks whether all others are there."""
    import torch.distributed as dist  # noqa: PLC0415

    from hp_platform import initialize, shutdown  # noqa: PLC0415

    runtime = initialize(worker.info, device_type="cpu", timeout=timedelta(seconds=60))
    dist.barrier(runtime.control)
    shutdown()
    return 0


def _devices() -> Iterator[Check]:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from hp_platform import backend_for  # noqa: PLC0415

    count = torch.cuda.device_count()
    if not count:
        why = "torch is built without CUDA" if torch.version.cuda is None else "none visible"
        yield Check("GPUs", "ok", f"{why}: training on the CPU")
        return
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Check(f"GPU {index}", "ok", f"{name}, {_size(free)} of {_size(total)} free")
    if not dist.is_nccl_available():
        yield Check("NCCL", "optional", "not in this torch: GPUs exchange data through the host")
        return
    yield Check("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    shares = backend_for(torch.device("cuda"), ranks_per_device=2) == "nccl"
    several = "several, with NCCL" if shares else "one with NCCL; several with Gloo"
    yield Check("ranks per GPU", "ok", several)


def _machine() -> Iterator[Check]:
    yield Check("CPU cores", "ok", str(usable_cores()))
    yield Check("memory", "ok", f"{_size(_free_memory())} free")
    free = shutil.disk_usage(Path.cwd()).free
    enough = free >= _LEAST_DISK
    yield Check(
        "disk",
        "ok" if enough else "optional",
        f"{_size(free)} free in {Path.cwd()}",
        "" if enough else "set run.output_dir to a folder with more",
    )
    if not os.access(Path.cwd(), os.W_OK):
        yield Check("folder", "optional", f"{Path.cwd()} is not writable", "set run.output_dir")
    yield _caches()


def _caches() -> Check:
    """Return whether compiled code is kept, and nowhere where another user can change it."""
    try:
        own_caches({name: os.environ[name] for name in CACHES if name in os.environ})
    except HpError as error:
        return Check("compiled code", "missing", str(error))
    why = why_not_kept()
    advice = "set XDG_CACHE_HOME to a folder of your own"
    return Check("compiled code", "optional" if why else "ok", why or "is kept", why and advice)


def _extras() -> Iterator[Check]:
    for name, use in _EXTRAS.items():
        if _installed(name):
            yield Check(name, "ok", importlib.metadata.version(name))
        else:
            yield Check(name, "optional", f"for {use}", f"pip install 'hp-train[{name}]'")


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("hp-train") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return []


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    return True


def _free_memory() -> int:
    """Return bytes that processes can still take, within the limit of a container."""
    text = Path("/proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no limit
        return free


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
