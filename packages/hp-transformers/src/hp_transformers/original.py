"""The other files of the model that a run starts from, copied into the run and into exports.

A model is more than its weights: its tokenizer, its tokens that end a text, its chat template, its
licence. When a run is made, all small files of the folder that it starts from are copied into its
directory, with their hashes, and a list of the tensors of the folder with files and dtypes. An
export reads these copies and nothing else, since a stranger's checkpoint may name any folder of
yours. The folder of the model may be a stranger's as well: links in it are followed within the
folder, and within the cache of Hugging Face's hub for that model, which is made of links; files
that links outside lead to are left out.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from hp_base.atomic_write import closed_at_end
from hp_base.command_line import warn
from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import (
    MOST_BYTES,
    DamageError,
    Folder,
    open_directory,
    opened,
    read_named,
    read_span,
    read_whole,
    why_not,
)
from hp_base.messages import shown
from hp_data.tokenizer import byte_tokenizer
from hp_trainer.config.options import Resolved
from hp_trainer.config.rules.files import TOKENIZER
from hp_trainer.launch.rundir import LISTING, ORIGINAL

SETTINGS, INDEX = "config.json", "model.safetensors.index.json"

OTHER_WEIGHTS = "weights"
"""Reason to leave out a file that may be large and that training makes outdated."""
OTHER_TOKENIZER = "of the model's own tokenizer, which the run does not use"
_HIDDEN = "of programs, not of the model"
_UNSAID = (OTHER_WEIGHTS, OTHER_TOKENIZER, _HIDDEN)
"""Reasons that are told by exports alone, and not when a run begins."""
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"),
    ".index.json",
)
_TEMPLATES = "additional_chat_templates"
_TOKENIZERS = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json", "tekken.json"),
)
_TOKENIZERS_TOO = ("tokenization_*.py", "*.tiktoken", "tiktoken.model")
_MOST_FILES, _MOST_LISTED, _MOST_TOGETHER, _DEEPEST = 1000, 10_000, 1 << 28, 3
_MOST_HEADER = 100 << 20  # the limit of the safetensors library


@dataclass(frozen=True)
class Original:
    """Files of a model besides its weights, and the files and dtypes of its weights.

    Attributes:
        files: Function that reads each file, by its path in the folder.
        left_out: Reason why a file is not among them, by its path.
        weights: Names of the dtypes of tensors, as in safetensors, by file and tensor.
        has_other_tokenizer: Whether the tokenizer is not the model's own, so that ids in other
            files mean other tokens.
    """

    files: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    has_other_tokenizer: bool = False

    def text(self, name: str) -> bytes | None:
        """Return the content of a file; None: there is none of that name."""
        return self.files[name]() if name in self.files else None

    @property
    def has_tokenizer(self) -> bool:
        """Tell whether files of a tokenizer are among them, other than one of bytes."""
        try:
            is_of_bytes = self.text(TOKENIZER) == byte_tokenizer()
        except (DamageError, OSError):
            is_of_bytes = False
        return not is_of_bytes and any(map(is_of_tokenizer, self.files))

    def with_bytes(self) -> "Original":
        """Return the same files with a tokenizer of bytes."""
        made = byte_tokenizer()
        files = {**self.files, TOKENIZER: lambda: made}
        return replace(self, files=files, has_other_tokenizer=True)

    def with_tokenizer(self, path: Path) -> "Original":
        """Return the same files with another tokenizer, and the files of it that lie beside it.

        Args:
            path: Path of a `tokenizer.json`, of a file of that form, or of a folder with one.

        Raises:
            ConfigError: When the tokenizer cannot be read.
        """
        path = path / TOKENIZER if path.is_dir() else path
        try:
            content = read_named(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the tokenizer {path}: {why_not(error)}") from None
        if content == self.text(TOKENIZER):
            return self
        files = {name: read for name, read in self.files.items() if not is_of_tokenizer(name)}
        left_out = {n: why for n, why in self.left_out.items() if not is_of_tokenizer(n)}
        left_out |= dict.fromkeys(self.files.keys() - files.keys() - {TOKENIZER}, OTHER_TOKENIZER)
        if path.name == TOKENIZER:
            beside = _looked_at(path.parent, _names_beside(path.parent))
            files, left_out = {**files, **beside.files}, {**left_out, **beside.left_out}
            left_out = {name: why for name, why in left_out.items() if name not in files}
        return replace(
            self,
            files={**files, TOKENIZER: lambda: content},
            left_out=left_out,
            has_other_tokenizer=True,
        )


class _Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The list of a run's copies: SHA-256 by path, and the other attributes of `Original`."""

    files: dict[str, str]
    left_out: dict[str, str]
    weights: dict[str, dict[str, str]]
    has_other_tokenizer: bool


