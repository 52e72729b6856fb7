"""All series, one after the other, and their figures."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from integration_tests.reliability import (
    damages,
    environments,
    fuzz,
    kills,
    models,
    mutants,
    reloads,
    rundirs,
)
from integration_tests.reliability.outcome import Outcome
from integration_tests.runs import write_corpus


def main() -> int:
    """Run what is asked for.

    Returns:
        Exit status: 1 where a case went wrong.
    """
    parser = argparse.ArgumentParser(prog="reliability", description=__doc__)
    parser.add_argument("--kills", type=int, default=120, help="kill -9 of ranks")
    parser.add_argument("--flips", type=int, default=300, help="single bits of checkpoints")
    parser.add_argument("--others", type=int, default=140, help="greater damages")
    parser.add_argument("--configs", type=int, default=500, help="fuzzed configs")
    parser.add_argument("--rundirs", type=int, default=300, help="run directories of strangers")
    parser.add_argument("--mutants", type=int, default=160, help="damaged text and tokens")
    parser.add_argument("--models", type=int, default=1000, help="models of strangers")
    parser.add_argument("--reloads", type=int, default=60, help="layouts to load under")
    parser.add_argument("--environments", type=int, default=1000, help="environments of a machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="to be kept; else a temporary one")
    options = parser.parse_args()
    seed: int = options.seed
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data = write_corpus(folder)
        series: dict[str, Callable[[], Outcome]] = {
            "kills": lambda: kills.run(options.kills, folder, seed=seed, data=data),
            "flips": lambda: damages.run(options.flips, options.others, seed=seed),
            "configs": lambda: fuzz.run(options.configs, seed=seed),
            "rundirs": lambda: rundirs.run(options.rundirs, seed=seed),
            "mutants": lambda: mutants.run(options.mutants, seed=seed),
            "models": lambda: models.run(options.models, seed=seed),
            "environments": lambda: environments.run(folder, most=options.environments),
            "reloads": lambda: reloads.run(options.reloads, folder, seed=seed, data=data),
        }
        failed = False
        for name, run in series.items():
            if getattr(options, name):
                outcome = run()
                failed |= bool(outcome.failures)
                sys.stdout.write(f"{outcome}\n")
                sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
