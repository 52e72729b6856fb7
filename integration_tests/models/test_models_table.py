"""Cells of the table of models: how they are judged, kept and shipped; without transformers."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from hp_trainer.config.options import build
from hp_transformers.stages import notes, proven
from hp_transformers.stages.notes import doubts
from hp_transformers.stages.proven import Row, Table, read_table
from hp_verify.recording.values import RecordedStep
from integration_tests.models.architectures import command
from integration_tests.models.architectures.cells import (
    DIFFERENT,
    EQUAL,
    FAILED,
    KINDS,
    REFUSED,
    WITHOUT,
    Architecture,
    Cell,
)
from integration_tests.models.architectures.compact import encoded, with_found
from integration_tests.models.architectures.judge import (
    GRADIENT,
    LOGITS,
    LOSS,
    NORM,
    WEIGHT,
    Judgement,
    judge,
)
from integration_tests.models.architectures.kept import finite, read, write
from integration_tests.models.architectures.page import page
from integration_tests.models.architectures.trained import Trained

VERSIONS = {"transformers": "5.23.0", "torch": "2.13.0", "hp-train": "0.1.0"}


def found(name: str = "llama", *, digest: str = "d", **states: str) -> Architecture:
    """An architecture that is equal but for some kinds, which have `_` for a blank."""
    cells = []
    for kind in KINDS:
        state = states.get(kind.replace(" ", "_"), EQUAL)
        error = 4.2e-15 if state == EQUAL else 0.5
        compared = 0 if state in (REFUSED, WITHOUT) else 9
        worst = "" if state == EQUAL else "step 1, gradient w"
        reason = "no heads to share" if state == REFUSED else ""
        cells.append(
            Cell(
                kind=kind,
                state=state,
                error=error,
                compared=compared,
                worst=worst,
                reason=reason,
                seconds=0.5,
            )
        )
    return Architecture(
        name=name, versions=VERSIONS, digest=digest, cells=tuple(cells), seconds=0.25
    )


def trained() -> Trained:
    """What one process computes of a model with a weight that counts and one that does not."""
    torch.manual_seed(0)
    gradients = [
        {"w": torch.rand(3, 2).double(), "zero": 1e-17 * torch.rand(2).double()} for _ in range(2)
    ]
    weights = {"w": torch.rand(3, 2).double(), "zero": torch.zeros(2).double()}
    return Trained(torch.rand(2, 4, 5).double(), [1.5, 1.25], [0.5, 0.25], gradients, weights)


def recorded(of: Trained) -> list[RecordedStep]:
    """Recording of a run that is equal."""
    steps = []
    for index, gradients in enumerate(of.gradients):
        scalars = {
            LOSS: {"": torch.tensor(of.losses[index], dtype=torch.float64)},
            NORM: {"": torch.tensor(of.norms[index], dtype=torch.float64)},
        }
        tensors = {**scalars, GRADIENT: {name: g.clone() for name, g in gradients.items()}}
        steps.append(RecordedStep(index + 1, tensors))
    steps[0].tensors[LOGITS] = {"": of.logits.clone()}  # type: ignore[index]
    steps[-1].tensors[WEIGHT] = {name: w.clone() for name, w in of.weights.items()}  # type: ignore[index]
    return steps


def judged(steps: list[RecordedStep], of: Trained) -> Judgement:
    """Judge a recording whose export is right."""
    return judge(steps, of.weights, of)


def test_a_run_that_is_equal_has_no_error_and_all_of_it_was_compared() -> None:
    one = trained()

    result = judged(recorded(one), one)

    assert (result.error, result.flaws) == (0.0, [])
    # Logits, two losses, two norms, two gradients of two steps, two weights and two exported.
    assert result.compared == 1 + 2 + 2 + 4 + 4


@pytest.mark.parametrize("quantity", [LOGITS, LOSS, NORM, GRADIENT, WEIGHT])
def test_an_error_in_any_quantity_is_found_and_named(quantity: str) -> None:
    one = trained()
    steps = recorded(one)
    step = next(step for step in steps if quantity in step.tensors)
    name = next(iter(step.tensors[quantity]))
    step.tensors[quantity][name].mul_(1 + 1e-9)

    result = judged(steps, one)

    assert result.error == pytest.approx(1e-9, rel=1e-5)
    assert quantity in result.worst


def test_rounding_of_what_is_zero_is_no_difference_but_a_value_is() -> None:
    one = trained()
    steps = recorded(one)
    steps[0].tensors[GRADIENT]["zero"].mul_(-3)
    assert judged(steps, one).error < 1e-12

    steps[0].tensors[GRADIENT]["zero"].add_(1e-9)
    assert judged(steps, one).error > 1e-9


def test_what_is_missing_or_not_finite_or_contradicts_is_never_equal() -> None:
    one = trained()
    steps = recorded(one)
    del steps[1].tensors[GRADIENT]["w"]  # type: ignore[attr-defined]
    steps[0].tensors[GRADIENT]["other"] = torch.zeros(1)  # type: ignore[index]
    steps[0] = RecordedStep(1, steps[0].tensors, ("gradient w: 2 of 6 values are on no rank",))
    steps[0].tensors[LOSS][""].fill_(math.nan)

    result = judged(steps, one)

    assert result.flaws == [
        "step 1: gradient w: 2 of 6 values are on no rank",
        "step 2, gradient w: inf (missing in actual)",
        "step 1, gradient other: inf (missing in expected)",
    ]
    assert result.error == math.inf
    assert finite(result.error) is None


def test_what_was_exported_is_compared_as_well() -> None:
    one = trained()
    exported = {**one.weights, "w": one.weights["w"] + 1e-6}

    assert judge(recorded(one), exported, one).worst == "step 2, exported weight w"


def test_result_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    one = found(tp_2=REFUSED)
    write(tmp_path, one)

    assert read(tmp_path, Architecture) == {"llama": one}


def test_the_shipped_form_has_every_cell_and_its_reason() -> None:
    one = found(tp_2=REFUSED, cp_2_ring=DIFFERENT, ep_2=WITHOUT)
    table = with_found(Table(), [one])

    decoded = msgspec.json.decode(encoded(table), type=Table)

    assert decoded == table
    cells = decoded.cells("llama")
    assert cells["one process"] == 4.2e-15
    assert cells["tp 2"] == "no heads to share"
    assert cells["cp 2 ring"] == "different: step 1, gradient w by 5.0e-01"
    assert cells["ep 2"] is None
    assert decoded.rows["llama"].seconds == pytest.approx(0.25 + 0.5 * len(KINDS), abs=0.06)


def test_cells_of_other_code_are_dropped_and_those_of_the_same_kept() -> None:
    table = with_found(Table(), [found(tp_2=REFUSED)])
    only = replace(found(), cells=(Cell(kind="fsdp 2", state=EQUAL, error=1e-15),))

    assert with_found(table, [only]).cells("llama")["tp 2"] == "no heads to share"
    assert with_found(table, [only]).cells("llama")["fsdp 2"] == 1e-15
    assert with_found(table, [replace(only, digest="x")]).cells("llama")["tp 2"] is None


def test_the_page_counts_cells_and_tells_every_reason() -> None:
    unmade = Architecture(name="musicgen", versions=VERSIONS, reason="Error: no `dropout`")
    some = [found(), found("beam", tp_2=REFUSED, cp_2_ring=FAILED, ep_2=WITHOUT), unmade]

    text = page(with_found(Table(), some))

    assert "3 causal architectures, 2 of which train" in text
    assert "| tp 2 | 1 | 1 | 0 |" in text
    assert "| cp 2 ring | 1 | 0 | 1 |" in text
    assert "| ep 2 | 1 | 0 | 0 |" in text
    assert "- **a** no heads to share" in text
    assert "**b** different: step 1, gradient w by 5.0e-01" in text
    assert "- musicgen: Error: no `dropout`" in text
    assert text.count("4.2e-15") == 2 * len(KINDS) - 3


def test_training_is_told_what_was_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = with_found(Table(), [found(pp_2_1f1b=DIFFERENT, ep_2=WITHOUT)])
    monkeypatch.setattr(proven, "TABLE", tmp_path / "proven.json")
    proven.TABLE.write_bytes(encoded(table))
    plain = build({"data.documents": "joined"})
    pipeline = build(
        {"data.documents": "joined", "mesh.pp": 2, "pipeline.schedule": "1f1b", "mesh.ep": 2}
    )

    assert doubts("llama", plain, "5.23.0") == []
    assert doubts("other", plain, "5.23.0") == [
        "warning: other was never compared with transformers"
    ]
    assert doubts("llama", plain, "5.24.0") == [
        "warning: llama was compared with transformers 5.23.0, not 5.24.0"
    ]
    assert doubts("llama", pipeline, "5.23.0") == [
        "warning: llama under pp 2 1f1b is different: step 1, gradient w by 5.0e-01",
        "warning: llama was never compared with transformers under ep 2",
    ]


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_layout_of_a_kind_is_known_as_that_kind(kind: str) -> None:
    keys = {"data.documents": "joined", **KINDS[kind].keys}
    config = build({key: value for key, value in keys.items() if key != "mesh.gather"})

    known = list(notes._kinds_of(config))

    parts = {"pp 2 x fsdp 2": ["pp 2 1f1b", "fsdp 2"], "ep 2": ["fsdp 2", "ep 2"]}
    assert set(parts.get(kind, [kind])) <= set(known)
    assert len(known) <= 3


def test_a_schedule_of_one_stage_per_rank_is_known_as_what_it_is_then() -> None:
    keys = {"mesh.pp": 2, "data.documents": "joined"}

    assert "pp 2 1f1b" in notes._kinds_of(build(keys))
    several = build({**keys, "pipeline.stages_per_rank": 2})
    assert "pp 2 interleaved 1f1b" in notes._kinds_of(several)


def test_the_table_that_comes_along_is_of_these_kinds() -> None:
    table = read_table()

    assert table.kinds in ((), tuple(KINDS))
    assert all(len(row.cells) in (0, len(KINDS)) for row in table.rows.values())


def test_new_architectures_are_those_without_a_row_or_with_other_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Tiny:
        def __init__(self, name: str) -> None:
            self.digest = {"llama": "d", "beam": "changed"}.get(name, "n")

    installed = ["llama", "beam", "fresh"]
    table = Table(rows={"llama": Row(digest="d"), "beam": Row(digest="d"), "gone": Row()})

    assert command.new_of(installed, installed, table, Tiny, VERSIONS) == ["fresh", "beam"]
    told = capsys.readouterr().out
    assert "1 new, 1 with other code, 1 gone" in told
    assert "to do: " in told


def test_only_kinds_that_are_missing_or_red_are_run_again() -> None:
    kinds = ["fsdp 2", "tp 2", "ep 2"]

    assert command._missing(None, kinds) == kinds
    assert command._missing(found(tp_2=DIFFERENT), kinds) == ["tp 2"]
    assert command._missing(Architecture(name="musicgen", versions={}), kinds) == []

    only = replace(found(tp_2=REFUSED), cells=(Cell(kind="tp 2", state=REFUSED),))
    joined = command._joined(found(tp_2=DIFFERENT), only)
    assert len(joined.cells) == len(KINDS)
    assert [cell.kind for cell in joined.cells if cell.state != EQUAL] == ["tp 2"]
    assert command._joined(found(digest="x"), only) == only
