"""Text and directories of tokens that are wrong: one line each, and nothing else is touched.

A program of its own, which imports torch once and forks for every case; each case is one rank that
trains in its process, as torchrun would start it:

    python -m integration_tests.reliability.mutants COUNT SEED
"""

import functools
import gzip
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import hp_trainer.training.train  # noqa: F401 - imported once, for all cases
from integration_tests.reliability.outcome import Outcome
from integration_tests.reliability.strangers import Case, ask, meet_all, run_program, tell

_KEYS = {
    "data.seq_len": 16,
    "data.eval_fraction": 0.2,
    "train.global_batch_size": 4,
    "train.microbatch_size": 4,
    "train.eval_batches": 1,
    "train.eval_every": 2,
    "train.sample_tokens": 0,
    "train.async_save": "false",
    "mesh.pp": 1,
    "mesh.dp_replicate": 1,
    "mesh.ep": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.stages_per_rank": 1,
    "model.dim": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.num_experts": 0,
    "model.dense_hidden": 16,
    "launch.threads_per_process": 1,
}
_FILES = ("train.bin", "train.sums", "eval.bin", "eval.sums", "index.json")
_WORDS = "Gr\u00fc\u00dfe aus \u6771\u4eac, and some more words in a row, number %d.\n"


class _Place(NamedTuple):
    """A file to damage, what a seed decides, and files of others to link to."""

    path: Path
    random: Random
    theirs: Path


Damage = Callable[[_Place], None]


def run(count: int, *, seed: int) -> Outcome:
    """Run the program of this module."""
    return run_program(__name__, "mutants", count, seed=seed)


def text(lines: int = 400) -> str:
    """Some text, not all of it ASCII."""
    return "".join(_WORDS % number for number in range(lines))


def _bit(at: _Place) -> None:
    data = bytearray(at.path.read_bytes())
    bit = at.random.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    at.path.write_bytes(data)


def _cut(at: _Place) -> None:
    os.truncate(at.path, at.random.randrange(at.path.stat().st_size))


def _grown(at: _Place) -> None:
    at.path.write_bytes(at.path.read_bytes() + at.random.randbytes(at.random.randint(1, 99)))


def _rotated(at: _Place) -> None:
    data = at.path.read_bytes()
    by = at.random.randrange(1, len(data))
    if data[by:] + data[:by] == data:
        by = 1
    at.path.write_bytes(data[by:] + data[:by])


def _garbage(at: _Place) -> None:
    at.path.write_bytes(at.random.randbytes(at.path.stat().st_size))


def _other_file(at: _Place) -> None:
    names = [name for name in _FILES if name != at.path.name]
    shutil.copyfile(at.path.with_name(at.random.choice(names)), at.path)


def _missing(at: _Place) -> None:
    at.path.unlink()


def _link(at: _Place) -> None:
    real = at.path.rename(at.path.with_name("real"))
    theirs = at.theirs
    at.path.symlink_to(at.random.choice([real, theirs / "secret", theirs / "nothing", theirs]))


def _pipe(at: _Place) -> None:
    at.path.unlink()
    os.mkfifo(at.path)


def _socket(at: _Place) -> None:
    at.path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(at.path.parent)  # names of sockets are short
        listener.bind(at.path.name)
        os.chdir(before)


def _folder(at: _Place) -> None:
    at.path.unlink()
    at.path.mkdir()


_DAMAGES: Sequence[Damage] = (
    *(_bit, _bit, _bit, _cut, _grown, _rotated, _garbage),
    *(_other_file, _missing, _link, _pipe, _socket, _folder),
)


def _wrong_field(at: _Place) -> None:
    """Another value for one field of the index."""
    index = json.loads(at.path.read_text())
    table = index
    if at.random.random() < 0.4:
        table = index[at.random.choice(("train", "eval"))]
    key = at.random.choice([*table, "more"])
    values = [-1, 0, 2**31, 10**40, 1.5, "", "x", None, [], {}, True, "\x1b[2J", [[[]]], "0" * 32]
    table[key] = at.random.choice([value for value in values if value != table.get(key)])
    at.path.write_text(json.dumps(index))


def _wrong_index(at: _Place) -> None:
    """Something else for an index."""
    content = at.path.read_text()
    at.path.write_text(
        at.random.choice(
            [
                *("", "null", "[]", "{}", "{", "1e999", "NaN", '"', "[" * 60_000, content[:-1]),
                *(content * 2, f"\ufeff{content}", content.replace('"', "'"), "{" * 9, "\0" * 9),
                content.replace('"train"', '"train":1,"train"', 1),
            ]
        )
    )


