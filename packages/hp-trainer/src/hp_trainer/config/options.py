"""From a TOML file and a command line to a checked config whose every value has an origin."""

import json
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from msgspec.structs import replace

from hp_base.environment import external_world
from hp_base.errors import ConfigError
from hp_base.folder import Folder, read_named, why_not
from hp_base.messages import did_you_mean, shown
from hp_trainer.config import Config, MeshConfig, PipelineConfig, rules, to_dict
from hp_trainer.config.schema import Field, by_section, convert, fields, sections, unknown_key
from hp_trainer.config.transformers_folder import shape_of_folder

CONFIG = "config.toml"
"""Name of the config in a run directory."""
_START_SECONDS = 180.0
"""Time-out of the start of a check, at least: the first run waits for torch to be imported."""
_SHIPPED = Path(__file__).parent.parent / "configs"
COMMAND_LINE = "command line"
"""The origin of what was given there."""
_MOST_BYTES = 64 << 10  # of a config file; those with every key and its meaning have a quarter
_CODE = ("model.factory", "model.trust_remote_code")  # which is run if they are set
_FLAG = re.compile(r"--([A-Za-z_][\w-]*\.[\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w-]*\.[\w-]*)=(.*)", re.DOTALL)
_HEADER = re.compile(r"\s*\[\s*([\w.\"'-]+)\s*\]")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, and where each of its values comes from.

    Attributes:
        config: Checked configuration.
        origins: Key -> ``"default"``, ``"run.toml:12"``, ``"command line"`` or a variable's name.
        name: Name of the config file, without its suffix.
    """

    config: Config
    origins: Mapping[str, str]
    name: str


def split_overrides(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Take ``--section.key value``, ``--section.key=value`` and ``section.key=value`` out.

    Returns:
        Keys with their values as written, and the other arguments.

    Raises:
        ConfigError: When a value is missing.

    >>> split_overrides(["--train.steps", "9", "my.toml", "mesh.pp=2"])
    ([('train.steps', '9'), ('mesh.pp', '2')], ['my.toml'])
    """
    overrides, rest = [], []
    arguments = iter(enumerate(argv))
    for index, argument in arguments:
        match = _FLAG.fullmatch(argument) or _ASSIGNMENT.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        key, value = match[1].replace("-", "_"), match[2]
        if value is None:
            following = argv[index + 1] if index + 1 < len(argv) else "--"
            if not following.startswith("--"):
                value = following
                next(arguments)
            elif key in fields() and fields()[key].base is bool:
                value = "true"
            else:
                raise ConfigError(
                    f"--{key} must be followed by a value" if key in fields() else unknown_key(key)
                )
        overrides.append((key, value))
    return overrides, rest


def resolve(
    source: str | None = None,
    overrides: Iterable[tuple[str, object]] = (),
    *,
    env: Mapping[str, str] = os.environ,
    fit: Callable[[Config, Mapping[str, str]], Mapping[str, object]] | None = None,
) -> Resolved:
    """Read a config, put the command line over it, and check the result.

    Args:
        source: Path of a TOML file or name of a shipped config. None: the config of the run
            named by ``run.resume`` in ``overrides``; defaults, if ``model.transformers`` is there,
            which is another model than that of ``quickstart``; else ``quickstart``.
        overrides: Keys with values; strings are converted to the type of the key.
        env: Tells of processes that torchrun or Slurm started.
        fit: Function that maps a config to which no rule was applied yet, and the origins of the
            keys that are given, to values of other keys that follow from an option.

    Raises:
        ConfigError: About the first thing that is wrong, in one line.
    """
    given = _collect(overrides)
    resume = given.get("run.resume")
    path = _find(source, resume=resume)
    text = _read(path) if resume is None else _read_saved(path.parent)
    values, origins = _from_toml(text, path.name if path.parent == _SHIPPED else str(path))
    name, folder = path.stem, given.get("model.transformers")
    if source is None and resume is None and folder:
        values, origins, name = {}, {}, Path(str(folder)).resolve().name
    if resume is None and "run.resume" in values:
        _require_name(values["run.resume"], where=f"{origins['run.resume']}: ")
    for key in _CODE if resume is not None else ():
        if values.get(key) and key not in given:
            raise ConfigError(
                f"{key} ({shown(values[key])}) must be given on the command line too: what a run "
                "directory names is not run without being asked for"
            )
    for key, raw in given.items():
        values[key] = _convert_override(fields()[key], raw)
        origins[key] = COMMAND_LINE
    values["data.tokenizer"] = _tokenizer_file(values.get("data.tokenizer", ""))
    for key, value, origin in shape_of_folder(values):
        values[key], origins[key] = value, origin
    world = external_world(env)
    if world is not None and values.get("launch.num_processes", 0) == 0:
        values["launch.num_processes"] = world.size
        origins["launch.num_processes"] = world.variable
    if fit is not None:
        values |= fit(build(values), origins)
    config = build(values)
    rules.check(config, world)
    return Resolved(config, {key: origins.get(key, "default") for key in fields()}, name)


