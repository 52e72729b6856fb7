"""Time-outs that the config leaves open know the size of the job."""

from typing import Any

import msgspec
import pytest

from hp_trainer.config import Config
from hp_trainer.config.schema import fields


def config_of(**sections: dict[str, Any]) -> Config:
    """The default config with some keys of some sections."""
    return msgspec.convert(sections, Config)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, (60.25, 300.5, 120.5)),
        ({"mesh": {"dp_shard": 8}}, (62, 304, 124)),
        ({"mesh": {"dp_shard": 32, "pp": 8}}, (124, 428, 248)),
        ({"mesh": {"dp_shard": 8}, "train": {"compile": "inductor"}}, (62, 604, 424)),
        ({"mesh": {"pp": 2, "stage_tp": [1, 3]}}, (61, 302, 122)),
    ],
)
def test_they_grow_with_the_job(
    sections: dict[str, dict[str, Any]], expected: tuple[float, ...]
) -> None:
    assert config_of(**sections).timeouts == expected


@pytest.mark.parametrize("ranks", [1, 1024])
def test_what_is_given_is_taken(ranks: int) -> None:
    launch = {"init_timeout_seconds": 7, "step_timeout_seconds": 8, "hang_seconds": 9}
    config = config_of(mesh={"dp_shard": ranks}, launch=launch, train={"compile": "inductor"})
    assert config.timeouts == (7, 8, 9)


def test_the_help_says_how_they_grow() -> None:
    """The numbers of `hp config` and of the documentation are those of the code."""
    help_of = {key: field.help for key, field in fields().items()}
    for key, base, each in (
        ("init_timeout_seconds", 60, 0.25),
        ("step_timeout_seconds", 300, 0.5),
        ("hang_seconds", 120, 0.5),
    ):
        assert f"0: {base}, and {each} for each process" in help_of[f"launch.{key}"]
