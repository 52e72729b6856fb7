"""Configs and command lines with something wrong: one line each, no process.

A program of its own, since it forks for every case and must have nothing of torch in it:

    python -m integration_tests.reliability.garble COUNT SEED
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from hp_train.cli import main
from hp_train.schema import fields
from integration_tests.reliability.outcome import Outcome

_BASES = ("quickstart", "debug-deepseek-v3", "debug-gpt-oss", "debug-llama3", "debug-mixtral")
_LONGEST_LINE = 400
_SECONDS = 20.0
_SHAPES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "cp_heads")
_SIZES = ("num_heads", "num_kv_heads", "num_experts", "top_k", "dim", "num_layers")
_VALUES = (
    *("-1", "0", "1", "3", "7", "2147483647", "2147483648", "9223372036854775808", "1e400"),
    *("nan", "-inf", "1.5", "true", '""', '"x"', "[]", "[1]", '["a", 1]', "{}", "{a = 1}"),
    *("1979-05-27", "0x10", '"\\u0000"', '"' + "y" * 3000 + '"', "[" * 500 + "]" * 500),
)

Case = tuple[str, list[str]]
"""Text of a config file, and arguments."""


def run(count: int, *, seed: int) -> Outcome:
    """Run the program of this module."""
    began = time.monotonic()
    command = [sys.executable, "-m", __name__, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Outcome("configs", count, [done.stderr[-500:]], time.monotonic() - began)
    found = json.loads(done.stdout)
    return Outcome("configs", count, found["failures"], time.monotonic() - began, found["notes"])


def cases(count: int, seed: int) -> list[Case]:
    """Mutations of the shipped configs."""
    folder = Path(str(sys.modules["hp_train"].__path__[0])) / "configs"
    texts = [(folder / f"{name}.toml").read_text() for name in _BASES]
    random = Random(seed)
    found = []
    for number in range(count):
        mutate = _MUTATIONS[number % len(_MUTATIONS)]
        found.append(mutate(random.choice(texts), random))
    return found


def _typo(word: str, random: Random) -> str:
    at = random.randrange(len(word))
    return random.choice(
        [word[:at] + word[at + 1 :], word[:at] + "q" + word[at:], word[:at] + "z" + word[at + 1 :]]
    )


def _key(random: Random) -> str:
    return random.choice(sorted(fields()))


def _misspelt_key(text: str, random: Random) -> Case:
    key = _key(random)
    return text, [f"--{_typo(key, random)}={random.choice(['1', 'true', 'x'])}"]


def _wrong_value(text: str, random: Random) -> Case:
    header = random.choice([line for line in text.splitlines() if line.startswith("[")])
    section = header.strip("[]")
    name = random.choice(sorted(f.name for f in fields().values() if f.section == section))
    return f"{header}\n{name} = {random.choice(_VALUES)}\n", []


def _wrong_override(text: str, random: Random) -> Case:
    return text, [f"--{_key(random)}={random.choice(_VALUES)}"]


def _misspelt_choice(text: str, random: Random) -> Case:
    choosing = [key for key, field in fields().items() if field.choices]
    key = random.choice(sorted(choosing))
    return text, [f"{key}={_typo(random.choice(fields()[key].choices), random)}"]


def _mesh(text: str, random: Random) -> Case:
    keys = [f"mesh.{axis}={random.choice((1, 2, 3, 4, 5, 8))}" for axis in _SHAPES]
    return text, [*random.sample(keys, 3), f"launch.num_processes={random.choice((2, 4, 6, 7))}"]


def _schedule(text: str, random: Random) -> Case:
    schedule = random.choice(fields()["pipeline.schedule"].choices)
    return text, [
        f"pipeline.schedule={schedule}",
        f"pipeline.stages_per_rank={random.choice((1, 2, 3, 9))}",
        f"train.global_batch_size={random.choice((1, 7, 12, 32))}",
        f"train.microbatch_size={random.choice((1, 5, 8))}",
        f"pipeline.overlap={random.choice(('true', 'false'))}",
    ]


def _sizes(text: str, random: Random) -> Case:
    keys = [f"model.{name}={random.choice((1, 2, 3, 5, 7, 30))}" for name in _SIZES]
    return text, random.sample(keys, 3)


def _path(text: str, random: Random) -> Case:
    key = random.choice(("data.paths", "data.tokenizer", "run.init_from", "run.output_dir"))
    value = random.choice(
        ("/nowhere/at/all", "/etc/passwd/x", "/proc/1/x", "\x00", "a" * 5000, "~")
    )
    return text, [f"--{key}={value}"]


def _bytes(text: str, random: Random) -> Case:
    data = list(text)
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(data))
        data[at : at + random.choice((0, 1, 30))] = random.choice(
            ["\0", "[", "]", "=", '"', "\n\n[", "\ud7ff", "\x1b", "'''", "[[x]]\n", "a.b.c = 1\n"]
        )
    return "".join(data), []


def _lines(text: str, random: Random) -> Case:
    lines = text.splitlines()
    random.shuffle(lines)
    return "\n".join(lines[: random.randint(2, len(lines))]), []


def _arguments(text: str, random: Random) -> Case:
    return text, random.choice(
        [
            ["--train.steps"], ["--train.steps", "5", "--train.steps=6"], ["--stepz", "5"],
            ["--resume", "/nowhere"], ["--data"], ["extra.toml"], ["--train.=3"], ["--mesh.pp"],
            ["train.steps="], ["--train.steps= 5 5"], ["--", "--train.steps=5", "x"], ["-x"],
            ["--train.steps=1_0_"], ["--dry-run=yes"], ["train..steps=5"], ["--data", "\udcff"],
        ]
    )  # fmt: skip


_MUTATIONS: Sequence[Callable[[str, Random], Case]] = (
    _misspelt_key,
    _wrong_value,
    _wrong_override,
    _misspelt_choice,
    _mesh,
    _schedule,
    _sizes,
    _path,
    _bytes,
    _lines,
    _arguments,
)


def _answer(case: Case, folder: Path) -> tuple[int, str, str, float]:
    """Status, output, error and seconds of `hp train --dry-run` in a process of its own."""
    config = folder / "case.toml"
    config.write_text(case[0], errors="replace")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_program(["train", str(config), *case[1], "--dry-run"], folder)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - began > _SECONDS:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.001)
    seconds = time.monotonic() - began
    texts = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
    try:
        os.killpg(pid, signal.SIGKILL)
        texts[1] += "\nleft a process behind"
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(status), texts[0], texts[1], seconds


def _be_the_program(argv: list[str], folder: Path) -> None:
    status = 1
    try:
        os.setsid()
        for number, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        status = main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _problem(status: int, out: str, err: str) -> str:
    if status == 0 and not err and out.count("\n") == 1:
        return ""
    lines = err.splitlines()
    if status != 2 or len(lines) != 1 or not lines[0].startswith("error: ") or out:
        return f"status {status}, {len(lines)} lines: {err[-300:]!r} {out[:100]!r}"
    if len(lines[0]) > _LONGEST_LINE:
        return f"{len(lines[0])} characters: {lines[0][:200]!r}"
    if not lines[0].isprintable():
        return f"not printable: {lines[0][:200]!r}"
    return ""


def _main() -> int:
    count, seed = map(int, sys.argv[1:])
    failures, seconds, accepted = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases(count, seed)):
            status, out, err, took = _answer(case, Path(folder))
            seconds.append(took)
            accepted += status == 0
            if problem := _problem(status, out, err):
                failures.append(f"case {number}, seed {seed}, {case[1]}: {problem}")
        left = sorted(path.name for path in Path(folder).iterdir())
    if left != ["case.toml", "err", "out"]:
        failures.append(f"left behind: {left}")
    assert "torch" not in sys.modules
    median = sorted(seconds)[count // 2]
    notes = [
        f"{count - accepted} refused, {accepted} found good after all",
        f"answered in {median * 1e3:.0f} ms (median), {max(seconds):.2f} s at most",
    ]
    sys.stdout.write(json.dumps({"failures": failures, "notes": notes}))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
