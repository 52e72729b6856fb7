"""Environments of a machine: every command does its work in them, or ends in one line.

A program of its own, which goes on where it was stopped where it is given a folder to keep:

    python -m integration_tests.reliability.environments [--folder FOLDER] [NAME ...]

Each case is a line of bash around a real command, with variables, limits, mounts and closed or full
outputs as a shell, a scheduler or a container gives them. What is judged is the exit status, that
nothing prints a traceback or what an interpreter says at its end, and that an error is one line.
"""

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration_tests.reliability.outcome import Outcome

_SECONDS = 600.0
_LONGEST_LINE = 600
_NEVER = re.compile(
    r"Traceback \(most recent|Exception ignored|leaked semaphore|Fatal Python|Segmentation"
)
_LEFT = "left a process behind"
_ONE_LINE = re.compile(r"^(?:error|warning): ")
_KEYS = """
[mesh]
pp = 1
dp_replicate = 2
ep = 1
[pipeline]
schedule = "1f1b"
stages_per_rank = 1
[model]
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 1
expert_hidden = 16
num_experts = 2
top_k = 1
[data]
seq_len = 16
[train]
steps = 2
global_batch_size = 2
microbatch_size = 1
eval_every = 0
save_every = 0
sample_tokens = 8
log_every = 1
"""
DOES_ITS_WORK = (0,)
REFUSED = (2,)
MACHINE = (11,)
"""Statuses of docs/how-to/stop-and-resume.md."""
# Without it root may read and write everything, whatever the modes are.
_AS_ANYBODY = "exec setpriv --bounding-set -dac_override,-dac_read_search bash -c "
_PLAIN = "HP config one.toml --origins"
_TRAIN = "HP train one.toml"
_DRY = "HP train one.toml --dry-run"
_REHEARSED = "HP dry-run one.toml"
_DOCTOR = "HP doctor"
_PLAN = "HP plan one.toml"


@dataclass(frozen=True)
class Environment:
    """One case.

    Attributes:
        name: Names it.
        shell: Lines of bash, run in a new folder that holds `one.toml` and `text`; in them HP is
            the command, PYTHON its interpreter, and $ROOM that folder.
        statuses: Exit statuses that are right.
        says: Text that must be printed.
        keeps: Whether a run directory with all steps must be there at the end.
        as_anybody: Whether modes of files bind the command.
        needs: What the machine must grant, a command of bash.
    """

    name: str
    shell: str
    statuses: Collection[int] = DOES_ITS_WORK
    says: str = ""
    keeps: bool = False
    as_anybody: bool = False
    needs: str = "true"


def environments() -> list[Environment]:
    """All cases."""
    groups = (_temporary, _homes, _folders, _modes, _words, _limits, _shared, _outputs, _left_over)
    return [case for group in (*groups, _mounts, _torchrun) for case in group()]


def _trained(name: str, shell: str, **more: object) -> Environment:
    return Environment(name, shell, keeps=True, **more)  # type: ignore[arg-type]


def _temporary() -> Iterator[Environment]:
    long = "mkdir -p $ROOM/{1}; export TMPDIR=$ROOM/{1}; ".replace("{1}", "t" * 80)
    longer = "mkdir -p $ROOM/{1}; export TMPDIR=$ROOM/{1}; ".replace("{1}", "t" * 200)
    yield _trained("tmpdir-long-train", long + _TRAIN)
    yield Environment("tmpdir-long-doctor", long + _DOCTOR, says="can train")
    yield Environment("tmpdir-long-dry-run", long + _REHEARSED)
    yield Environment("tmpdir-long-plan", long + _PLAN)
    yield _trained("tmpdir-longer-train", longer + _TRAIN)
    yield _trained("tmpdir-missing-train", "export TMPDIR=$ROOM/nowhere; " + _TRAIN)
    yield _trained("tmpdir-file-train", "touch f; export TMPDIR=$ROOM/f; " + _TRAIN)
    yield _trained("tmpdir-relative-train", "mkdir t; export TMPDIR=t; " + _TRAIN)
    odd = "export TMPDIR=$ROOM/$'a b\\xe9'; mkdir \"$TMPDIR\"; "
    yield _trained("tmpdir-odd-bytes-train", odd + _TRAIN)
    sealed = "mkdir -m 555 t; export TMPDIR=$ROOM/t; "
    yield _trained("tmpdir-read-only-train", sealed + _TRAIN, as_anybody=True)


