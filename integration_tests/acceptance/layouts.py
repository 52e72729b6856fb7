"""Compare layouts with one process by `hp verify`; what one process records is kept for all.

Layouts that train the same model in the same dtype are compared with
one recording, which the first of them makes, each case being a process of its own.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hp_base.atomic_write import replace_file
from hp_train.verify.compare_values import RunComparison
from hp_train.verify.program import Program
from hp_train.verify.rank import RECORDING
from hp_train.verify.runs import Runs
from hp_trainer.config import Config
from hp_trainer.config.options import checked_config, one_process, resolve, to_toml, with_keys
from integration_tests.acceptance.cases import AGAINST_CPU, Case, Place, slug
from integration_tests.acceptance.outcome import Found

MODEL = Path(__file__).with_name("model.toml")
STEPS = 3
_DONE = "done"


def config_of(case: Case, place: Place, work: Path) -> Config:
    """The config of a layout as it is verified.

    Args:
        case: Case of the layout.
        place: Devices of this machine.
        work: Working folder of the kit, which holds its text.
    """
    overrides = {
        "data.paths": [str(corpus(work))],
        "launch.device": place.device,
        "launch.backend": place.backend(case.ranks),
        **case.keys,
    }
    resolved = resolve(str(MODEL), overrides.items(), env={})
    config = checked_config(resolved.config, dtype=case.dtype)
    return Program(steps=STEPS).applied_to(config)


def corpus(work: Path) -> Path:
    """A little text, of documents much shorter than a sequence."""
    path = work / "corpus.jsonl"
    if not path.exists():
        lines = (f'{{"text": "{i} squared is {i * i}, cubed {i**3}."}}\n' for i in range(1500))
        replace_file(path, "".join(lines).encode())
    return path


def reference(case: Case, place: Place, work: Path) -> Found:
    """One process against the oracle."""
    config = one_process(config_of(case, place, work))
    runs = _runs(config, work / "oracle")
    runs.adopt(config, reference_run(config, work))
    return judged(runs.compare(config, None))


def layout(case: Case, place: Place, work: Path) -> Found:
    """A layout against one process on the same device."""
    config = config_of(case, place, work)
    runs, alone = _beside(case, config, work)
    return judged(runs.compare(config, alone))


def request(case: Case, place: Place, work: Path) -> Found:
    """Make the run directory of a layout whose ranks are started on several machines."""
    config = config_of(case, place, work)
    run_dir = _beside(case, config, work)[0].requested(config)
    named = {"run.output_dir": str(run_dir.parent), "run.name": run_dir.name}
    path = run_dir.with_suffix(".toml")
    path.write_text(to_toml(with_keys(config, named)))
    figures = {"config": str(path), "run": str(run_dir)}
    return Found(status="passed", summary="asked for", figures=figures)


def compare_requested(case: Case, place: Place, work: Path) -> Found:
    """Compare with one process what those ranks have recorded."""
    config = config_of(case, place, work)
    run_dir = next(_recorded(_layout_folder(case, work)))
    alone = one_process(with_keys(config, {"launch.backend": "auto"}))
    runs = _runs(alone, work / "compared")
    for known, recorded in ((alone, reference_run(alone, work)), (config, run_dir)):
        runs.adopt(known, recorded)
    return judged(runs.compare(config, alone))


def _beside(case: Case, config: Config, work: Path) -> tuple[Runs, Config]:
    """Runs that know that of one process, and its config."""
    alone = one_process(with_keys(config, {"launch.backend": "auto"}))
    if case.name == AGAINST_CPU:
        alone = with_keys(alone, {"launch.device": "cpu"})
    runs = _runs(alone, _layout_folder(case, work))
    runs.adopt(alone, reference_run(alone, work))
    return runs, alone


def _layout_folder(case: Case, work: Path) -> Path:
    return work / "layouts" / slug(case.name)


def reference_run(config: Config, work: Path) -> Path:
    """Run directory of one process, recorded now unless it was."""
    name = hashlib.sha256(msgspec.json.encode(config)).hexdigest()[:12]
    folder = work / "references" / name
    if not (folder / _DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        _runs(config, folder).recording(config)
        (folder / _DONE).touch()
    return next(_recorded(folder))


def judged(comparison: RunComparison) -> Found:
    """What a comparison says of a layout."""
    figures = {
        "bound": comparison.bound,
        "largest error": max(comparison.errors.values(), default=0.0),
        "numbers": comparison.num_values,
        "errors": {name: error for name, error in comparison.errors.items() if error > 0},
    }
    if not comparison.ok:
        figures["first difference"] = str(comparison.first or comparison.flaws[0])
    status = "passed" if comparison.ok else "failed"
    return Found(status=status, summary=comparison.summary().split(": ")[0], figures=figures)  # type: ignore[arg-type]


def _runs(base: Config, folder: Path) -> Runs:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Runs(folder, base=base, program=Program(steps=STEPS))


def _recorded(folder: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(folder.glob(f"run-*/{RECORDING}")))