def saved_values(run: Path) -> dict[str, Any]:
    """Return what the config of a run directory says, by key.

    Raises:
        ConfigError: About the first thing that is wrong with it.
    """
    path = run / CONFIG
    return _from_toml(_read(path), str(path))[0]


def build(values: Mapping[str, Any]) -> Config:
    """Make a config of checked values by key, with defaults for the rest; no rule is checked."""
    return msgspec.convert(by_section(values), Config)


def for_saving(resolved: Resolved) -> Config:
    """Return the config as a run directory keeps it, to be read again from any folder.

    Paths are absolute; what the environment said about this start, and which run it went on
    with, does not belong to the run.
    """
    config = resolved.config
    launch, data = config.launch, config.data
    if resolved.origins["launch.num_processes"] not in ("default", COMMAND_LINE):
        launch = replace(launch, num_processes=0)
    code, colon, function = config.model.factory.rpartition(":")
    factory = _absolute(code) if code.endswith(".py") else code
    return replace(
        config,
        run=replace(
            config.run,
            output_dir=_absolute(config.run.output_dir),
            init_from=config.run.init_from and _absolute(config.run.init_from),
            resume="",
        ),
        launch=launch,
        model=replace(
            config.model,
            factory=f"{factory}{colon}{function}",
            transformers=config.model.transformers and _absolute(config.model.transformers),
        ),
        data=replace(
            data,
            paths=tuple(map(_absolute, data.paths)),
            tokenizer=data.tokenizer and _absolute(data.tokenizer),
            plan_costs=data.plan_costs and _absolute(data.plan_costs),
        ),
    )


def _tokenizer_file(given: str) -> str:
    """Return the tokenizer file: the file itself, or the one in a folder."""
    try:
        inside = Path(given) / rules.TOKENIZER
        return str(inside) if given and inside.is_file() else given
    except (OSError, ValueError):  # no name of anything, as a rule says
        return given


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())


def shipped() -> list[str]:
    """Return the names of the configs that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def _collect(overrides: Iterable[tuple[str, object]]) -> dict[str, object]:
    given: dict[str, object] = {}
    for key, raw in overrides:
        if key not in fields():
            raise ConfigError(unknown_key(key))
        if key in given:
            raise ConfigError(f"{key} ({shown(raw)}) must be given once, not also {given[key]}")
        given[key] = raw
    return given


def _convert_override(field: Field, raw: object) -> Any:
    if field.is_list and isinstance(raw, str):
        raw = _parse_list(raw) if raw.startswith("[") else [raw]
    return convert(field, raw, strict=False)


def _parse_list(text: str) -> object:
    try:
        return tomllib.loads(f"list = {text}")["list"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text  # refused by the conversion, which names the key


def _find(source: str | None, *, resume: object) -> Path:
    if resume is not None:
        _require_name(resume)
        if source is not None:
            raise ConfigError(f"config ({shown(source)}) must be left out where a run is resumed")
        rules.require_run_directory(str(resume))
        return Path(str(resume)) / CONFIG
    source = source or "quickstart"
    names = shipped()
    if source in names:
        return _SHIPPED / f"{source}.toml"
    if source.endswith(".toml") or "/" in source:
        return Path(source)
    hint = did_you_mean(source, names) or "; hp train --help lists them"
    raise ConfigError(f"config ({shown(source)}) must be a .toml file or come along{hint}")


def _require_name(resume: object, *, where: str = "") -> None:
    """Refuse an empty name: it comes from an unset variable, and would start a new run."""
    if not resume:
        raise ConfigError(
            f'{where}run.resume ("") must name a run directory; leave it out for a new run'
        )


def _read_saved(run_dir: Path) -> str:
    """Return the config in a run directory, which may be a stranger's."""
    with Folder.open(run_dir) as folder:
        content = folder.read(CONFIG, limit=_MOST_BYTES)
    # As it was written: a path may have bytes that are no text.
    return _decoded(content, run_dir / CONFIG, errors="surrogateescape")