def _homes() -> Iterator[Environment]:
    yield _trained("home-unset-train", "unset HOME XDG_CACHE_HOME; " + _TRAIN)
    yield _trained("home-missing-train", "export HOME=/dev/null/at/all; " + _TRAIN)
    yield _trained("home-file-train", "touch f; export HOME=$ROOM/f; " + _TRAIN)
    sealed = "mkdir -m 555 h; export HOME=$ROOM/h; "
    yield _trained("home-read-only-train", sealed + _TRAIN, as_anybody=True)
    eager = _TRAIN + " --train.compile aot_eager"
    yield _trained("home-read-only-compile", sealed + eager, as_anybody=True)
    yield _trained("home-odd-bytes-train", "export HOME=$ROOM/$'h\\xe9'; mkdir $HOME; " + _TRAIN)
    yield _trained("cache-relative-train", "export XDG_CACHE_HOME=c; " + _TRAIN)
    theirs = "mkdir -p c/hp-train-compiled; chown 65534 c/*; export XDG_CACHE_HOME=$ROOM/c; "
    yield _trained("cache-of-another-user-compile", theirs + eager, says="belongs to")
    named = "mkdir c; chown 65534 c; export TORCHINDUCTOR_CACHE_DIR=$ROOM/c; "
    yield Environment("inductor-of-another-user", named + eager, REFUSED, "TORCHINDUCTOR_CACHE")
    named = "mkdir -m 777 c; export TRITON_CACHE_DIR=$ROOM/c; "
    yield Environment("triton-open-to-all", named + _TRAIN, REFUSED, "TRITON_CACHE_DIR")


def _folders() -> Iterator[Environment]:
    gone = "mkdir d; cd d; rmdir ../d; "
    absolute = "HP train $ROOM/one.toml --run.output_dir $ROOM/runs --data $ROOM/text"
    commands = (absolute, _DOCTOR, _PLAIN, "HP plan quickstart", "HP train quickstart --dry-run")
    for command in commands:
        name = "-".join(command.split()[1:2] + command.split("--dry")[1:])
        yield Environment(f"cwd-gone-{name}", gone + command, MACHINE, "current folder")
    latin = "mkdir $'caf\\xe9'; cp one.toml caf*; cp -r text caf*; cd caf*; "
    yield Environment("cwd-latin1-train", latin + _TRAIN, says="runs/one-")
    yield Environment("cwd-latin1-doctor", latin + _DOCTOR, says="can train")
    yield Environment("cwd-latin1-dry-run", latin + _REHEARSED)
    out = "HP train one.toml --run.output_dir $'runs\\xe9'"
    yield Environment("output-latin1-train", out, says="one-")
    text = "mv text $'t\\xe9'; HP train one.toml --data t*"
    yield _trained("data-latin1-train", text)
    yield Environment("name-latin1-train", "HP train one.toml --run.name $'n\\xe9'", (0, 2))
    long = "HP train one.toml --run.name " + "n" * 300
    yield Environment("name-long-train", long, REFUSED, "run.name")
    yield Environment("name-long-dry-run", long + " --dry-run", REFUSED, "run.name")
    deep = f"for i in $(seq 24); do mkdir {'d' * 200}; cd {'d' * 200}; done; cp $ROOM/*.toml .; "
    yield Environment("cwd-deep-train", deep + _TRAIN + " --data $ROOM/text", (0, 2))
    for name in ("multiprocessing", "signal", "struct", "torch", "socket"):
        mine = f'echo \'open("{name}.ran", "w")\' > {name}.py; {_TRAIN}; s=$?; '
        yield _trained(f"cwd-holds-{name}-train", mine + f"test ! -e {name}.ran && exit $s")
    mine = 'echo \'open("here.ran", "w")\' | tee ctypes.py > torch.py; '
    fresh = "export XDG_CACHE_HOME=$ROOM/c; HP train one.toml --train.compile inductor; s=$?; "
    tried = mine + fresh + "test ! -e here.ran && exit $s"
    yield _trained("cwd-holds-ctypes-compile", tried, needs="c++ --version")
    yield Environment("output-is-a-file", "touch runs; " + _TRAIN, REFUSED, "run.output_dir")
    yield Environment("output-in-proc", _TRAIN + " --run.output_dir /proc/x", REFUSED, "output_dir")


