"""Folders of models with something wrong, or only odd: every kind of change that strangers make.

A change writes the files of a folder anew from a good model. What the model then is, transformers
decides: a change may well leave it as it was.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_NUMBERS = (0, 1, 2, 3, 5, 8, 9, 0.0, 0.5, 1e-3, 1e4, True, False, None)


@dataclass(frozen=True)
class Good:
    """A good model.

    Attributes:
        config: Its `config.json`.
        tensors: Its weights, by their names in files.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, folder: Path) -> "Good":
        """Read a folder with one file of weights."""
        return cls(json.loads((folder / "config.json").read_text()), load_file(folder / SINGLE))

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the embedding, and of the output matrix, which files need not have."""
        embeddings = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
        embedding = next(n for n in self.tensors if n.endswith(embeddings))
        return embedding, "embed_out.weight" if "embed_in" in embedding else "lm_head.weight"


Change = Callable[[Path, Good, Random], str]
"""Writes a folder; says what is odd about it."""


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a folder with one file of weights."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, folder / SINGLE)


def write_shards(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], count: int = 2
) -> dict[str, str]:
    """Write a folder with an index; returns which file has which tensor."""
    (folder / "config.json").write_text(json.dumps(config))
    listed: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        inside = {n: tensors[n].clone() for n in sorted(tensors)[number::count]}
        save_file(inside, folder / file)
        listed |= dict.fromkeys(inside, file)
    write_index(folder, listed)
    return listed


def write_index(folder: Path, listed: Mapping[str, str], name: str = INDEX) -> None:
    """Write an index."""
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": dict(listed)}))


def _other(tensor: Tensor, random: Random) -> Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return torch.randn(tensor.shape, generator=generator).mul(0.3).to(tensor.dtype)


def _tied(folder: Path, good: Good, random: Random) -> str:
    """The flag and both matrices, in any combination."""
    embedding, head = good.ends
    flag = random.choice([True, False, None])
    kind = random.choice(["none", "equal", "other", "one element", "alone", "rounded"])
    tensors = {n: t for n, t in good.tensors.items() if n != head}
    table = tensors[embedding]
    if kind == "other":
        tensors[head] = _other(table, random)
    elif kind == "one element":
        tensors[head] = table.clone()
        tensors[head].flatten()[random.randrange(table.numel())] += 0.5
    elif kind == "rounded":
        tensors[head] = table.bfloat16()
    elif kind != "none":
        tensors[head] = table.clone()
    if kind == "alone":
        del tensors[embedding]
    config = {k: v for k, v in good.config.items() if k != "tie_word_embeddings"}
    config |= {} if flag is None else {"tie_word_embeddings": flag}
    write(folder, config, tensors)
    return f"tie_word_embeddings {flag}, output matrix: {kind}"


def _doubled(folder: Path, good: Good, random: Random) -> str:
    """A tensor, or all, in two places."""
    kind = random.choice(["in two shards", "beside shards", "beside shards, other", "short name"])
    name = random.choice(sorted(good.tensors))
    if kind == "in two shards":
        listed = write_shards(folder, good.config, good.tensors)
        other = next(file for file in {*listed.values()} if file != listed[name])
        inside = load_file(folder / other)
        inside[name] = random.choice(
            [good.tensors[name].clone(), _other(inside[name], random)]
            if name in inside
            else [_other(good.tensors[name], random)]
        )
        save_file(inside, folder / other)
    elif kind == "short name":
        tensors = dict(good.tensors)
        tensors[name.partition(".")[2]] = _other(tensors[name], random)
        write(folder, good.config, tensors)
    else:
        write_shards(folder, good.config, good.tensors)
        changed = dict(good.tensors)
        if kind.endswith("other"):
            changed[name] = _other(changed[name], random)
        save_file({n: t.clone() for n, t in changed.items()}, folder / SINGLE)
    return f"{name} {kind}"


def _stale(folder: Path, good: Good, random: Random) -> str:
    """Files of another time, or for other programs."""
    kinds: dict[str, Callable[[], None]] = {
        "a shard too many": lambda: _save_other(folder, "model-00003-of-00003.safetensors", good),
        "a file of no index": lambda: _save_other(folder, "extra.safetensors", good),
        "a variant": lambda: _save_other(folder, "model.fp16.safetensors", good),
        "consolidated": lambda: _save_other(folder, "consolidated.safetensors", good),
        "pytorch_model.bin": lambda: torch.save({}, folder / "pytorch_model.bin"),
        "an adapter": lambda: _adapter(folder),
        "another index": lambda: write_index(folder, {}, "model.fp16.safetensors.index.json"),
        "weights by a key": lambda: _by_key(folder, good),
        "a shard that is gone": lambda: next(folder.glob("model-00002*")).unlink(),
        "an index that lists more": lambda: _listed(folder, {good.ends[1]: listed_in}),
        "an index that lists less": lambda: _listed(folder, {}, less=1),
        "an index that lists elsewhere": lambda: _listed(folder, dict.fromkeys(names, listed_in)),
    }
    what = random.choice(sorted(kinds))
    listed = write_shards(folder, good.config, good.tensors)
    listed_in = random.choice(sorted(listed.values()))
    names = random.sample(sorted(listed), 3)
    kinds[what]()
    return what


def _listed(folder: Path, more: Mapping[str, str], *, less: int = 0) -> None:
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    write_index(folder, {**dict(sorted(listed.items())[less:]), **more})


def _save_other(folder: Path, name: str, good: Good) -> None:
    save_file({n: t.clone() * 2 for n, t in good.tensors.items()}, folder / name)


def _adapter(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")


def _by_key(folder: Path, good: Good) -> None:
    _save_other(folder, "other.safetensors", good)
    config = {**good.config, "transformers_weights": "other.safetensors"}
    (folder / "config.json").write_text(json.dumps(config))


def _renamed(folder: Path, good: Good, random: Random) -> str:
    """A tensor under another name, or two that have changed places."""
    tensors = dict(good.tensors)
    kind = random.choice(["swapped", "other name", "no prefix", "next layer", "old name"])
    name = random.choice(sorted(tensors))
    if kind == "swapped":
        alike = [n for n, t in tensors.items() if n != name and t.shape == tensors[name].shape]
        other = random.choice(sorted(alike) or [name])
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind == "no prefix":
        tensors = {n.removeprefix("model."): t for n, t in tensors.items()}
    else:
        old = {".weight": ".gamma", ".bias": ".beta"}
        end = name[name.rindex(".") :]
        new = {
            "other name": f"{name}_old",
            "next layer": name.replace(".0.", ".9."),
            "old name": name.removesuffix(end) + old.get(end, end),
        }[kind]
        tensors[new] = tensors.pop(name)
    write(folder, good.config, tensors)
    return f"{name}: {kind}"


def _extra(folder: Path, good: Good, random: Random) -> str:
    """A tensor that is none of the model, or that it makes by itself."""
    layers = [n for n in good.tensors if ".0." in n]
    path = layers[0].partition(".0.")[0] + ".0."
    frequency = 1e4 ** -(torch.arange(0, 8, 2) / 8)
    beyond = {
        n.replace(".0.", f".{random.choice([2, 3, 4, 46, 61])}."): t
        for n, t in good.tensors.items()
        if ".0." in n
    }
    kinds: dict[str, dict[str, Tensor]] = {
        "frequencies": {f"{path}self_attn.rotary_emb.inv_freq": frequency},
        "other frequencies": {f"{path}self_attn.rotary_emb.inv_freq": frequency * 0.5},
        "a bias": {f"{path}self_attn.q_proj.bias": torch.ones(16)},
        "a mask": {f"{path}attention.bias": torch.ones(1, 1, 64, 64).tril().bool()},
        "a mask of old gpt2": {f"{path}attn.bias": torch.ones(1, 1, 64, 64).tril()},
        "another mask": {f"{path}attention.bias": torch.ones(1, 1, 64, 64).bool()},
        "masked_bias": {f"{path}attention.masked_bias": torch.tensor(-1e9)},
        "positions": {"model.position_ids": torch.arange(64)},
        "state": {f"{path}self_attn._extra_state": torch.zeros(3, dtype=torch.uint8)},
        "a layer": beyond,
        "mtp": {"mtp.norm.weight": torch.ones(16)},
        "anything": {"model.anything": torch.ones(3)},
    }
    what = random.choice(sorted(kinds))
    write(folder, good.config, {**good.tensors, **kinds[what]})
    return what


def _missing(folder: Path, good: Good, random: Random) -> str:
    """One tensor less, or many."""
    name = random.choice(sorted(good.tensors))
    gone = random.choice(
        [name, name.rpartition(".")[0], name.rpartition(".")[0].rpartition(".")[0]]
    )
    write(folder, good.config, {n: t for n, t in good.tensors.items() if not n.startswith(gone)})
    return f"without {gone}"


def _dtypes(folder: Path, good: Good, random: Random) -> str:
    """Another dtype, of one tensor or of all, or of the config alone."""
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.float32]
    dtypes += [torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    dtype = random.choice(dtypes)
    name = random.choice([*sorted(good.tensors), "", "config.json"])
    tensors = {n: t.to(dtype) if name in ("", n) else t for n, t in good.tensors.items()}
    said = {"dtype": str(dtype).removeprefix("torch.")} if name == "config.json" else {}
    write(folder, {**good.config, **said}, tensors)
    return f"{name or 'all'} as {dtype}"


def _shapes(folder: Path, good: Good, random: Random) -> str:
    """Another shape with other or the same number of elements."""
    name = random.choice(sorted(good.tensors))
    tensor = good.tensors[name]
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.mT if t.ndim > 1 else t[None],
        "flat": lambda t: t.flatten(),
        "with a dim more": lambda t: t[None],
        "cut": lambda t: t[:-1],
        "longer": lambda t: torch.cat([t, t[:1]]),
        "one row": lambda t: t[:1],
        "empty": lambda t: t[:0],
    }
    what = random.choice(sorted(kinds))
    write(folder, good.config, {**good.tensors, name: kinds[what](tensor).contiguous()})
    return f"{name} {what}"


def _config(folder: Path, good: Good, random: Random) -> str:
    """Another value of one key, or none."""
    key = random.choice(sorted(good.config.keys() - {"architectures", "transformers_version"}))
    value = good.config[key]
    config = dict(good.config)
    if random.random() < 0.15:
        del config[key]
        what = "absent"
    else:
        if isinstance(value, dict):
            inner = random.choice(sorted(value))
            config[key] = {**value, inner: random.choice([*_OTHER_NUMBERS, "yarn", "linear"])}
        elif isinstance(value, list):
            config[key] = random.choice([value[::-1], value[1:], [], None, value * 2, [0], [1]])
        elif isinstance(value, str):
            config[key] = random.choice(["gelu", "relu", "softmax", "greedy", "float16", "llama"])
        elif type(value) is bool:
            config[key] = not value
        elif isinstance(value, int | float) and value:
            config[key] = random.choice([value * 2, value // 2 or value, value + 1, value - 1])
        else:
            config[key] = random.choice(_OTHER_NUMBERS)
        what = json.dumps(config[key])[:80]
    write(folder, config, good.tensors)
    return f"{key} = {what}"


CHANGES: dict[str, Change] = {
    "tied": _tied,
    "doubled": _doubled,
    "stale": _stale,
    "renamed": _renamed,
    "extra": _extra,
    "missing": _missing,
    "dtypes": _dtypes,
    "shapes": _shapes,
    "config": _config,
}
"""By kind."""
