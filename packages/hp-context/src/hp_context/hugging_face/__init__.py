"""Models of Hugging Face's transformers over a sequence that is split across ranks."""

from importlib import import_module

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hp_context.batch import CONTIGUOUS, SequenceLayout
from hp_context.hugging_face.attention import SpreadAttention, make_call_mask
from hp_context.hugging_face.mixers import watch_models
from hp_platform import outside_graph


def register_attention(
    mesh_or_group: DeviceMesh | ProcessGroup,
    *,
    name: str = "hp_context",
    ulysses_degree: int | None = None,
    ring: bool = False,
    layout: SequenceLayout = CONTIGUOUS,
    load_balance: bool = False,
) -> None:
    """Let models of transformers run on a part of the sequence.

    Afterwards `from_pretrained(..., attn_implementation="hp_context")`, or
    `model.set_attn_implementation("hp_context")`, selects it. Each rank then gives the model its
    part of tokens, labels and position ids; `shard_batch` makes these. Attention is causal within
    the documents that the position ids tell, in the window of the layer if it has one.

    The registries are of the process, as their other entries are: a second registration of a name
    replaces the first. Models on other ranks, or of another layout, need another name.

    A module that mixes positions elsewhere than in attention, such as a convolution or a scan,
    would see only a part of the sequence. A model with such a module is refused before its first
    forward: it is run once on two short sequences to find out.

    Args:
        mesh_or_group: The ranks that share the sequence, in its order; all of them call. A mesh
            of two axes, outer and inner, stands for both groups of the hybrid mode.
        name: Name by which models select it.
        ulysses_degree: The mode; see `ContextParallel`.
        ring: Whether keys and values travel round a ring; see `ContextParallel`.
        layout: Positions that each rank has; the same as of `shard_batch`.
        load_balance: Short for `layout=HeadTail()`.

    Raises:
        ImportError: transformers is not installed, or older than 5.
        ValueError: The degree does not fit the ranks, or arguments contradict each other.
    """
    try:
        models = import_module("transformers.modeling_utils")
        attention = models.ALL_ATTENTION_FUNCTIONS
        masks = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    except (ImportError, AttributeError):
        raise ImportError("needs transformers 5: pip install 'transformers>=5'") from None
    spread = SpreadAttention(
        mesh_or_group,
        ulysses_degree=ulysses_degree,
        ring=ring,
        layout=layout,
        load_balance=load_balance,
    )
    attention.register(name, outside_graph(spread.__call__))
    masks.register(name, outside_graph(make_call_mask))
    watch_models(name, models.PreTrainedModel)