def _modes() -> Iterator[Environment]:
    for mask in ("000", "077", "027"):
        yield _trained(f"umask-{mask}-train", f"umask {mask}; {_TRAIN}")
    yield Environment("umask-777-train", f"umask 777; {_TRAIN}", (2, 9, 11), as_anybody=True)
    sealed = "mkdir -m 555 d; cp -r one.toml text d 2>/dev/null; cd d; "
    train = "HP train $ROOM/one.toml --data $ROOM/text"
    yield Environment("cwd-read-only-train", sealed + train, REFUSED, "output_dir", as_anybody=True)
    yield Environment(
        "cwd-read-only-doctor", sealed + _DOCTOR, (0, 1), "output_dir", as_anybody=True
    )
    closed = "mkdir d; cd d; chmod 000 .; "
    yield Environment("cwd-closed-train", closed + train, (2, 11), as_anybody=True)
    yield _trained("data-read-only-train", "chmod -R a-w text; " + _TRAIN, as_anybody=True)
    ran = _TRAIN + " --run.name r >/dev/null || exit 99; chmod 555 runs/r; "
    again = "HP train --resume runs/r --train.steps 3"
    yield Environment("run-read-only-resume", ran + again, REFUSED, "runs/r", as_anybody=True)


def _words() -> Iterator[Environment]:
    yield _trained("locale-c-train", "export LC_ALL=C; " + _TRAIN)
    plain = "export LC_ALL=POSIX PYTHONCOERCECLOCALE=0 PYTHONUTF8=0; "
    yield _trained("locale-ascii-train", plain + _TRAIN)
    yield _trained("locale-unknown-train", "export LC_ALL=xx_YY.nothing; " + _TRAIN)
    yield _trained("output-ascii-train", "export PYTHONIOENCODING=ascii; " + _TRAIN)
    yield _trained(
        "output-latin1-strict-train", "export PYTHONIOENCODING=latin-1:strict; " + _TRAIN
    )
    yield _trained("output-utf16-train", "export PYTHONIOENCODING=utf-16; " + _TRAIN)
    latin = "mkdir $'caf\\xe9'; cp one.toml caf*; cp -r text caf*; cd caf*; export LC_ALL=C; "
    yield Environment("locale-c-latin1-config", latin + _PLAIN)


def _limits() -> Iterator[Environment]:
    yield _trained("files-64-train", "ulimit -n 64; " + _TRAIN)
    yield Environment("files-24-train", "ulimit -n 24; " + _TRAIN, MACHINE, "ulimit -n")
    yield Environment("files-8-train", "ulimit -n 8; " + _TRAIN, MACHINE)
    yield _trained("files-soft-8-train", "ulimit -S -n 8; " + _TRAIN)
    yield Environment("file-size-train", "ulimit -f 4; " + _TRAIN, (3, 4, 9, *MACHINE))
    once = (
        _TRAIN + " --launch.max_restarts 0"
    )  # torch loads, and aborts where a thread cannot start
    yield Environment("memory-1g-train", "ulimit -v 1000000; " + once, (1, 7, *MACHINE))
    yield _trained("stack-small-train", "ulimit -s 512; " + _TRAIN)
    yield _trained("stack-unlimited-train", "ulimit -s unlimited; " + _TRAIN)
    yield _trained("no-locked-memory-train", "ulimit -l 0; " + _TRAIN)
    seconds = _TRAIN + " --train.steps 100000 --launch.max_restarts 0 --train.log_every 1000"
    yield Environment("cpu-seconds-train", "ulimit -t 12; " + seconds, (7,), "SIG")
    yield Environment("memory-1g-doctor", "ulimit -v 1000000; " + _DOCTOR, (0, 1))


def _shared() -> Iterator[Environment]:
    mount = "unshare -m bash -c 'mount -t tmpfs -o {} none /dev/shm && {}'"
    needs = "unshare -m true"
    small, sealed = mount.format("size=4k", _TRAIN), mount.format("ro", _TRAIN)
    yield _trained("shm-4k-train", small, needs=needs)
    yield _trained("shm-read-only-train", sealed, needs=needs)
    tty = mount.format("ro", f'script -qec "{_TRAIN}" /dev/null')
    yield _trained("shm-read-only-terminal-train", tty, needs=needs + " && which script")


