"""An architecture in all layouts of hp-train, each beside one process of transformers."""

import importlib
import resource
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from hp_base.errors import ConfigError
from hp_platform.device import lift
from integration_tests.models.architectures import tiny
from integration_tests.models.architectures.bounds import BOUNDS
from integration_tests.models.architectures.cells import (
    BOUND,
    FAILED,
    KINDS,
    REFUSED,
    WITHOUT,
    Architecture,
    Cell,
)
from integration_tests.models.architectures.forks import run_ranks
from integration_tests.models.architectures.overrides import WHY_NOT
from integration_tests.models.architectures.rank import MODEL, REFERENCE, RESULT, Fault, World, work
from integration_tests.models.architectures.reference import refer
from integration_tests.models.architectures.tiny import Tiny, versions

_SECONDS = 60.0
"""Most that a cell may take; a reference twice that."""
_FACTS = "facts.json"
_IMPORTED = (
    "hp_transformers.stages.load",
    "hp_transformers.stages.stage",
    "transformers.integrations.moe",
    "transformers.masking_utils",
    "transformers.modeling_layers",
)
_LONGEST = 300
_REFUSAL = f"{ConfigError.__name__}: "


def examine(
    name: str, data: Path, kinds: Sequence[str] = tuple(KINDS), *, fault: Fault | None = None
) -> Architecture:
    """Compare an architecture in layouts with one process.

    Args:
        name: Type of a model in transformers, or a folder with code of its own.
        data: Folder of the tokens.
        kinds: Layouts, of `KINDS`.
        fault: A mistake that is made in every rank of hp-train.
    """
    model = Tiny(name)
    made = partial(Architecture, name=model.name, versions=versions())
    try:
        model.load_code()
        made = partial(made, digest=model.digest, fields=model.fields)
    except Exception as error:  # noqa: BLE001 - whatever a config refuses is told
        return made(reason=_why_not(model.name, f"{type(error).__name__}: {error}"))
    with tempfile.TemporaryDirectory(prefix="hp-architecture-") as text:
        folder, before = Path(text), _spent()
        refers = partial(_refer, model, folder, data)
        reason = run_ranks(refers, size=1, folder=folder / "log", seconds=2 * _SECONDS)
        made = partial(made, seconds=round(_spent() - before, 2))
        if reason:
            return made(reason=_why_not(model.name, reason))
        facts = msgspec.json.decode((folder / _FACTS).read_bytes(), type=_Facts)
        world = World(
            folder,
            data,
            trusted=model.code is not None,
            bounds={kind: bound_of(model.name, kind)[0] for kind in kinds},
            fault=fault,
        )
        asked = [k for k in kinds if facts.has_experts or not KINDS[k].needs_experts]
        found = {kind: Cell(kind=kind, state=WITHOUT) for kind in kinds if kind not in asked}
        found |= run_cells(world, asked)
        cells = tuple(_explained(model.name, found[kind]) for kind in kinds)
        return made(cells=cells, reference=facts.told)


class _Facts(msgspec.Struct, frozen=True):
    has_experts: bool
    told: str


def _refer(tiny: Tiny, folder: Path, data: Path) -> None:
    torch.set_num_threads(1)
    tiny.make(folder / MODEL)
    lift()
    found = refer(folder / MODEL, data, trusted=tiny.code is not None)
    found.save(folder / REFERENCE)
    told = "" if found.attention == "sdpa" else f"{found.attention} attention: it has no sdpa"
    (folder / _FACTS).write_bytes(msgspec.json.encode(_Facts(found.has_experts, told)))


def run_cells(world: World, kinds: Iterable[str]) -> dict[str, Cell]:
    """Run cells; those of as many ranks in one world, until one of them ends it.

    Args:
        world: What they have in common.
        kinds: Their kinds.
    """
    found: dict[str, Cell] = {}
    pending: dict[int, list[str]] = {}
    for kind in kinds:
        try:
            world.config(kind)
            pending.setdefault(KINDS[kind].ranks, []).append(kind)
        except ConfigError as error:
            text = _without_folder(world, str(error))
            found[kind] = Cell(kind=kind, state=REFUSED, reason=_short(text))
    for ranks, some in pending.items():
        while some:
            first = some[0]
            run = partial(work, world, tuple(some))
            log, limit = world.cell(first) / "log", _SECONDS * len(some)
            reason = run_ranks(run, size=ranks, folder=log, seconds=limit, meets=False)
            while some and (result := world.cell(some[0]) / RESULT).exists():
                kind = some.pop(0)
                found[kind] = msgspec.json.decode(result.read_bytes(), type=Cell)
            if reason and some:
                kind = some.pop(0)
                found[kind] = _ended(world, kind, reason, log)
    return found


def _ended(world: World, kind: str, reason: str, log: Path) -> Cell:
    """A cell that ended its world: of what ranks say, what one refused comes first."""
    texts = [path.read_text() for path in sorted(log.glob("reason-*"))]
    told = [_without_folder(world, text) for text in texts]
    refused = next((one for one in told if one.startswith(_REFUSAL)), "")
    if refused:
        text = refused.removeprefix(_REFUSAL).rpartition(" (")[0]
        return Cell(kind=kind, state=REFUSED, reason=_short(text))
    own = [one for one in told if not one.startswith("PeerError")]
    return Cell(kind=kind, state=FAILED, error=None, reason=_short(own[0] if own else reason))


def _without_folder(world: World, text: str) -> str:
    """A message without the path of the model, which is another one in each run."""
    model = str(world.folder / MODEL)
    return text.replace(f' ("{model}")', "").replace(f" ({model})", "").replace(model, "FOLDER")


def bound_of(name: str, kind: str) -> tuple[float, str]:
    """Largest error of a cell that is equal, and why it is not `BOUND`."""
    return BOUNDS.get((name, kind)) or BOUNDS.get((name, "")) or (BOUND, "")


def _explained(name: str, cell: Cell) -> Cell:
    bound, why = bound_of(name, cell.kind)
    if bound == BOUND or cell.reason:
        return cell
    return msgspec.structs.replace(cell, reason=why)


def _why_not(name: str, error: str) -> str:
    """Why an architecture does not train in one process."""
    return WHY_NOT.get(name) or _short(error)


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


def _spent() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare() -> None:
    """Import once what all ranks need, before any of them is forked."""
    for module in _IMPORTED:
        importlib.import_module(module)
    tiny.prepare()


def run_in_fork(work: Callable[[], object], folder: Path) -> str:
    """Do something in a process of its own, since this one must not compute."""
    return run_ranks(work, size=1, folder=folder, seconds=_SECONDS)
