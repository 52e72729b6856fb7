"""Models of strangers: `hp import-hf` on folders with something wrong, one line each.

A program of its own, which has torch in it before it forks for every case:

    python -m integration_tests.reliability.models COUNT SEED
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from msgspec.structs import replace

from hp_checkpoint.safetensors import INDEX
from hp_trainer.config.options import resolve
from hp_trainer.model.transformer import model_shapes
from hp_transformers.families import save_weights
from hp_transformers.families.published import FAMILIES
from integration_tests.reliability.outcome import Outcome
from integration_tests.reliability.strangers import Case, meet_all, run_program, tell

_PRESETS = ("quickstart", "debug-llama3", "debug-mixtral", "debug-deepseek-v3", "debug-gpt-oss")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_NO_COUNT = ('"7"', "1.5", "true", "[]", "{}", "-1", "2147483648", "1" + "0" * 40, "1e400", "1e9")
_NO_NUMBER = ('"x"', "true", "[]", "{}", "-1.0", "1e400", "-1e400", "NaN", "1" + "0" * 400)
_NO_FLAG = ('"false"', "0", "1", "[]", "{}", '"true"')
_NO_LIST = ('"x"', "5", "{}", "[5]", '["x"]', "true")
_OTHERS = (
    ("model_type", ('"bert"', "5", "[]", "null", '"llama\\n"', "{}")),
    ("hidden_act", ('"gelu"', "0", "[]", "true")),
    ("attention_dropout", ("0.1", '"0"', "[]", "false")),
    ("quantization_config", ('{"quant_method": "fp8"}', '"x"', "[]", "false", "{1: 2}")),
    ("torch_dtype", ('"int8"', "5", "[]", '"torch.float32"')),
    ("rope_scaling", ('"yarn"', "5", "[]", '{"rope_type": "dynamic"}', '{"rope_type": []}')),
    ("rope_scaling", ('{"rope_type": "yarn"}', '{"rope_type": "yarn", "factor": "4"}')),
    ("rope_scaling", ('{"rope_type": "yarn", "factor": 0}', '{"full_attention": {}}')),
    (
        "rope_scaling",
        ('{"type": "llama3", "factor": 2.0}', '{"rope_theta": [], "type": "default"}'),
    ),
)
Make = Callable[[Path, Path], None]
"""Changes a good folder; the second is somebody else's."""


def run(count: int, *, seed: int) -> Outcome:
    """Run the program of this module."""
    return run_program(__name__, "models", count, seed=seed)


def base_folder(preset: str, folder: Path) -> Path:
    """Write a good model."""
    config = resolve(preset, env={}).config
    model = replace(config.model, vocab_size=257, max_positions=128)
    tensors = {name: torch.zeros(shape) for name, shape in model_shapes(model).items()}
    save_weights(folder, tensors, model, dtype=torch.float32)
    return folder


def cases(count: int, seed: int, good: Sequence[Path]) -> list[Case]:
    """Every kind of mutant of every family in turn."""
    found = [case for folder in good for case in _cases(folder)]
    Random(seed).shuffle(found)
    return found[:count]


def _cases(good: Path) -> Iterator[Case]:
    text = (good / "config.json").read_text()
    yield _case(good, "nothing is wrong", _nothing, accepted="[model]")
    for key, value in _values(json.loads(text)):
        new = _with_value(text, key, value)
        # A list of layers that is no model of ours is not told from one that is no list.
        yield _case(good, f"{key} = {value[:40]}", _config(new), names="config.json")
    for what, data in _texts(text):
        yield _case(good, what, _config(data), names="config.json")
    for what, make in _KINDS.items():
        for name in ("config.json", INDEX, _weights(good).name):
            yield _case(good, f"{name} {what}", _replaced(name, make), names=name)
    for what, index in _indices(good):
        yield _case(good, f"index {what}", _written(INDEX, index))
    for what, header in _headers(good):
        yield _case(good, f"header {what}", _written(_weights(good).name, header))


def _case(
    good: Path, what: str, change: Make, *, names: str = "", accepted: str | None = None
) -> Case:
    def make(room: Path, theirs: Path) -> Sequence[str]:
        folder = room / "model"
        folder.mkdir()
        for path in good.iterdir():
            os.link(path, folder / path.name)
        change(folder, theirs)
        return ["import-hf", str(folder)]

    return Case(f"{good.name}: {what}", make, refusals=(2,), names=names, accepted=accepted)