def _outputs() -> Iterator[Environment]:
    yield _trained("full-train", _TRAIN + " > /dev/full")
    yield _trained("full-errors-train", _TRAIN + " 2> /dev/full")
    yield _trained("full-both-train", _TRAIN + " > /dev/full 2>&1")
    yield _trained("head-train", _TRAIN + " | head -1; exit ${PIPESTATUS[0]}", says="processes on")
    yield _trained("head-both-train", _TRAIN + " 2>&1 | head -1; exit ${PIPESTATUS[0]}")
    yield _trained("closed-train", _TRAIN + " >&-")
    yield _trained("closed-errors-train", _TRAIN + " 2>&-")
    yield _trained("closed-all-train", _TRAIN + " <&- >&- 2>&-")
    yield _trained("closed-input-train", _TRAIN + " <&-")
    late = _TRAIN + " --train.steps 30 | { head -3; }; exit ${PIPESTATUS[0]}"
    yield _trained("head-late-train", late)
    for name, command in {"plan": _PLAN, "config": _PLAIN, "doctor": _DOCTOR}.items():
        yield Environment(f"full-{name}", command + " > /dev/full", MACHINE, "standard output")
        yield Environment(f"closed-{name}", command + " >&-", MACHINE, "standard output")
        piped = command + " | true; exit ${PIPESTATUS[0]}"
        yield Environment(f"nobody-reads-{name}", piped, (0, 141))
    yield Environment("full-help", "HP --help > /dev/full", (0, *MACHINE))
    yield Environment("closed-all-config", _PLAIN + " <&- >&- 2>&-", MACHINE)
    bad = "HP train one.toml --train.stepz 3"
    yield Environment("full-errors-refusal", bad + " 2> /dev/full", REFUSED)
    yield Environment("closed-errors-refusal", bad + " 2>&-", REFUSED)
    yield Environment("full-rehearsal", _REHEARSED + " > /dev/full", MACHINE, "standard output")
    verify = "HP verify one.toml --steps 1 mesh.dp_replicate=1 > /dev/full"
    yield Environment("full-verify", verify, MACHINE, "standard output")


def _left_over() -> Iterator[Environment]:
    yield _trained("rank-alone-train", "export RANK=3; " + _TRAIN)
    two = "export RANK=0 WORLD_SIZE=2; "
    yield Environment("rank-of-two-train", two + _TRAIN, REFUSED, "unset RANK")
    one = "export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0; "
    yield Environment("rank-of-one-train", one + _TRAIN, REFUSED, "unset RANK")
    yield Environment("rank-of-two-dry-run", two + _DRY, DOES_ITS_WORK)
    dead = two + "export MASTER_ADDR=127.0.0.1 MASTER_PORT=9; "
    fast = " --launch.init_timeout_seconds 3 --run.name r"
    yield Environment("rank-dead-master-train", dead + _TRAIN + fast, (5,), "unset RANK")
    bad = "export RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=abc; "
    yield Environment("rank-bad-port-train", bad + _TRAIN + fast, REFUSED, "MASTER_PORT")
    refused = "export LOCAL_RANK=3; HP train one.toml --train.stepz 3"
    yield Environment("local-rank-refusal", refused, REFUSED, "train.steps")
    yield _trained("local-rank-train", "export LOCAL_RANK=3 LOCAL_WORLD_SIZE=4; " + _TRAIN)
    words = "export RANK=0 WORLD_SIZE=abc; "
    yield Environment("world-size-words-train", words + _TRAIN, REFUSED, "unset RANK")
    batch = "export SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 "
    yield _trained("slurm-batch-train", batch + "SLURM_STEP_ID=4294967291; " + _TRAIN)
    yield _trained("slurm-salloc-train", batch + "; " + _TRAIN)
    shell = batch + "SLURM_STEP_ID=0; "
    yield Environment("slurm-shell-train", shell + _TRAIN, REFUSED, "unset SLURM_PROCID")
    yield Environment("slurm-shell-plan", shell + _PLAN, REFUSED, "unset SLURM_PROCID")
    words = batch + "SLURM_STEP_ID=0 SLURM_NTASKS=abc; "
    yield Environment("slurm-words-train", words + _TRAIN, REFUSED, "unset SLURM_PROCID")
    yield Environment(
        "slurm-local-id", "export SLURM_LOCALID=2; HP train x.toml", REFUSED, "x.toml"
    )
    agent = "export TORCHELASTIC_RUN_ID=x TORCHELASTIC_USE_AGENT_STORE=True MASTER_PORT=abc; "
    yield _trained("torchrun-rest-train", agent + _TRAIN)
    own = "export HP_INIT_METHOD=file:///nowhere/x HP_TRAIN_LAUNCHER_PID=1; "
    yield _trained("own-variables-train", own + _TRAIN)
    yield Environment("own-variables-doctor", own + _DOCTOR, says="can train")
    yield _trained("threads-words-train", "export OMP_NUM_THREADS=abc; " + _TRAIN)
    yield _trained("gloo-interface-train", "export GLOO_SOCKET_IFNAME=nope0; " + _TRAIN)
    yield Environment(
        "gloo-interface-doctor", "export GLOO_SOCKET_IFNAME=nope0; " + _DOCTOR, (0, 1)
    )
    yield _trained("no-path-train", "export PATH=; " + _TRAIN)
    yield _trained("no-gpu-named-train", "export CUDA_VISIBLE_DEVICES=99; " + _TRAIN)


