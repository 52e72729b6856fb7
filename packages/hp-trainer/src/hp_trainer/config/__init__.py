"""The keys of a config, where their values come from, and the rules across them."""

from hp_trainer.config.keys import (
    LARGEST,
    MOST_EXPERTS,
    MOST_LAYERS,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PipelineConfig,
    TrainConfig,
    to_dict,
)

__all__ = [
    "LARGEST",
    "MOST_EXPERTS",
    "MOST_LAYERS",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "PipelineConfig",
    "TrainConfig",
    "to_dict",
]