def original_of(folder: Path) -> Original:
    """List the files of a folder that a person names, and read the headers of its weights.

    Raises:
        ConfigError: When the folder cannot be listed.
    """
    try:
        found = _looked_at(folder, _names_in(folder))
    except OSError as error:
        raise ConfigError(f"cannot list {folder}: {error.strerror}") from None
    return replace(found, weights=_weights_of(folder, found.text(INDEX)))


def keep_original(folder: Folder, resolved: Resolved) -> None:
    """Copy the files of the original model into the directory of a new run; warn of others.

    Nothing is copied into a resumed run, whose config may be a stranger's.

    Raises:
        ConfigError: When the folder or the tokenizer that the config names cannot be read.
    """
    config = resolved.config
    start = config.model.transformers or config.run.init_from
    if config.run.resume or folder.has(LISTING):
        return
    original = original_of(Path(start)) if start else Original()
    if config.data.tokenizer:
        original = original.with_tokenizer(Path(config.data.tokenizer))
    if start or original.files:
        for name, why in _keep(folder, original).items():
            if why not in _UNSAID:
                warn(f"note: {start}/{name} is not kept for exports: {why}")
    if start and not config.data.tokenizer and original.has_tokenizer:
        warn(f"note: text is read as bytes: data.tokenizer does not name that of {start}")
    if original.weights and resolved.origins["train.learning_rate"] == "default":
        warn(
            f"note: train.learning_rate ({config.train.learning_rate:g}) was not given: it is for "
            "new weights, and those that are trained usually take 1e-5"
        )