def _values(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys with values that no model has."""
    defaults = FAMILIES[settings["model_type"]].defaults
    read: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), **defaults}
    for key, value in read.items():
        known = settings.get(key) if value is None else value
        if key in ("layer_types", "mlp_only_layers"):
            wrong: Sequence[str] = _NO_LIST
        elif isinstance(known, bool):
            wrong = _NO_FLAG
        elif isinstance(known, float):
            wrong = _NO_NUMBER
        else:
            wrong = _NO_COUNT if "vocab" not in key else _NO_COUNT[:-1]
        yield from ((key, text) for text in wrong)
    yield from ((key, value) for key, values in _OTHERS for value in values)


def _texts(text: str) -> Iterator[tuple[str, bytes]]:
    """Files that are no JSON object."""
    good = text.encode()
    yield "cut", good[: len(good) // 2]
    yield "empty", b""
    yield "given twice", good.replace(b"{", b'{"hidden_size": 5,', 1)
    yield "not UTF-8", good.replace(b"silu", b"sil\xff")
    yield "with a mark", b"\xef\xbb\xbf" + good
    yield "a list", b"[" + good + b"]"
    yield "deep", b'{"a":' * 100_000
    yield "deep lists", b'{"a": ' + b"[" * 100_000
    yield "an integer of many digits", good.replace(b"{", b'{"x": ' + b"9" * 5_000 + b",", 1)
    yield "long", good.replace(b"{", b'{"x": "' + b"y" * 5_000_000 + b'",', 1)
    yield "two objects", good + good


def _indices(good: Path) -> Iterator[tuple[str, bytes]]:
    index = json.loads((good / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    wrong: Any
    for wrong in ("../x", "/etc/passwd", "", ".", "a/b", 5, None, [], {}, "none.safetensors", "\0"):
        changed = {**index, "weight_map": {**index["weight_map"], name: wrong}}
        yield f"file {wrong!r}", json.dumps(changed).encode()
    for wrong in ([], "x", 5, None, {}):
        yield f"map {wrong!r}", json.dumps({"weight_map": wrong}).encode()
    yield "deep", b'{"weight_map":' * 100_000
    yield "a list", b"[]"
    yield "not UTF-8", b'{"weight_map": {"\xff": "x"}}'


def _headers(good: Path) -> Iterator[tuple[str, bytes]]:
    """Files of weights, all of a header and few bytes."""
    data = _weights(good).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = [name for name in header if name != "__metadata__"][:2]
    begin, end = header[first]["data_offsets"]
    for what, change in {
        "out of the file": {"data_offsets": [begin, 1 << 60]},
        "backwards": {"data_offsets": [end, begin]},
        "negative": {"data_offsets": [-8, end]},
        "overlapping": {"data_offsets": header[second]["data_offsets"]},
        "of an unknown dtype": {"dtype": "Q7"},
        "of integers": {"dtype": "I32"},
        "of another shape": {"shape": [end - begin]},
        "of a negative shape": {"shape": [-1, -1]},
        "of a shape of many dims": {"shape": [2] * 100_000},
        "of a huge shape": {"shape": [1 << 62] * 8},
        "of no shape": {"shape": "x"},
    }.items():
        text = json.dumps({**header, first: {**header[first], **change}}).encode()
        yield what, len(text).to_bytes(8, "little") + text + data[8 + length :]
    yield "cut off", data[: length // 2]
    yield "of 0 bytes", bytes(8) + data[8:]
    yield "of 2^63 bytes", (1 << 63).to_bytes(8, "little") + data[8:]
    yield "that is none", data[:8] + b"x" * length + data[8 + length :]
    yield "without bytes behind", data[: 8 + length]


def _weights(good: Path) -> Path:
    return next(good.glob("*.safetensors"))


def _with_value(text: str, key: str, value: str) -> bytes:
    settings = json.loads(text)
    settings.pop("dtype" if key == "torch_dtype" else key, None)
    rest = json.dumps(settings)[1:]
    return f'{{"{key}": {value}, {rest}'.encode()


def _nothing(folder: Path, theirs: Path) -> None:
    """Change nothing."""


def _written(name: str, data: bytes) -> Make:
    def change(folder: Path, _: Path) -> None:
        (folder / name).unlink()  # it is a link to the good one
        (folder / name).write_bytes(data)

    return change


def _config(data: bytes) -> Make:
    return _written("config.json", data)


def _replaced(name: str, make: Callable[[Path, Path], None]) -> Make:
    def change(folder: Path, theirs: Path) -> None:
        (folder / name).unlink()
        make(folder / name, theirs)

    return change


_KINDS: dict[str, Callable[[Path, Path], None]] = {
    "is a pipe": lambda path, _: os.mkfifo(path),
    "is a folder": lambda path, _: path.mkdir(),
    "is a device": lambda path, _: path.symlink_to("/dev/zero"),
    "is a link to nothing": lambda path, _: path.symlink_to("nowhere"),
    "is a link to itself": lambda path, _: path.symlink_to(path.name),
    "is a file of somebody": lambda path, theirs: path.symlink_to(theirs / "secret"),
}


def _main() -> int:
    count, seed = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        good = [base_folder(name, root / "good" / name) for name in _PRESETS]
        chosen = cases(count, seed, good)
        (root / "room").mkdir()
        failures, notes = meet_all(chosen, root / "room")
    tell(len(chosen), failures, notes)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