def _mounts() -> Iterator[Environment]:
    lo = "unshare -n bash -c 'ip link set lo up && {}'"
    yield _trained("no-network-train", lo.format(_TRAIN), needs="unshare -n ip link set lo up")
    dead = "unshare -n bash -c '{}'"
    yield Environment(
        "no-loopback-train", dead.format(_TRAIN), MACHINE, "loopback", needs="unshare -n true"
    )
    yield Environment(
        "no-loopback-doctor", dead.format(_DOCTOR), (1,), "cannot train", needs="unshare -n true"
    )
    name = "unshare -u bash -c 'hostname nobody-knows-me && {}'".format
    yield _trained("host-name-unknown-train", name(_TRAIN), needs="unshare -u hostname x")
    seal = "for d in /tmp /var/tmp /dev/shm $ROOM; do mount --bind -o ro $d $d; "
    seal = f"unshare -m bash -c '{seal} mount -o remount,bind,ro $d; done; cd $ROOM; {{}}'"
    nowhere = "HP train one.toml --run.output_dir /var/lib/hp-environments/runs"
    yield Environment(
        "no-temporary-folder-train",
        seal.format(nowhere),
        MACHINE,
        "TMPDIR",
        needs="unshare -m true",
    )
    yield Environment(
        "no-temporary-folder-dry-run",
        seal.format(_REHEARSED),
        MACHINE,
        "TMPDIR",
        needs="unshare -m true",
    )
    yield Environment(
        "no-temporary-folder-doctor", seal.format(_DOCTOR), (1,), "TMPDIR", needs="unshare -m true"
    )
    proc = "unshare -m bash -c 'mount -t tmpfs none /proc && {}'"
    yield Environment(
        "no-proc-train", proc.format(_TRAIN), MACHINE, "/proc", needs="unshare -m true"
    )


def _torchrun() -> Iterator[Environment]:
    run = "PYTHON -m torch.distributed.run --nproc-per-node 2 -m hp_train train one.toml "
    last = (
        " 2>&1 | tee out; s=${PIPESTATUS[0]}; tail -n 1 out | grep -q '^LINE' || exit 98; exit $s"
    )
    yield Environment(
        "torchrun-refusal", run + "--train.stepz 3" + last.replace("LINE", "error: .*stepz"), (1,)
    )
    long = "mkdir -p $ROOM/{1}; export TMPDIR=$ROOM/{1}; ".replace("{1}", "t" * 80)
    yield _trained("torchrun-tmpdir-long-train", long + run)


