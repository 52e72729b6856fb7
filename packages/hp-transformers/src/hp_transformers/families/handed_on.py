"""The files of the original model besides its weights, copied into the folder of an export."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hp_base.atomic_write import replace_file
from hp_base.dtypes import dtype_name
from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_checkpoint.manifest import DTYPES
from hp_checkpoint.weight_files import first_of
from hp_data import load_tokenizer
from hp_data.tokenizer import MARK, ByteTokenizer, byte_tokenizer
from hp_trainer.config import Config
from hp_trainer.config.rules.files import TOKENIZER
from hp_transformers.families.config import as_text
from hp_transformers.families.family import Json, Keys
from hp_transformers.families.files import Before
from hp_transformers.families.load import FLOATS
from hp_transformers.original import INDEX, OTHER_WEIGHTS, SETTINGS, Original

_TOKENIZER_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"
_NAMED = "special_tokens_map.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token")
_CLASS = "tokenizer_class"
_PLAIN = {_CLASS: "PreTrainedTokenizerFast"}
"""Without a class, transformers makes a tokenizer of the kind that models of this type have."""
# What a run computes in to keep the dtype of files.
_COMPUTED_IN = {"BF16": "bfloat16", "F16": "float32", "F32": "float32", "F64": "float64"}


class Tokens(NamedTuple):
    """The special tokens of a model that its files have to say.

    Attributes:
        ids: Keys of `config.json` and `generation_config.json`; empty: they stay as they came.
        texts: Keys of `tokenizer_config.json`.
    """

    ids: Mapping[str, int | None]
    texts: Mapping[str, str]


def parsed(content: bytes, name: str) -> Keys:
    """Parse a JSON file of the original model that holds one object.

    Args:
        content: Content of the file.
        name: Name of the file.

    Raises:
        ConfigError: When the file holds something else.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} of the original model must be a JSON object")
    return values


def before_of(original: Original, config: Config, *, step: int, dtype: str | None) -> Before | None:
    """Return the layout of the files that a model came in; with their dtypes, if these are to stay.

    Dtypes stay as long as no step has changed the weights, and where the run computes in the dtype
    of most weights; float16, in which no run computes, stays where the run computes in float32.

    Args:
        original: Files of the original model.
        config: Config of the run.
        step: Number of steps that the weights have been trained.
        dtype: Dtype that the command line names; None: it names none.
    """
    if not any(original.weights.values()):
        return None
    places = [(t, f, d) for f, inside in original.weights.items() for t, d in inside.items()]
    ((most, _),) = Counter(d for _, _, d in places).most_common(1)
    stay = step == 0 or config.train.dtype == _COMPUTED_IN.get(most)
    return Before(
        {tensor: file for tensor, file, _ in places},
        {t: DTYPES[d] for t, _, d in places if d in FLOATS} if stay and dtype is None else {},
        original.text(INDEX),
    )


def usual_dtype(before: Before) -> str:
    """Return the name of the dtype of most tensors in the files that a model came in."""
    return dtype_name(Counter(before.dtype_of.values()).most_common(1)[0][0])


def tokens_of(original: Original, config: Config) -> Tokens:
    """Return the special tokens that an export has to write, by the tokenizer of the run.

    The token that ends a document in training ends a generated text. With the model's own tokenizer
    all special tokens stay as they came, unless ``data.separator`` names another end.

    Args:
        original: Files of the original model.
        config: Config of the run.

    Raises:
        ConfigError: When the tokenizer cannot be read.
    """
    if SETTINGS in original.files and not original.has_other_tokenizer:
        if not config.data.separator:
            return Tokens({}, {})
        separator = _separator(original, config.data.separator)
        return Tokens({} if _is_end(original, separator) else {"eos_token_id": separator}, {})
    ids: dict[str, int | None] = dict.fromkeys(f"{name}_id" for name in _SPECIAL)
    content = original.text(TOKENIZER)
    if content is None:
        return Tokens({}, {})
    if content == byte_tokenizer():
        return Tokens(ids | {"eos_token_id": ByteTokenizer.separator}, {"eos_token": MARK})
    separator = _separator(original, config.data.separator)
    id_of = _ids_of(parsed(content, TOKENIZER))
    said: Keys = {}
    for file in (_NAMED, _TOKENIZER_SETTINGS):
        said |= parsed(original.text(file) or b"{}", file)
    for name in _SPECIAL:
        given = said.get(name)
        text = given.get("content") if isinstance(given, dict) else given
        ids[f"{name}_id"] = id_of.get(text) if isinstance(text, str) else None
    ids["eos_token_id"] = separator
    text_of = {number: text for text, number in id_of.items()}
    return Tokens(ids, {"eos_token": text_of[separator]} if separator in text_of else {})


