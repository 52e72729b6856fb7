"""Notes on a model of transformers in the first lines of a run."""

from importlib.metadata import version
from pathlib import Path

from hp_checkpoint.json_file import read_json
from hp_checkpoint.weight_files import first_of
from hp_platform.host_reads import is_dry
from hp_trainer.config import Config
from hp_transformers.families.proven import doubts
from hp_transformers.stages.load import left_out

_MOST_BYTES = 1 << 20  # of a config


def notes(config: Config) -> list[str]:
    """Say what of a run of `model.transformers` was never compared with one process, in lines.

    Args:
        config: Config of the run.

    Returns:
        Warnings; none where the run has no model of transformers.
    """
    if not config.model.transformers:
        return []
    path = Path(config.model.transformers) / "config.json"
    model_type = str(read_json(path, most_bytes=_MOST_BYTES).get("model_type"))
    lines = doubts(model_type, config, version("transformers"))
    if not (config.run.resume or is_dry()) and (names := left_out(config.model)):
        lines.append(
            f"warning: {first_of(names)} of {path.parent} are of no part of the model in "
            "transformers: they are not trained"
        )
    return lines
