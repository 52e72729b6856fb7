"""The folder in which a run keeps what it needs to go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from hp_train.drafts import remove_drafts, replace_file, try_lock
from hp_train.errors import ConfigError
from hp_train.options import Resolved, for_saving
from hp_train.render import to_toml


def make_run_directory(resolved: Resolved) -> Path:
    """Make the folder of a new run, which nobody else has, or find that of a resumed one.

    Raises:
        ConfigError: When it cannot be made.
    """
    run = resolved.config.run
    if run.resume:
        return Path(run.resume)
    base = Path(run.output_dir)
    stem = f"{resolved.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = iter([run.name]) if run.name else (f"{stem}-{n}" if n else stem for n in count())
    try:
        base.mkdir(parents=True, exist_ok=True)
        for name in names:
            try:
                (base / name).mkdir()
            except FileExistsError:
                continue
            return base / name
    except OSError as error:
        raise ConfigError(
            f'run.output_dir ("{base}") must be a writable folder: {error.strerror}'
        ) from None
    raise ConfigError(
        f'run.name ("{run.name}") must be new in run.output_dir ("{base}"); '
        f"to go on with it: hp train --resume {base / run.name}"
    )


def write_config(run_dir: Path, resolved: Resolved) -> None:
    """Put the config into the run directory, in one step and readable from anywhere."""
    text = to_toml(for_saving(resolved), resolved.origins)
    remove_drafts(run_dir)
    replace_file(run_dir / "config.toml", text.encode())


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep a run directory from being used twice; the lock ends with this process.

    Raises:
        ConfigError: When another process holds it.
    """
    with (run_dir / ".lock").open("w") as file:
        if not try_lock(file.fileno()):
            raise ConfigError(f'run.resume ("{run_dir}") must not be in use by another process')
        yield