def kept_original(run: Path) -> Original | None:
    """Return a run's copies of the original files, none of it trusted; None: it has no list.

    Raises:
        CheckpointError: When the list is damaged; functions that read a file raise it as well.
    """
    if not os.path.lexists(run / LISTING):
        return None
    try:
        content = _read(run, (LISTING,), limit=_MOST_TOGETHER)
        listing = msgspec.json.decode(content, type=_Listing)
    except (DamageError, OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{run / LISTING}: {why_not(error)}") from None
    if len(listing.files) > _MOST_FILES:
        raise CheckpointError(f"{run / LISTING} must list at most {_MOST_FILES} files")
    for name in (*listing.files, *listing.weights):
        if not _is_name(name) or (name in listing.weights and "/" in name):
            raise CheckpointError(f"{run / LISTING}: {shown(name)} must be the name of a file")
    return Original(
        {name: partial(_verified, run, name, sha256) for name, sha256 in listing.files.items()},
        listing.left_out,
        listing.weights,
        listing.has_other_tokenizer,
    )


def _keep(folder: Folder, original: Original) -> Mapping[str, str]:
    """Write copies, and their list last; return the reasons why files are left out."""
    left_out, hashes = dict(original.left_out), {}
    with folder.sub(ORIGINAL, make=True) as kept:
        for name, read in original.files.items():
            try:
                content = read()
            except (DamageError, OSError) as error:
                left_out[name] = why_not(error)
                continue
            with ExitStack() as stack:
                *way, last = name.split("/")
                inner = kept
                for part in way:
                    inner = stack.enter_context(inner.sub(part, make=True))
                inner.replace(last, content)
            hashes[name] = hashlib.sha256(content).hexdigest()
    listing = _Listing(
        files=hashes,
        left_out=left_out,
        weights={file: dict(tensors) for file, tensors in original.weights.items()},
        has_other_tokenizer=original.has_other_tokenizer,
    )
    folder.replace(LISTING, msgspec.json.encode(listing))
    return left_out


def _verified(run: Path, name: str, sha256: str) -> bytes:
    where = f"{run / ORIGINAL}/{name}"
    try:
        content = _read(run, (ORIGINAL, *name.split("/")), limit=MOST_BYTES)
    except (DamageError, OSError) as error:
        raise CheckpointError(f"{where}: {why_not(error)}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(f"{where} is not what was kept: its SHA-256 differs")
    return content


def _names_in(folder: Path, inside: str = "") -> Iterator[str]:
    """Yield the paths of all files of a folder, and of folders too deep or hidden, as `.git`."""
    try:
        with os.scandir(folder / inside) as found:
            entries = sorted(found, key=lambda each: each.name)
    except OSError:
        if not inside:
            raise
        yield inside.removesuffix("/")
        return
    for entry in entries:
        name = f"{inside}{entry.name}"
        is_plain = not entry.is_dir(follow_symlinks=False)
        if is_plain or name.count("/") == _DEEPEST or entry.name.startswith("."):
            yield name
        else:
            yield from _names_in(folder, f"{name}/")


def _names_beside(folder: Path) -> Iterator[str]:
    """Yield the paths of files of a tokenizer in a folder that may have any other files."""
    yield from (name for name in _TOKENIZERS if os.path.lexists(folder / name))
    for pattern in _TOKENIZERS_TOO:
        yield from sorted(path.name for path in folder.glob(pattern))
    templates = folder / _TEMPLATES
    if templates.is_dir() and not templates.is_symlink():
        yield from _names_in(folder, f"{_TEMPLATES}/")


def _looked_at(folder: Path, names: Iterator[str]) -> Original:
    """Return a function that reads each file, or the reason why it is left out."""
    root, together = _root_of(folder), 0
    files: dict[str, Callable[[], bytes]] = {}
    left_out: dict[str, str] = {}
    for number, name in enumerate(islice(names, _MOST_LISTED + 1)):
        if not _is_name(name):
            left_out[ascii(name)] = "its name is not printable"
            continue
        real = Path(os.path.realpath(folder / name))
        try:
            about = real.lstat()
        except OSError as error:
            left_out[name] = why_not(error)
            continue
        together += about.st_size
        is_folder = stat.S_ISDIR(about.st_mode)
        if is_folder and name.rpartition("/")[2].startswith("."):
            left_out[name], together = _HIDDEN, together - about.st_size
        elif number == _MOST_LISTED:
            left_out[name] = f"it and others come after {_MOST_LISTED} files"
        elif name.endswith(_WEIGHTS) and name != INDEX:
            left_out[name], together = OTHER_WEIGHTS, together - about.st_size
        elif not real.is_relative_to(root):
            left_out[name] = "it leads out of the folder"
        elif not stat.S_ISREG(about.st_mode):
            left_out[name] = "it is no regular file"
        elif about.st_size > MOST_BYTES or together > _MOST_TOGETHER or len(files) >= _MOST_FILES:
            left_out[name], together = "it is too large", together - about.st_size
        else:
            files[name] = partial(_read, root, real.relative_to(root).parts, limit=MOST_BYTES)
    return Original(files, left_out)


def _root_of(folder: Path) -> Path:
    """Return the folder that links may lead to: itself, or all revisions of a model from a hub."""
    real = Path(os.path.realpath(folder))
    return real.parent.parent if real.parent.name == "snapshots" else real


def _weights_of(folder: Path, index: bytes | None) -> dict[str, dict[str, str]]:
    """Return the dtypes of all tensors; none if a file cannot be read, which loading refuses."""
    root, found = _root_of(folder), {}
    try:
        names = ["model.safetensors"] if index is None else json.loads(index)["weight_map"].values()
        for name in sorted({name for name in names if _is_name(name) and "/" not in name}):
            real = Path(os.path.realpath(folder / name))
            parts = real.relative_to(root).parts
            with _directory_of(root, parts) as directory, opened(directory, parts[-1]) as file:
                length = int.from_bytes(read_span(file, 0, 8), "little")
                header = json.loads(read_span(file, 8, 8 + min(length, _MOST_HEADER)))
            header.pop("__metadata__", None)
            found[name] = {str(tensor): str(about["dtype"]) for tensor, about in header.items()}
    except (OSError, DamageError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return found


def _is_name(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and len(parts) <= _DEEPEST + 1 and not {"", ".", ".."} & {*parts}


def is_of_tokenizer(name: str) -> bool:
    """Tell whether a file of a model is of its tokenizer, by its path in the folder."""
    if name in _TOKENIZERS or name.startswith(f"{_TEMPLATES}/"):
        return True
    return "/" not in name and any(fnmatch(name, pattern) for pattern in _TOKENIZERS_TOO)


def _read(root: Path, parts: tuple[str, ...], *, limit: int) -> bytes:
    with _directory_of(root, parts) as directory:
        return read_whole(directory, parts[-1], limit=limit)


@contextmanager
def _directory_of(root: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """Open the directory of a file below a root, without following links."""
    with ExitStack() as stack:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        directory = stack.enter_context(closed_at_end(os.open(root, flags)))
        for part in parts[:-1]:
            directory = stack.enter_context(closed_at_end(open_directory(part, directory)))
        yield directory
