"""What documents cost a stage of a pipeline: linear and quadratic terms, experts, and exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hp_context import DealCost
from hp_train.config import ModelConfig
from hp_train.costs.machine import Machine

_BYTES = 2  # of a number in bfloat16
_ATTENTION_BACKWARD = 2.5  # of its forward: scores again, and four products where there were two
_KEYS_BACKWARD = 3.0  # keys travel again, and their gradients in float32
_KERNELS = 16  # of a layer in forward


class Seconds(NamedTuple):
    """Of one microbatch in one stage.

    Attributes:
        forward: Forward.
        input_grad: Backward of its input.
        weight_grad: Backward of its weights.
    """

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a stage takes; stages are equal.

    Attributes:
        token: Forward seconds of a token, but for attention proper.
        pair: Forward seconds of a query and a key that it sees, in all layers of the stage.
        key: Seconds to fetch a key and its value from another rank of the node, for all layers of
            the stage.
        far_key: The same from a rank of another node.
        node: Ranks of a stage that are in one node.
        heads: Seconds of a token's q, k, v and output on their way to ranks of a node that share
            heads, in all layers of the stage.
        expert: Seconds of a token's way to its experts and back.
        microbatch: Seconds of a forward, or of a backward of inputs, however short it is.
        message: Seconds of a token's activation on its way to the next stage.
        hidden: Share of attention proper behind which keys can be fetched, and of projections
            behind which q, k, v and the output can travel.
        windows: What layers look at, as `hp_context.deal_documents` takes it.
    """

    token: float
    pair: float
    key: float = 0.0
    far_key: float = 0.0
    node: int = 8
    heads: float = 0.0
    expert: float = 0.0
    microbatch: float = 0.0
    message: float = 0.0
    hidden: float = 0.8
    windows: tuple[int | None, ...] = (None,)

    @classmethod
    def of(cls, model: ModelConfig, machine: Machine, *, num_stages: int) -> "StepCosts":
        """Those of a model on a machine whose ranks exchange keys over the links of nodes.

        Args:
            model: Its layers are shared out evenly; embedding and output are left out.
            machine: Rates.
            num_stages: Number of stages.
        """
        layers = model.num_layers / num_stages
        heads, width = model.num_heads, model.head_dim or model.dim // model.num_heads
        if model.attention == "mla":
            of_key = model.nope_head_dim + model.rope_head_dim
            sizes, kv = of_key + model.v_head_dim, heads
        else:
            sizes, kv = 2 * width, model.num_kv_heads
        projected = model.dim * (heads * sizes + kv * sizes)
        sparse = [not model.is_dense(layer) for layer in range(model.num_layers)]
        active = (model.top_k + model.num_shared_experts) * model.expert_hidden
        share = sum(sparse) / len(sparse)
        hidden = share * active + (1 - share) * model.dense_hidden
        routed = share * model.top_k * 2 * model.dim * _BYTES if model.num_experts else 0.0
        flops = machine.attention_flops or machine.flops
        of_layers = range(model.num_layers)
        windows = [model.sliding_window - 1 if model.has_window(i) else None for i in of_layers]
        return cls(
            token=layers * 2 * (projected + 3 * model.dim * hidden) / machine.flops,
            pair=layers * 2 * heads * sizes / flops,
            key=layers * kv * sizes * _BYTES / machine.bandwidth,
            far_key=layers * kv * sizes * _BYTES / machine.node_bandwidth,
            node=machine.node_size,
            heads=layers * (heads + kv) * sizes * _BYTES / machine.bandwidth,
            expert=layers * routed / machine.node_bandwidth,
            microbatch=layers * (machine.layer_seconds or _KERNELS * machine.launch_seconds),
            message=model.dim * _BYTES / machine.node_bandwidth,
            windows=tuple(windows),
        )

    def pure(self, tokens: float, pairs: float) -> Seconds:
        """Of so many tokens and pairs on one rank, without exchanges and what every call takes."""
        attention = self.pair * pairs
        linear = self.token * tokens
        return Seconds(linear + attention, linear + _ATTENTION_BACKWARD * attention, linear)

    def of_parts(self, tokens: Sequence[int], cost: DealCost, *, heads: int = 1) -> Seconds:
        """Of a microbatch whose ranks have so many tokens each: as long as its slowest takes."""
        far = cost.far or (0.0,) * len(tokens)
        found = [
            self._of_rank(t, pairs, self.key * (keys - away) + self.far_key * away)
            for t, pairs, keys, away in zip(tokens, cost.pairs, cost.fetched, far, strict=True)
        ]
        forward, input_grad, weight_grad = map(max, zip(*found, strict=True))
        share = self.sharing(max(tokens), heads=heads) / 2
        return Seconds(forward + share, input_grad + share, weight_grad)

    def sharing(self, tokens: float, *, heads: int) -> float:
        """Seconds that so many tokens wait for heads, in forward and backward."""
        return 2 * (1 - self.hidden) * self.heads * tokens * (heads - 1) / heads

    def _of_rank(self, tokens: int, pairs: float, fetching: float) -> Seconds:
        pure = self.pure(tokens, pairs)
        attention = self.pair * pairs
        always = self.microbatch + self.expert * tokens
        waits = max(0.0, fetching - self.hidden * attention)
        attention *= _ATTENTION_BACKWARD
        waits_again = max(0.0, _KEYS_BACKWARD * fetching - self.hidden * attention)
        return Seconds(
            pure.forward + always + waits,
            pure.input_grad + always + waits_again,
            pure.weight_grad,
        )