def run(folder: Path, names: Sequence[str] = (), *, most: int = 1000) -> Outcome:
    """Run the cases that a folder does not have the outcome of yet.

    Args:
        folder: Kept: `outcomes.jsonl` has a line for each case that was run.
        names: Names of cases, or parts of names; none: all.
        most: Number of cases.
    """
    began = time.monotonic()
    chosen = [e for e in environments() if not names or any(name in e.name for name in names)]
    chosen = chosen[:most]
    file = folder / "outcomes.jsonl"
    told = file.read_text().splitlines() if file.exists() else []
    known = {row["name"]: row for row in map(json.loads, told)}
    for case in chosen:
        if case.name not in known:
            known[case.name] = meet(case, folder)
            with file.open("a") as kept:
                kept.write(json.dumps(known[case.name]) + "\n")
            row = known[case.name]
            sys.stderr.write(f"{case.name}: {row['problem'] or row['status']}  {row['said']}\n")
    rows = [known[case.name] for case in chosen]
    failures = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
    skipped = [row["name"] for row in rows if row["status"] is None]
    good = sum(row["status"] == 0 for row in rows)
    notes = [f"{good} did their work, {len(rows) - good - len(skipped)} were refused in one line"]
    if skipped:
        notes.append(f"not granted by this machine: {', '.join(skipped)}")
    return Outcome("environments", len(rows), failures, time.monotonic() - began, notes)


def meet(case: Environment, folder: Path) -> dict[str, object]:
    """Run one case in a new folder, and judge it."""
    row: dict[str, object] = {"name": case.name, "problem": "", "status": None, "said": ""}
    if not _is_granted(case.needs):
        return row
    room = Path(tempfile.mkdtemp(prefix="e", dir=folder))
    try:
        lines = (f"{i} squared is {i * i}, and cubed {i**3}.\n" for i in range(600))
        (room / "text").write_text("".join(lines))
        (room / "one.toml").write_text(
            '[run]\noutput_dir = "runs"\n' + _KEYS.replace("[data]", '[data]\npaths = ["text"]')
        )
        status, printed = _run(case, room)
        row |= {"status": status, "problem": _problem(case, status, printed, room)}
        row["said"] = next((line for line in printed if _ONE_LINE.match(line)), "")
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", room], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(room, ignore_errors=True)
    return row


def _run(case: Environment, room: Path) -> tuple[int, list[str]]:
    hp = str(Path(sys.executable).with_name("hp"))
    shell = case.shell.replace("PYTHON ", f"{sys.executable} ").replace("HP ", f"{hp} ")
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    env |= {"ROOM": str(room), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    # With a limit of a file's size Python keeps half of what it compiles, for every later command.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    command = ["bash", "-c", shell]
    if case.as_anybody:
        bounds = "-dac_override,-dac_read_search"
        command = ["setpriv", "--bounding-set", bounds, "--inh-caps", bounds, *command]
    with (room / ".printed").open("w+b") as file:
        process = subprocess.Popen(
            command, cwd=room, env=env, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            status = -99
        finally:
            left = _end(process)
        file.seek(0)
        text = file.read().decode(errors="replace")
    return status, [*text.splitlines(), *([_LEFT] if left else [])]


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End what is left of a case; whether anything was."""
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
        process.poll()
    os.killpg(process.pid, 9)
    process.wait()
    return True


def _problem(case: Environment, status: int, printed: Sequence[str], room: Path) -> str:
    text = "\n".join(printed)
    told = [line for line in printed if _ONE_LINE.match(line)]
    errors = sum(line.startswith("error") for line in told)
    problems = {
        "a traceback": _NEVER.search(text) and "torchrun" not in case.name,
        "a wrong status": status not in case.statuses,
        "left a process behind": _LEFT in printed,
        f"not said: {case.says!r}": case.says not in text,
        f"{errors} errors, not one": errors > 1 and "torchrun" not in case.name,
        "a long line": any(len(line) > _LONGEST_LINE for line in told),
        "no run was kept": case.keeps and not list(room.glob("runs/*/checkpoints/step-*")),
    }
    found = "; ".join(what for what, is_so in problems.items() if is_so)
    return found and f"status {status}, {found}: {text[-400:]!r}"


@functools.cache
def _is_granted(needs: str) -> bool:
    return subprocess.run(["bash", "-c", needs], check=False, capture_output=True).returncode == 0


def main() -> int:
    """Run what is asked for.

    Returns:
        Exit status: 1 where a case went wrong.
    """
    parser = argparse.ArgumentParser(prog="environments", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names (all)")
    parser.add_argument("--folder", type=Path, help="to be kept, and gone on with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="environments-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = run(folder, options.names)
    sys.stdout.write(f"{outcome}\n")
    return int(bool(outcome.failures))


if __name__ == "__main__":
    sys.exit(main())
