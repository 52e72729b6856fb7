"""Every model of transformers is tried before its first forward on a part of the sequence.

A model carries the question as a hook of its own, which asks once and removes itself. Models that
exist when attention is registered get it then, others as soon as their first part is put in.
Models that never call the registered attention are asked too: these would be the wrong ones.
"""

import gc

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from hp_context.hugging_face.mixers import current_trial, find_mixer
from hp_platform import outside_graph

_names: set[str] = set()  # registered by this package
_watching: list[RemovableHandle] = []  # one at most, of the process
_MARK = "_hp_context_watched"


def watch_models(name: str, base: type[nn.Module]) -> None:
    """Try every model that selects an attention, before its first forward.

    Args:
        name: Name under which the attention was registered.
        base: Class of all models of transformers.
    """
    _names.add(name)
    if _watching:
        return

    def attach(module: nn.Module, *_: object) -> None:
        if isinstance(module, base) and _MARK not in module.__dict__:
            module.__dict__[_MARK] = module.register_forward_pre_hook(outside_graph(_ask))

    for found in gc.get_objects():
        if issubclass(type(found), base):
            attach(found)
    _watching.append(register_module_module_registration_hook(attach))


def _ask(model: nn.Module, _: object) -> None:
    """Refuse a model that mixes positions elsewhere than in attention."""
    if current_trial() is not None or not _selected(model):
        return
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    found = find_mixer(model)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard() if part is model else part.reshard()
    if found is not None:
        raise ValueError(
            f"{found}: all of a model but attention by transformers' registry must treat "
            "positions one by one with hp_context"
        )
    for part in model.modules():
        handle = part.__dict__.pop(_MARK, None)
        if handle is not None:
            handle.remove()


def _selected(model: nn.Module) -> bool:
    """Tell whether a model, or a model in it, has chosen attention of this package."""
    configs = (getattr(part, "config", None) for part in model.modules() if _MARK in part.__dict__)
    return any(getattr(config, "_attn_implementation", None) in _names for config in configs)
