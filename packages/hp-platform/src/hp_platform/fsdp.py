"""What FSDP2 (`torch.distributed.fsdp.fully_shard`) has no public switch for."""

from __future__ import annotations

from hp_platform import _internals


def set_fsdp_frees_parameters(module: object, frees: bool) -> None:
    """Say whether a sharded module may free its gathered parameters; `reshard` then does nothing.

    FSDP2 decides after a forward whether to free by what it did last. If a backward of the same
    module ran meanwhile in another thread, it frees although told not to
    (`set_reshard_after_forward(False)`), under the feet of that backward.

    Args:
        module: One that `fully_shard` was applied to; not those inside it.
        frees: True brings back the usual behaviour.
    """
    for group in _internals.fsdp_param_groups(module):
        if frees:
            vars(group).pop("reshard", None)
        else:
            group.reshard = _keep


def _keep() -> None:
    """Take the place of FSDP's own function."""