def _linked_folder(at: _Place) -> None:
    """The folder of the index is a link."""
    folder, theirs = at.path.parent, at.theirs
    real = folder.rename(folder.with_name("real"))
    folder.symlink_to(at.random.choice([real, theirs / "empty-folder", theirs / "folder", theirs]))


def _other_folder(at: _Place) -> None:
    """The folder of the index is none."""
    shutil.rmtree(at.path.parent)
    damage = at.random.choice([_pipe, _socket])
    damage(at._replace(path=_touched(at.path.parent)))


def _touched(path: Path) -> Path:
    path.touch()
    return path


_INDEX_DAMAGES: Sequence[Damage] = (
    *(_wrong_field, _wrong_field, _wrong_field, _wrong_index, _wrong_index),
    *(_linked_folder, _other_folder),
)


def _directory_cases(base: Path, other: Path, seed: int) -> Iterator[Case]:
    """Damaged tokens of a run that is resumed; without end."""
    for number in range(10**9):
        random = Random(f"{seed} {number}")
        turn = number % 5
        if turn == 4:
            damage = _INDEX_DAMAGES[number // 5 % len(_INDEX_DAMAGES)]
            name = "index.json"
        else:
            damage = _DAMAGES[number // 5 % len(_DAMAGES)]
            name = _FILES[(turn + number // 5 // len(_DAMAGES)) % len(_FILES)]
        what = f"{damage.__name__} {name}, seed '{seed} {number}'"
        make = functools.partial(_damaged, base, name, damage, random=random)
        yield Case(what, make, refusals=(2, 3, 9), begins=True, env=_rank())
        if number % 20 == 7:
            exchange = functools.partial(_exchanged, base, other)
            yield Case("data of another run", exchange, refusals=(3,), env=_rank())


def _damaged(
    base: Path, name: str, damage: Damage, room: Path, theirs: Path, *, random: Random
) -> list[str]:
    run_dir = room / "run"
    shutil.copytree(base, run_dir)
    damage(_Place(run_dir / "data" / name, random, theirs))
    return _resumed(run_dir)


def _exchanged(base: Path, other: Path, room: Path, _: Path) -> list[str]:
    run_dir = room / "run"
    shutil.copytree(base, run_dir)
    shutil.rmtree(run_dir / "data")
    shutil.copytree(other / "data", run_dir / "data")
    return _resumed(run_dir)


def _resumed(run_dir: Path, **keys: object) -> list[str]:
    given = [f"--{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return ["train", "--resume", str(run_dir), "--train.steps=4", *given]


def _lines(**keys: object) -> bytes:
    row = {"text": "some words in a row " * 20} | keys
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _texts() -> list[tuple[str, bytes]]:
    """Names and contents of files that are no text to train on."""
    good, plain = _lines() * 40, text()
    raw = plain.encode()
    encodings = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "shift-jis")
    found = [("a.txt", plain.encode(name, errors="replace")) for name in encodings]
    found += [("a.txt", plain.encode(name, errors="ignore")) for name in ("latin-1", "cp1252")]
    # A character that is cut off, too long a form, half a pair, beyond Unicode, a byte that is none
    broken = (
        b"\xe6\x9d",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xff",
        b"\x80",
        b"\0",
    )
    for piece in broken:
        found += [("a.txt", raw + piece), ("a.txt", piece + raw), ("a.txt", raw * 9 + piece + raw)]
        found += [("a.jsonl", good + b'{"text": "' + piece + b'"}\n')]
    lines = (
        *(b"{", b"}", b"[]", b"1", b"null", b'"text"', b"text", b"{'text': 'a'}", b'{"text": 1}'),
        *(b'{"text": null}', b'{"text": ["a"]}', b'{"txt": "a"}', b'{"text": "a",}', b"[" * 99_999),
        *(
            b'{"text": "a"}{"text": "b"}',
            b'{"text": "a\\ud800"}',
            b'{"text": "\\u0000"}',
            b"\x1f\x8b",
        ),
        *(b'{"a":' * 9999, b'{"text": "a', b'{"text": "\\x"}', b'{"text": NaN}', b'{"": 1}'),
    )
    for line in lines:
        found += [("a.jsonl", line + b"\n" + good), ("a.jsonl", good * 9 + line + b"\n")]
    found += [("a.txt", gzip.compress(raw)), ("a.gz", gzip.compress(raw)), ("a.jsonl", raw)]
    found += [("a.txt", b""), ("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.txt", b"\xef\xbb\xbf")]
    found += [
        ("a.txt", b"short"),
        ("a\x1b[2J.txt", b"\xff"),
        ("a\nb.jsonl", b"{\n"),
        ("a.dat", raw),
    ]
    return found


def _text_cases(seed: int) -> Iterator[Case]:
    """Text that cannot be used, as a file or in a folder; without end."""
    texts = _texts()
    for number in range(10**9):
        random = Random(f"text {seed} {number}")
        name, content = texts[number % len(texts)]
        in_folder = random.random() < 0.3 and name != "a.dat"
        if number >= len(texts):  # the same, damaged at random
            name, content = "a.txt", text().encode() + random.randbytes(200) + b"\xff"
        in_folder = in_folder or name == "a.dat"
        make = functools.partial(_with_text, name, content, in_folder)
        yield Case(f"text {number} {name!r}", make, refusals=(2, 3), env=_rank())
        if number % 7 == 3:
            kind = (_pipe, _socket, _link, _folder)[number // 7 % 4]
            odd = functools.partial(_with_odd_text, kind, random)
            yield Case(f"{kind.__name__} as text", odd, refusals=(2, 3), env=_rank())


def _with_text(name: str, content: bytes, in_folder: bool, room: Path, _: Path) -> list[str]:
    (room / "text").mkdir()
    (room / "text" / name).write_bytes(content)
    return _new(room, room / "text" if in_folder else room / "text" / name)


def _with_odd_text(kind: Damage, random: Random, room: Path, _: Path) -> list[str]:
    (room / "text").mkdir()
    path = _touched(room / "text" / "a.txt")
    empty = room / "nothing"
    kind(_Place(path, random, empty))
    return _new(room, random.choice([path, path.parent]))


def _new(room: Path, data: Path) -> list[str]:
    keys = _KEYS | {"run.output_dir": room, "run.name": "run", "train.steps": 1}
    return ["train", "--data", str(data), *(f"--{key}={value}" for key, value in keys.items())]


def _good_cases(base: Path, data: Path) -> Iterator[Case]:
    """What must go well, or the others show nothing."""
    files = {
        "a.txt": text().encode(),
        "b.txt": b"\xef\xbb\xbf" + text().replace("\n", "\r\n").encode(),
        "c.jsonl": b"\xef\xbb\xbf"
        + _lines(text="a\u2028b\u2029c\u0085d " * 99).replace(b"\n", b"\r\n"),
        "d.md": text(9).replace("\n", "").encode(),
    }
    for name, content in files.items():
        make = functools.partial(_with_text, name, content, False)
        yield Case(f"good {name}", make, refusals=(), accepted="", env=_rank())
    keys: list[Mapping[str, object]] = [
        {},
        {"train__global_batch_size": 8},
        {"data__paths": f"[{json.dumps(str(data))}]"},
    ]
    for given in keys:
        again = functools.partial(_again, base, given)
        yield Case(f"resumed with {dict(given)}", again, refusals=(), accepted="", env=_rank())
    for key, value in (("data__seq_len", 32), ("run__seed", 5), ("data__eval_fraction", 0.3)):
        other = functools.partial(_again, base, {key: value})
        yield Case(f"resumed with {key}", other, refusals=(2,), names="must equal", env=_rank())


def _again(base: Path, keys: Mapping[str, object], room: Path, _: Path) -> list[str]:
    shutil.copytree(base, room / "run")
    return _resumed(room / "run", **keys)


def cases(count: int, seed: int, folder: Path) -> list[Case]:
    """What must go well, and `count` cases that must not, half of them text."""
    bases = []
    for name, content in (("one", text()), ("two", text(500))):
        (folder / name).mkdir()
        (folder / f"{name}.txt").write_text(content)
        argv = [*_new(folder / name, folder / f"{name}.txt"), "--train.log_every=1"]
        argv = [part.replace("--train.steps=1", "--train.steps=2") for part in argv]
        answer = ask(argv, folder, env=_rank())
        if answer.status:
            raise RuntimeError(f"no run to damage: {answer}")
        bases.append(folder / name / "run")
    series = (_text_cases(seed), _directory_cases(bases[0], bases[1], seed))
    bad = islice((next(one) for one in cycle(series)), count)
    return [*_good_cases(bases[0], folder / "one.txt"), *bad]


def _rank() -> Mapping[str, str]:
    """What torchrun would say to a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return MappingProxyType(world | address)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        scratch = Path(temporary)
        os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
        made = cases(int(sys.argv[1]), int(sys.argv[2]), scratch)
        found_failures, found_notes = meet_all(made, scratch)
    tell(len(made), found_failures, found_notes)
