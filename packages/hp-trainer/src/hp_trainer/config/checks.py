"""Configs as they are run to look at something: in one dtype and thread, or in one process."""

from msgspec.structs import replace

from hp_trainer.config import Config, MeshConfig, PipelineConfig
from hp_trainer.config.timeouts import Timeouts

_START_SECONDS = 180.0


def checked_config(config: Config, *, dtype: str) -> Config:
    """The config as it is run for a check: in this dtype, with one thread.

    Time-outs stay, but for that of the start: the first run waits for torch to be imported.
    """
    launch = replace(
        config.launch,
        num_processes=0,
        threads_per_process=1,
        init_timeout_seconds=max(Timeouts.of(config).init, _START_SECONDS),
    )
    return replace(
        config,
        run=replace(config.run, resume="", tensorboard=False),
        launch=launch,
        train=replace(config.train, dtype=dtype),
    )


def one_process(config: Config) -> Config:
    """The same training in one process, not compiled, and planned as usual where it is planned."""
    pipeline, train = PipelineConfig(schedule="1f1b"), replace(config.train, compile="none")
    return replace(
        config,
        mesh=MeshConfig(),
        pipeline=pipeline,
        train=train,
        data=replace(config.data, plan_tokens=0, plan_costs=""),
    )
