"""Configs and command lines with something wrong: one line each, no process.

A program of its own, since it forks for every case and must have nothing of torch in it:

    python -m integration_tests.reliability.fuzz COUNT SEED
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from hp_trainer.config.schema import fields
from integration_tests.reliability import strangers
from integration_tests.reliability.outcome import Outcome

_BASES = ("quickstart", "debug-deepseek-v3", "debug-gpt-oss", "debug-llama3", "debug-mixtral")
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
    # With any flag that matters a program is not forked from one that has imported torch.
    return strangers.run_program(__name__, "configs", count, seed=seed, flags=["-s"])


def cases(count: int, seed: int) -> list[Case]:
    """Mutations of the shipped configs."""
    folder = Path(str(sys.modules["hp_trainer"].__path__[0])) / "configs"
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


def _bomb(text: str, random: Random) -> Case:
    """What would take long to be made, or to be read."""
    bombs: Sequence[Case] = (
        ("[train]\n" + "".join(f"k{n} = 1\n" for n in range(200_000)), []),
        (f"[run]\nname = '{'y' * 50_000_000}'\n", []),
        ("a." * 8_000 + "b = 1\n", []),
        ("a = " + "{a=" * 20_000, []),
        ("[train]\nsteps = 0x" + "f" * 10_000 + "\n", []),
        (text, ["mesh.pp=1000000", "model.num_layers=2147483647"]),
        (text, ["mesh.pp=1000000", "pipeline.stages_per_rank=1"]),
        (text, ["mesh.dp_replicate=2147483647"]),
        (text, ["train.global_batch_size=2147483640", "train.microbatch_size=1"]),
        (text, ["model.num_experts=2147483647"]),
        (text, ["mesh.pp=60000", "mesh.stage_tp=[" + "1," * 60_000 + "]"]),
    )
    return random.choice(bombs)


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
    _bomb,
)


def _stranger(number: int, case: Case, seed: int) -> strangers.Case:
    text, argv = case

    def make(room: Path, _theirs: Path) -> list[str]:
        config = room / "case.toml"
        config.write_text(text, errors="replace")
        return ["train", str(config), *argv, "--dry-run"]

    what = f"fuzzed config {number}, seed {seed}, {argv}"
    return strangers.Case(what, make, refusals=(2,), accepted="is good", writes=False)


def _main() -> int:
    count, seed = map(int, sys.argv[1:])
    found = [_stranger(*numbered, seed) for numbered in enumerate(cases(count, seed))]
    with tempfile.TemporaryDirectory() as folder:
        failures, notes = strangers.meet_all(found, Path(folder))
    assert "torch" not in sys.modules
    strangers.tell(count, failures, notes)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
