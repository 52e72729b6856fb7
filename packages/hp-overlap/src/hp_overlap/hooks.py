"""The four hooks on tensors: an identity in both directions that stops at the coordinator."""

from functools import partial

from torch import Tensor

from hp_overlap.coordinator import HookCoordinator
from hp_overlap.turn import Hook, Side
from hp_platform import is_waited, sync_hook


def hook_tensor(x: Tensor, name: Hook, coordinator: HookCoordinator) -> Tensor:
    """Return `x` with hook `name` passed now and again when its gradient comes back.

    The hook is recorded in the graph also while the coordinator is disabled, because the
    backward of a forward that ran alone may be overlapped later.

    Args:
        x: Any shape and dtype; a lazy collective result stays unwaited.
        name: Hook A, B, C or D of Note [Turns].
        coordinator: Where the two sides meet.
    """
    return sync_hook(
        x,
        forward=partial(coordinator.hook, "forward", name),
        backward=partial(coordinator.hook, "backward", name),
    )


def require_unwaited(x: Tensor, what: str, direction: Side, coordinator: HookCoordinator) -> None:
    """Raise if `x`, the result of a wrapped collective, was waited for while a pair runs.

    Outside a pair nothing has to be hidden, and a recomputation may hand out saved results, so
    neither is looked at.

    Raises:
        ValueError: Its collective was waited for inside the wrapped function.
    """
    relevant = coordinator.is_enabled() and coordinator.side() == direction
    if relevant and is_waited(x):
        raise ValueError(
            f"{what} ({tuple(x.shape)}, {x.dtype}) must be unwaited for its transfer to be "
            f"hidden: return the result of hp_platform.all_to_all_lazy and use it after the hook"
        )
