"""Settings that CUDA, NCCL and torch's allocator would read from the environment. No torch."""

from collections.abc import Mapping

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OFF = ("", "0")


def keeps_launch_order(env: Mapping[str, str]) -> bool:
    """Tell whether NCCL keeps operations of several communicators in the order of the host."""
    return env.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") not in _OFF


def loads_eagerly(env: Mapping[str, str]) -> bool:
    """Tell whether torch's kernels are loaded before anything is launched."""
    return env.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


def grows_segments(env: Mapping[str, str]) -> bool:
    """Tell whether torch's allocator takes memory of the device in segments that grow."""
    options = next((env[name] for name in _ALLOCATOR if name in env), "")
    values = dict(option.partition(":")[::2] for option in options.replace(" ", "").split(","))
    return values.get("expandable_segments", "").lower() == "true"