def _decoded(content: bytes, path: Path, *, errors: str = "strict") -> str:
    try:
        return content.decode("utf-8-sig", errors).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config ({path}) must be UTF-8: byte {error.start} is not") from None


def _read(path: Path) -> str:
    try:
        return _decoded(read_named(path, limit=_MOST_BYTES), path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config ({shown(str(path))}) must be a readable file: {why_not(error)}"
        ) from None


def _from_toml(text: str, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and origins of the keys that a file gives."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} must be TOML: {why_not(error)}") from None
    lines = _line_numbers(text)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for section, table in document.items():
        where = f"{path}:{lines[section]}" if section in lines else path
        if section not in sections():
            raise ConfigError(f"{where}: {unknown_key(section)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section} ({shown(table)}) must be a table, [{section}]")
        for name, raw in table.items():
            key = f"{section}.{name}"
            origins[key] = f"{path}:{lines[key]}" if key in lines else where
            if key not in fields():
                raise ConfigError(f"{origins[key]}: {unknown_key(key)}")
            try:
                values[key] = convert(fields()[key], raw, strict=True)
            except ConfigError as error:
                raise ConfigError(f"{origins[key]}: {error}") from None
    return values, origins


def _line_numbers(text: str) -> dict[str, int]:
    """Return the lines on which sections and keys begin; tomllib does not tell."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _HEADER.match(line):
            section = _unquoted(match[1])
            lines.setdefault(section, number)
        elif match := _KEY.match(line):
            name = _unquoted(match[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines


def _unquoted(key: str) -> str:
    return key.replace('"', "").replace("'", "")


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return TOML by section, each key under its help, with the value's origin behind it.

    Args:
        config: Configuration to write.
        origins: Origins of the values, by key; None: leave them out.
    """
    tables = to_dict(config)
    lines: list[str] = []
    for section, struct in sections().items():
        lines += ["", *_comment(struct.__doc__ or ""), f"[{section}]"]
        for field in fields().values():
            if field.section == section:
                value = tables[section][field.name]
                lines += [*_comment(field.help), _assignment(field.name, value, origins, field.key)]
    return "\n".join(lines[1:]) + "\n"


def to_lines(resolved: Resolved) -> str:
    """Return one line per key, ``train.steps = 150  # origin``: to be searched and compared."""
    tables = to_dict(resolved.config)
    return "".join(
        _assignment(key, tables[field.section][field.name], resolved.origins, key) + "\n"
        for key, field in fields().items()
    )


def to_json(resolved: Resolved) -> str:
    """Return the config and the origins as one JSON object."""
    content = {"config": to_dict(resolved.config), "origins": dict(resolved.origins)}
    return json.dumps(content, indent=2) + "\n"


def _assignment(name: str, value: object, origins: Mapping[str, str] | None, key: str) -> str:
    text = tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
    if isinstance(value, list):
        text = " ".join(text.split()).replace("[ ", "[").replace(", ]", "]")
    origin = f"  # {_one_line(origins[key])}" if origins else ""
    unset = "# " if key == "run.resume" and not value else ""  # an empty one is refused
    return f"{unset}{name} = {text}{origin}"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 96)]


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def with_keys(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the same config with some keys replaced."""
    tables = by_section(values)
    changed = {name: replace(getattr(config, name), **table) for name, table in tables.items()}
    return replace(config, **changed)


def checked_config(config: Config, *, dtype: str) -> Config:
    """Return the config as it is run for a check: in this dtype, with one thread.

    Time-outs stay, but for that of the start: the first run waits for torch to be imported.
    """
    launch = replace(
        config.launch,
        num_processes=0,
        threads_per_process=1,
        init_timeout_seconds=max(config.timeouts.init, _START_SECONDS),
    )
    return replace(
        config,
        run=replace(config.run, resume="", tensorboard=False),
        launch=launch,
        train=replace(config.train, dtype=dtype),
    )


def one_process(config: Config) -> Config:
    """Return the config of the same training in one process, not compiled."""
    pipeline, train = PipelineConfig(schedule="1f1b"), replace(config.train, compile="none")
    return replace(
        config,
        mesh=MeshConfig(),
        pipeline=pipeline,
        train=train,
        data=replace(config.data, plan_tokens=0, plan_costs=""),
    )
