"""`hp import-hf` and `hp export-hf`."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import read_named
from hp_base.messages import shown
from hp_checkpoint import Box, decode_extra, open_checkpoint
from hp_checkpoint.manifest import Manifest
from hp_checkpoint.runs.directory import newest_checkpoint
from hp_checkpoint.weight_files import first_of, other_forms
from hp_data.tokenizer import byte_tokenizer
from hp_trainer.config import Config, ModelConfig, rules
from hp_trainer.config.options import build, to_toml
from hp_trainer.config.rules.files import TOKENIZER
from hp_trainer.config.schema import fields
from hp_transformers.families.config import (
    config_after,
    hf_config,
    model_config,
    read_config,
    train_dtype,
    with_dtype,
)
from hp_transformers.families.files import require_no_model
from hp_transformers.families.handed_on import (
    before_of,
    parsed,
    report,
    settings_of,
    tokens_of,
    usual_dtype,
    write_others,
)
from hp_transformers.families.load import check_weights
from hp_transformers.families.save import write_model
from hp_transformers.original import SETTINGS, Original, kept_original, original_of

_PREFIX = "model."
_SEQ_LEN = 4096  # of the config that is printed, unless the model is made for less
# Defaults are for a small model with new weights; such rates destroy trained weights in some steps.
_TRAINED_ON = {"train.learning_rate": 1e-5, "train.warmup_steps": 100, "train.steps": 1000}


def import_hf(folder: Path, out: Path | None) -> int:
    """Print or write a config that starts from the weights of a folder.

    Nothing is copied: when the run starts, every rank reads the slices that it needs.

    Args:
        folder: Folder with `config.json` and safetensors files.
        out: A new TOML file; None: standard output.

    Returns:
        Exit status.

    Raises:
        ConfigError: When the folder has no model that can be read, or `out` exists.
    """
    values = read_config(folder)
    model = model_config(values)
    check_weights(folder)
    if others := other_forms(folder):
        are = "is" if len(others) == 1 else "are"
        sys.stderr.write(f"note: {first_of(others)} {are} not read, as transformers does not\n")
    given: dict[str, object] = {
        **{f"model.{name}": value for name, value in msgspec.structs.asdict(model).items()},
        "run.init_from": str(folder.absolute()),
        "train.dtype": train_dtype(values),
        "train.sample_tokens": 0,
        "data.seq_len": min(model.max_positions or _SEQ_LEN, _SEQ_LEN),
    }
    tokenizer = folder / TOKENIZER
    if tokenizer.is_file() and read_named(tokenizer) != byte_tokenizer():
        given["data.tokenizer"] = str(tokenizer.absolute())
    elif not tokenizer.is_file():
        sys.stderr.write(
            f"note: {folder} has no {TOKENIZER}: text is read as bytes, unless data.tokenizer "
            "names one\n"
        )
    config = build(given | _TRAINED_ON)
    rules.check(config)
    source = f"{folder.name}/config.json"
    origins = dict.fromkeys(fields(), "default") | dict.fromkeys(given, source)
    text = to_toml(config, origins | dict.fromkeys(_TRAINED_ON, "for weights that are trained"))
    if out is None:
        sys.stdout.write(text)
        return 0
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f'--out ("{out}") must be a new file: {error.strerror}') from None
    sys.stdout.write(f"wrote {out}; to train: hp train {out} --data FILES\n")
    return 0


def export_hf(
    run: Path,
    folder: Path,
    *,
    step: int | None,
    dtype: str | None,
    tokenizer: Path | None = None,
    original: Path | None = None,
    trust_remote_code: bool = False,
    of_transformers: Callable[..., None],
) -> int:
    """Write the weights of a checkpoint as a folder that transformers loads.

    One chunk of the checkpoint is in memory at a time, and is compared with its hash. All other
    files of the model that the run started from come along: see `hp_transformers.original`.

    Args:
        run: Run directory.
        folder: Folder to be made.
        step: Step of the checkpoint; None: the newest.
        dtype: Dtype of the files; None: that of the original files if the run computed in it or has
            not begun, else that in which the run computed.
        tokenizer: Tokenizer file to copy; None: the run's copy, or the file that the run names, if
            that is in its directory.
        original: Folder of the original model; None: the run's copy of its files.
        trust_remote_code: Whether Python files of the original model may run.
        of_transformers: Function that writes a model of `model.transformers`, as `write_model`.

    Returns:
        Exit status.

    Raises:
        ConfigError: When there is no such run, no family has its model, `folder` is in use, or the
            run's tokenizer, or model of transformers, lies elsewhere.
        CheckpointError: When the checkpoint is missing or damaged, or a file cannot be written.
    """
    rules.require_run_directory(str(run))
    path = newest_checkpoint(run / "checkpoints", step=step)
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest
    try:
        config = msgspec.convert(decode_extra(manifest.extra)["config"], Config)
    except (KeyError, msgspec.ValidationError) as damage:
        raise CheckpointError(f"{path}: {damage}") from None
    came = _original_of(run, config, original, tokenizer)
    boxes: dict[str, list[Box]] = {
        name.removeprefix(_PREFIX): [chunk.box for chunk in tensor.chunks]
        for name, tensor in manifest.tensors.items()
        if name.startswith(_PREFIX)
    }

    def read(name: str, box: Box) -> Tensor:
        return checkpoint.chunk(_PREFIX + name, box.offsets)

    name = dtype or config.train.dtype
    before = before_of(came, config, step=manifest.step, dtype=dtype)
    stays = before is not None and bool(before.dtype_of)
    theirs = parsed(came.text(SETTINGS) or b"{}", SETTINGS)
    if config.model.transformers:
        # What a run directory names is not run without being asked for.
        model = replace(config.model, trust_remote_code=trust_remote_code)
        write = of_transformers
        values = with_dtype(theirs, None if stays else name)
    else:
        model, write = _whole_config(config, manifest), write_model
        if SETTINGS in came.files:
            values = config_after(theirs, model, dtype=None if stays else name)
        else:
            values = hf_config(model, dtype=name)
    tokens = tokens_of(came, config)
    settings = settings_of(came, values | dict(tokens.ids))
    require_no_model(folder)
    written = write_others(folder, came, tokens)
    with _readable(model, came, original) as model:
        write(
            folder,
            boxes,
            read,
            model,
            dtype=getattr(torch, name),
            settings=settings,
            before=before,
        )
    said = usual_dtype(before) if stays and before is not None else name
    lines = report(came, settings, written, is_bytes=not config.data.tokenizer)
    sys.stdout.write(
        "".join(f"{line}\n" for line in (*lines, f"wrote {folder} from {path}, {said}"))
    )
    return 0


def _original_of(
    run: Path, config: Config, folder: Path | None, tokenizer: Path | None
) -> Original:
    """Return the files to copy into an export: the run's copies, or the files of a given folder.

    Raises:
        ConfigError: When a file that the export needs is elsewhere.
    """
    copies = kept_original(run) if folder is None else original_of(folder)
    if config.model.transformers and (copies is None or SETTINGS not in copies.files):
        raise ConfigError(
            f"model.transformers ({shown(config.model.transformers)}) of the run must be kept in "
            f"{run}, or be given as --original FOLDER"
        )
    found = copies or Original()
    if tokenizer is None and TOKENIZER not in found.files:
        if not config.data.tokenizer and SETTINGS not in found.files:
            return found.with_bytes()
        tokenizer = _tokenizer_of(config.data.tokenizer, run)
    return found if tokenizer is None else found.with_tokenizer(tokenizer)


@contextmanager
def _readable(model: ModelConfig, came: Original, folder: Path | None) -> Iterator[ModelConfig]:
    """Yield a model whose folder has its config, and its code if that is trusted.

    Raises:
        ConfigError: When the model has code of its own, which is not trusted.
    """
    try:
        if not model.transformers:
            yield model
        elif folder is not None:
            yield replace(model, transformers=str(folder))
        else:
            with tempfile.TemporaryDirectory() as alone:
                copy = Path(alone) / "original"
                for name, read in came.files.items():
                    if name == SETTINGS or (model.trust_remote_code and name.endswith(".py")):
                        (copy / name).parent.mkdir(parents=True, exist_ok=True)
                        (copy / name).write_bytes(read())
                yield replace(model, transformers=str(copy))
    except ConfigError as error:
        if "trust_remote_code (false)" not in str(error):
            raise
        raise ConfigError(
            "--trust-remote-code must be given: config.json of the model names Python files that "
            "came with it"
        ) from None


def _tokenizer_of(named: str, run: Path) -> Path | None:
    """Return the run's copy of a tokenizer, or the file that its config names inside the run.

    Other files are refused: a stranger's checkpoint may name any file of yours.

    Raises:
        ConfigError: When neither is a file in the run's directory, links resolved.
    """
    if not named:
        return None
    for path in ((run / TOKENIZER).resolve(), Path(named).resolve()):
        if path.is_relative_to(run.resolve()) and path.is_file():
            return path
    raise ConfigError(
        f"data.tokenizer ({shown(named)}) of the run must be a file in {run}, or be given as "
        "--tokenizer FILE"
    )


def _whole_config(config: Config, manifest: Manifest) -> ModelConfig:
    """Return the model of a run with its vocabulary and longest sequence written out."""
    embedding = manifest.tensors.get(f"{_PREFIX}embedding.weight")
    if embedding is None:
        raise CheckpointError("the checkpoint must have an embedding")
    return replace(
        config.model,
        vocab_size=embedding.shape[0],
        max_positions=config.model.max_positions or config.data.seq_len,
    )