def write_others(folder: Path, original: Original, tokens: Tokens) -> dict[str, str]:
    """Write all files but weights and `config.json`.

    Returns:
        Names of the files that came with the model; with what has changed in it, or nothing.
    """
    written: dict[str, str] = {}
    for name, read in original.files.items():
        if name in (SETTINGS, INDEX):
            continue
        content, written[name] = read(), ""
        if name == _GENERATION and tokens.ids:
            came = parsed(content, name)
            now = {**came, **tokens.ids}
            content, written[name] = as_text(now), _changes(came, now)
        elif name == _TOKENIZER_SETTINGS and original.has_other_tokenizer:
            came = parsed(content, name)
            content = content if _CLASS in came else as_text({**came, **_PLAIN})
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, content)
    if original.has_other_tokenizer and _TOKENIZER_SETTINGS not in original.files:
        made = {**_PLAIN, "clean_up_tokenization_spaces": False, **tokens.texts}
        replace_file(folder / _TOKENIZER_SETTINGS, as_text(made))
    return written


def settings_of(original: Original, values: Json) -> bytes:
    """Return the text of `config.json`: byte by byte the original's, if its values are the same."""
    came = original.text(SETTINGS)
    return came if came is not None and json.loads(came) == values else as_text(values)


def report(
    original: Original, settings: bytes, written: Mapping[str, str], *, is_bytes: bool
) -> Iterator[str]:
    """Yield lines about the files of an export: which are as they came, and which are left out.

    Args:
        original: Files of the original model.
        settings: Content of `config.json` in the export.
        written: Other files and their changes, as `write_others` returns them.
        is_bytes: Whether the run has read text as bytes.
    """
    if SETTINGS not in original.files:
        return
    changed = _changes(json.loads(original.files[SETTINGS]()), json.loads(settings))
    about = f"config.json as well, but for {changed}" if changed else "config.json too"
    yield f"{sum(not change for change in written.values())} other files are as they came, {about}"
    yield from (f"{name} is as it came, but for {c}" for name, c in written.items() if c)
    if is_bytes and original.has_tokenizer:
        yield "the tokenizer is the model's, but the run has read text as bytes (data.tokenizer)"
    for why in sorted(set(original.left_out.values())):
        names = [n for n, w in original.left_out.items() if w == why and n not in original.weights]
        if names:
            yield f"left out: {first_of(names)}: {_WHY.get(why, why)}"


def _changes(came: Json, now: Json) -> str:
    """Return the keys that are not as they came, with both values and the reason."""
    keys = sorted(k for k in came.keys() | now.keys() if came.get(k, ...) != now.get(k, ...))
    return ", ".join(
        f"{k} ({shown(came.get(k))}, now {shown(now.get(k))}: {_REASONS.get(k, _CONFIGURED)})"
        for k in keys
    )


_REASONS = {
    **dict.fromkeys(("dtype", "torch_dtype"), "that of the weights"),
    "eos_token_id": "what ends documents of the run",
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "of the run's tokenizer"),
}
_CONFIGURED = "as the run was configured"
_WHY = {OTHER_WEIGHTS: "weights that training has not changed"}


def _is_end(original: Original, token: int) -> bool:
    """Tell whether all files of a model that name the end of generation name this token."""
    said = (parsed(original.text(name) or b"{}", name) for name in (SETTINGS, _GENERATION))
    ends = [end for values in said if (end := values.get("eos_token_id")) is not None]
    return bool(ends) and all(token in (e if isinstance(e, list) else [e]) for e in ends)


def _separator(original: Original, name: str) -> int:
    """Return the id of the token that ended documents in training.

    Args:
        original: Files of the original model.
        name: Text of the token, if the config names one; empty: the tokenizer's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in (TOKENIZER, _TOKENIZER_SETTINGS):
            if (content := original.text(file)) is not None:
                (Path(folder) / file).write_bytes(content)
        try:
            return load_tokenizer(str(Path(folder) / TOKENIZER), name).separator
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{folder}/", "")) from None
        except ImportError:
            raise ConfigError(
                "data.tokenizer needs the extra tokenizers: pip install 'hp-train[tokenizers]'"
            ) from None


def _ids_of(tokenizer: Json) -> dict[str, int]:
    """Return the ids of tokens by their texts, of a `tokenizer.json`."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # of pieces and their scores
        vocab = {piece[0]: number for number, piece in enumerate(vocab)}
    more = {a["content"]: a["id"] for a in added} if isinstance(added, list) else {}
    return {**(vocab or {}), **more}
