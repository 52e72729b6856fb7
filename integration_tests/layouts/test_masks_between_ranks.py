"""What context-parallel ranks of a run compare of their masks, and what happens if they differ."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hp_context import Documents
from hp_platform import shutdown
from hp_platform.testing import record_exchanges, run_distributed
from hp_trainer.training import batches
from integration_tests.runs import config_of, prepare_run, trained_a_step

BATCH = 8
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "keys gathered": {"mesh": {"cp": 2, "cp_heads": 1}},
    "heads shared": {"mesh": {"cp": 2, "cp_heads": 2}},
    "a ring, all run again": {
        "mesh": {"cp": 2, "cp_heads": 1, "cp_ring": True},
        "train": {"recompute": "full"},
    },
}
OF_A_RUN: dict[str, dict[str, Any]] = {
    "data": {"seq_len": 256, "eval_fraction": 0.2},
    "train": {"global_batch_size": BATCH, "microbatch_size": 2},
}


def _compared(encoded: bytes, directory: str, address: str) -> int:
    """How often ranks compare masks in one step after the first."""
    trainer = trained_a_step(encoded, directory, address)
    group = trainer.mesh.groups["cp"].group_name
    with record_exchanges() as exchanges:
        trainer.compute_gradients()
    shutdown()
    return sum(
        e.group == group and e.kind == "all_gather" and e.dtype == torch.int64 for e in exchanges
    )


def _different(encoded: bytes, directory: str, address: str) -> str:
    """Rank 1 takes a document for two in the second step, as with a wrong file of offsets."""
    trainer = trained_a_step(encoded, directory, address)

    def cut(lengths: tuple[int, ...]) -> Documents:
        first, *others = lengths
        return Documents((1, first - 1, *others) if first > 1 else lengths)

    if trainer.mesh.groups["cp"].rank() == 1:
        vars(batches)["Documents"] = cut
    with pytest.raises(ValueError, match="masks of ranks") as caught:
        trainer.compute_gradients()
    shutdown()
    return str(caught.value)


def _run(what: Any, layout: dict[str, dict[str, Any]], directory: Path) -> list[Any]:
    config = config_of(OF_A_RUN, **{**layout, "train": OF_A_RUN["train"] | layout.get("train", {})})
    address = prepare_run(config, directory)
    run = partial(what, msgspec.json.encode(config), str(directory), address)
    return run_distributed(run, world_size=2, timeout=120)


@pytest.mark.sample("a ring, all run again")
@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_are_compared_once_and_not_in_each_of_the_layers(
    name: str, tmp_path: Path
) -> None:
    assert _run(_compared, LAYOUTS[name], tmp_path) == [BATCH] * 2


@pytest.mark.sample("keys gathered")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_with_other_documents_is_named_by_all(name: str, tmp_path: Path) -> None:
    for message in _run(_different, LAYOUTS[name], tmp_path):
        assert "masks of ranks [1] must equal those of ranks [0]" in message
