"""Schedules as text: the CSV of ``torch.distributed.pipelining`` and the JSON of this package.

CSV has one line per rank and one step per field, an empty field for an empty cell. It does not
say where stages live or how many microbatches there are; both follow from the steps. Nor does it
say which stages are sharded: if any step gathers, or reduces, those of all stages must. torch 2.15
writes and wants a word wherever its own runtime waits, for a message that was sent or for reduced
gradients; here waiting is the runtime's own business, so such words are read and left out.

JSON, version 1::

    {"version": 1, "num_ranks": 2, "num_microbatches": 1, "stage_to_rank": [0, 1],
     "chains": [[0, 1]], "gathered_stages": [0, 1], "reduced_stages": [0, 1],
     "ranks": [[["F", 0, 0], ["SEND_F", 0, 0], null], ...]}

"chains" may be left out when all stages form one chain in order, "gathered_stages" and
"reduced_stages" where it is not said which stages are sharded (`hp_schedule.Schedule`). A step is
its type in the step notation (`hp_schedule.steps`), then stage, then microbatch; ["UNSHARD", 0] and
the other FSDP steps have no microbatch. ["OVERLAP", step, step] is a forward and a backward in the
order given. null is an empty cell. RECV_F is the input of the stage it names, SEND_B the gradient
of that input.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hp_schedule.schedule import Schedule
from hp_schedule.steps import (
    BWD,
    BWD_WEIGHT,
    FSDP_REDUCE_GRAD,
    KIND_MASK,
    LEAF_TYPES,
    STAGE_MASK,
    STAGE_SHIFT,
    MetaStep,
    MetaStepType,
    leaves,
)

_VERSION = 1
_REQUIRED = ("version", "num_ranks", "num_microbatches", "stage_to_rank", "ranks")
_DECLARED = ("gathered_stages", "reduced_stages")
_WEIGHT_GRADS = (BWD, BWD_WEIGHT)
_WAIT = re.compile(r"[0-9]+WAIT_(SEND_[FB][0-9]+|REDUCE_GRAD)", re.ASCII)


def to_csv(schedule: Schedule, *, waits: bool = False, as_is: bool = False) -> str:
    """Return a schedule as torch's CSV, one line per rank.

    With messages (torch's ``compute_comms``), torch's runtime divides gradients by the number of
    microbatches in REDUCE_GRAD and nowhere else: without this step they are that many times too
    large, and the losses say nothing of it. Without messages torch adds the step itself.

    Args:
        schedule: Schedule to write, which may have communication steps.
        waits: Whether to say where torch's runtime waits, as torch 2.15 wants it of a schedule with
            messages and older ones do not know it: for the activation of a microbatch after its
            backward, for reduced gradients at once, for all other messages at the end.
        as_is: Whether to write messages and backwards without REDUCE_GRAD, too: for `from_csv`, or
            for torch's runtime with ``scale_grads=False``.

    Raises:
        ValueError: If a schedule with messages has backwards of a stage and no REDUCE_GRAD of it.
    """
    if not as_is and (missing := not_reduced(schedule)):
        raise ValueError(
            f"stages ({missing}) must have REDUCE_GRAD beside messages, or torch's runtime does "
            "not divide their gradients by the number of microbatches: "
            "add_fsdp_reduce_grad(schedule) adds it, to_json or as_is=True writes it as it is"
        )
    rows = (_with_waits(row) if waits else map(_field, row) for row in schedule.steps)
    lines = [",".join(row) for row in rows]
    lines[-1] = lines[-1] or ","  # blank lines at the end are no ranks
    return "\n".join(lines) + "\n"


def not_reduced(schedule: Schedule) -> list[int]:
    """Return the stages of a schedule with messages whose gradients torch would not divide."""
    if not schedule.has_communication:
        return []
    trained, reduced = set[int](), set[int]()
    for code in (code for row in schedule.steps for cell in row.codes() for code in leaves(cell)):
        stages = trained if code & KIND_MASK in _WEIGHT_GRADS else reduced
        if code & KIND_MASK in {*_WEIGHT_GRADS, FSDP_REDUCE_GRAD}:
            stages.add(code >> STAGE_SHIFT & STAGE_MASK)
    return sorted(trained - reduced)


def _field(step: MetaStep | None) -> str:
    return "" if step is None else str(step)


def _with_waits(row: Iterable[MetaStep | None]) -> Iterator[str]:
    sent: dict[tuple[MetaStepType, int | None, int | None], str] = {}
    for step in row:
        yield _field(step)
        for leaf in step.leaves() if step else ():
            place = leaf.stage_index, leaf.microbatch_index
            match leaf.type:
                case MetaStepType.FWD_SEND | MetaStepType.BWD_SEND:
                    sent[leaf.type, *place] = f"{place[0]}WAIT_{leaf.type.value}{place[1]}"
                case MetaStepType.BWD | MetaStepType.BWD_INPUT:
                    if wait := sent.pop((MetaStepType.FWD_SEND, *place), None):
                        yield wait
                case MetaStepType.FSDP_REDUCE_GRAD:
                    yield f"{place[0]}WAIT_REDUCE_GRAD"
    yield from sent.values()


def from_csv(text: str) -> Schedule:
    """Read torch's CSV, with or without communication steps; blank lines at the end are no ranks.

    Raises:
        ValueError: If a field is no step, a stage stands on two ranks or on none, or there is no
            step; the message begins with the rank and the cell.
    """
    rows: list[list[MetaStep | None]] = []
    place: dict[int, int] = {}
    num_microbatches = 0
    for rank, line in enumerate(text.rstrip().splitlines()):
        rows.append([])
        for position, field in enumerate(line.split(",") if line.strip() else ()):
            if _WAIT.fullmatch(field.strip()):
                continue
            step = _parse_field(field, rank, position)
            rows[-1].append(step)
            for leaf in step.leaves() if step else ():
                stage, microbatch = leaf.stage_index or 0, leaf.microbatch_index or 0
                if place.setdefault(stage, rank) != rank:
                    raise ValueError(
                        f"rank {rank}, cell {position}: stage ({stage}) of {step} must be on one "
                        f"rank, it is on rank {place[stage]} too"
                    )
                num_microbatches = max(num_microbatches, 1 + microbatch)
    if not place:
        raise ValueError("schedule (0 steps) must have at least 1")
    missing = next((stage for stage in range(len(place)) if stage not in place), None)
    if missing is not None:
        raise ValueError(f"stage ({missing}) must be on a rank, no step names it")
    return Schedule.from_steps(
        rows,
        stage_to_rank=[place[stage] for stage in sorted(place)],
        num_microbatches=num_microbatches,
    )


def _parse_field(field: str, rank: int, position: int) -> MetaStep | None:
    if not field.strip():
        return None
    try:
        return MetaStep.from_str(field)
    except ValueError as error:
        raise ValueError(f"rank {rank}, cell {position}: {error}") from None


def to_json(schedule: Schedule) -> str:
    """Return a schedule as JSON, one line per rank."""
    head = {
        "version": _VERSION,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "stage_to_rank": schedule.stage_to_rank,
        "chains": schedule.chains,
    }
    declared = {name: getattr(schedule, name) for name in _DECLARED}
    head |= {name: stages for name, stages in declared.items() if stages is not None}
    lines = (
        "  " + json.dumps([_to_document(step) for step in row], separators=(",", ":"))
        for row in schedule.steps
    )
    rows = ",\n".join(lines)
    return f'{json.dumps(head)[:-1]}, "ranks": [\n{rows}\n]}}\n'


def from_json(text: str) -> Schedule:
    """Read the JSON format.

    Raises:
        ValueError: If the text is no such document.
    """
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"schedule must be JSON: {error}") from None
    _check_document(document)
    ranks = document["ranks"]
    if document["num_ranks"] != len(ranks):
        raise ValueError(
            f"num_ranks ({document['num_ranks']}) must equal len(ranks) ({len(ranks)})"
        )
    return Schedule.from_steps(
        [list(_from_row(row, rank)) for rank, row in enumerate(ranks)],
        stage_to_rank=document["stage_to_rank"],
        num_microbatches=document["num_microbatches"],
        chains=document.get("chains", ()),
        **{name: document.get(name) for name in _DECLARED},
    )


def load(path: Path) -> Schedule:
    """Read a file: JSON if its text begins with a brace, otherwise CSV.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If its text is no schedule.
    """
    return parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> Schedule:
    """Read JSON if the text begins with a brace, otherwise CSV; a byte order mark is skipped.

    Raises:
        ValueError: If the text is no schedule.
    """
    text = text.removeprefix("\ufeff")
    return from_json(text) if text.lstrip().startswith("{") else from_csv(text)


def _to_document(step: MetaStep | None) -> list[object] | None:
    if step is None:
        return None
    if step.sub_steps:
        return ["OVERLAP", *(_to_document(half) for half in step.sub_steps)]
    document: list[object] = [step.type.value, step.stage_index]
    return document if step.microbatch_index is None else [*document, step.microbatch_index]


def _from_row(row: Any, rank: int) -> Iterator[MetaStep | None]:
    _require(isinstance(row, list), f"rank {rank}: row ({reprlib.repr(row)}) must be a list")
    for position, cell in enumerate(row):
        try:
            yield None if cell is None else _from_document(cell)
        except ValueError as error:
            raise ValueError(f"rank {rank}, cell {position}: {error}") from None


def _from_document(cell: Any) -> MetaStep:
    match cell:
        case ["OVERLAP", list(first), list(second)]:
            steps = (_from_document(first), _from_document(second))
            forward_first = steps[0].type is MetaStepType.FWD
            kind = MetaStepType.OVERLAP_F_B if forward_first else MetaStepType.OVERLAP_B_F
            return MetaStep(kind, sub_steps=steps)
        case [str(name), *indices] if name in LEAF_TYPES and all(map(_is_count, indices)):
            if len(indices) == 1 + (not LEAF_TYPES[name].is_fsdp):
                return MetaStep(LEAF_TYPES[name], *indices)
    raise ValueError(
        f'step ({json.dumps(cell)}) must be [type, stage, microbatch], for example ["F", 2, 0]'
    )


def _check_document(document: Any) -> None:
    _require(isinstance(document, dict), "schedule must be a JSON object")
    for key in _REQUIRED:
        _require(key in document, f"schedule must have {key!r}")
    for key in document:
        known = key in {*_REQUIRED, "chains", *_DECLARED}
        _require(known, f"key ({key!r}) must be one of version {_VERSION}'s")
    version = document["version"]
    _require(
        _is_count(version) and version == _VERSION, f"version ({version!r}) must be {_VERSION}"
    )
    for key in ("num_ranks", "num_microbatches"):
        number = document[key]
        _require(_is_count(number), f"{key} ({number!r}) must be a whole number >= 0")
    chains = document.get("chains", [])
    _require(isinstance(chains, list), f"chains ({chains!r}) must be a list of lists")
    lists = {"stage_to_rank": document["stage_to_rank"]}
    lists |= {f"chains[{index}]": chain for index, chain in enumerate(chains)}
    lists |= {name: document[name] for name in _DECLARED if name in document}
    for name, value in lists.items():
        counts = isinstance(value, list) and all(map(_is_count, value))
        _require(counts, f"{name} ({value!r}) must be a list of whole numbers >= 0")
    _require(isinstance(document["ranks"], list), "ranks must be a list of rows")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
