"""The models and the training of hp-train once more: one process, plain torch, nothing of hp-*.

Written from the papers and from what transformers computes, as plainly as it can be said: whole
matrices of scores, a loop over experts, autograd for every gradient. What the fast code gives is
compared with this, so this file imports nothing that the fast code is made of. It reads the tables
of a config, weights by their global names, and rows of tokens.

Shape symbols: B sequences, S positions, D model width, N query heads, H width of a head, E experts,
K experts per token, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_UNDECAYED = ("norm.weight", ".bias", ".b1", ".b2", ".b3", ".sinks")
_MASK = 2**32 - 1


class Losses(NamedTuple):
    """Parts of the loss of a step.

    Attributes:
        tokens: Mean cross-entropy of the next token.
        balance: Balancing loss, as it is added.
        prediction: Mean cross-entropy of all modules that predict further ahead.
    """

    tokens: float
    balance: float
    prediction: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one step.

    Attributes:
        losses: Losses over all sequences.
        norm: Norm of all gradients together, before clipping.
        rate: Learning rate.
        gradients: Gradients by name, before clipping.
        choices: Name of a layer -> experts of each token [B, S, K].
        scores: Name of a layer -> scores that they were chosen by [B, S, E].
    """

    losses: Losses
    norm: float
    rate: float
    gradients: Mapping[str, Tensor]
    choices: Mapping[str, Tensor]
    scores: Mapping[str, Tensor]


@dataclass(slots=True)
class _Pass:
    """One forward of some sequences: what it needs, and what it finds on the way.

    Attributes:
        seen: Keys of the document that each query may see [B, S, S]; causality included.
        drop: Seed, step and index of the first sequence; None outside training.
        balance: Balancing losses, one per layer and sequence.
        choices: See `Outcome`.
        scores: See `Outcome`.
    """

    seen: Tensor
    drop: tuple[int, int, int] | None
    balance: list[Tensor] = field(default_factory=list)
    choices: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)


class Oracle:
    """A model in training.

    Args:
        tables: The config: section -> key -> value.
        weights: Values of parameters and correction biases, by global name; they are copied to
            fp64.
        separator: Token that ends a document; -1: sequences are one document each.

    Attributes:
        weights: fp64, by name.
        moments: Moments of AdamW: decaying means of gradients and of their squares, by name.
    """

    def __init__(
        self,
        tables: Mapping[str, Mapping[str, Any]],
        weights: Mapping[str, Tensor],
        *,
        separator: int,
    ) -> None:
        self.model, self.train, self.seed = tables["model"], tables["train"], tables["run"]["seed"]
        self.separator = separator
        wide = {name: tensor.detach().double().clone() for name, tensor in weights.items()}
        self.weights = wide
        self.names = [name for name in wide if not name.endswith("correction_bias")]
        self.moments = tuple(
            {name: torch.zeros_like(wide[name]) for name in self.names} for _ in range(2)
        )
        self.step = self.updates = 0

    def train_step(
        self, tokens: Tensor, first: int, *, max_norm: float, skip: bool = False
    ) -> Outcome:
        """Train on one global batch.

        Args:
            tokens: Ids of all sequences, and the one that follows the last, int64 [B, S + 1].
            first: Index of the first sequence in the whole training, which its dropout depends on.
            max_norm: Largest norm of the gradients, which are scaled down to it; 0: they are not.
            skip: Whether the weights are to stay as they are.
        """
        parameters = {name: self.weights[name].requires_grad_() for name in self.names}
        found, losses = self._backward(tokens, first)
        gradients: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            gradients[name] = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            parameter.grad = None
            parameter.requires_grad_(False)
        outcome = Outcome(
            losses=losses,
            norm=math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values())),
            rate=self._rate(),
            gradients=gradients,
            choices={n: torch.cat([f.choices[n] for f in found]) for n in found[0].choices},
            scores={n: torch.cat([f.scores[n] for f in found]) for n in found[0].scores},
        )
        if not skip:
            self._update(outcome, max_norm)
        self.step += 1
        return outcome

    def _backward(self, tokens: Tensor, first: int) -> tuple[list[_Pass], Losses]:
        """Add up the gradients of all sequences, some at a time; sums are over all of them."""
        ahead = range(self.model["num_mtp_modules"] + 1)
        counts = [max(1, int((aims >= 0).sum())) for aims in self.aims(tokens, ahead)]
        sums = torch.zeros(3, dtype=torch.float64)
        found: list[_Pass] = []
        for start in range(0, len(tokens), self.train["microbatch_size"]):
            part = tokens[start : start + self.train["microbatch_size"]]
            state, losses = self._forward(part, ahead, (self.seed, self.step, first + start))
            mean, *later = [loss / count for loss, count in zip(losses, counts, strict=True)]
            balance = mean.new_zeros(()) + sum(state.balance) / len(tokens)
            balance = balance * self.model["balance_coefficient"]
            prediction = mean.new_zeros(()) + sum(later) / max(1, len(later))
            (mean + balance + self.model["mtp_weight"] * prediction).backward()
            sums += torch.stack((mean, balance, prediction)).detach()
            found.append(state)
        return found, Losses(*sums.tolist())

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> float:
        """Return the mean cross-entropy of rows of tokens [B, S + 1]."""
        losses = [self._forward(row, (0,), None)[1][0] for row in tokens.split(1)]
        (aims,) = self.aims(tokens)
        return float(sum(losses)) / max(1, int((aims >= 0).sum()))

    def _rate(self) -> float:
        """Return the learning rate: linear warm-up, then half a cosine."""
        train, top = self.train, self.train["learning_rate"]
        warm = train["warmup_steps"]
        if self.step < warm:
            return float(top * (self.step + 1) / warm)
        low = train["min_learning_rate_ratio"] * top
        share = min(1.0, (self.step - warm) / max(1, train["steps"] - warm))
        return float(low + (top - low) * (1 + math.cos(math.pi * share)) / 2)

    def _update(self, outcome: Outcome, max_norm: float) -> None:
        """Update by AdamW (arXiv:1711.05101), and move correction biases (arXiv:2408.15664)."""
        self.updates += 1
        scale = max_norm / outcome.norm if 0 < max_norm < outcome.norm else 1.0
        train, rate = self.train, outcome.rate
        betas = train["beta1"], train["beta2"]
        for name, gradient in outcome.gradients.items():
            g, weight = gradient * scale, self.weights[name]
            first, second = (moments[name] for moments in self.moments)
            first.mul_(betas[0]).add_(g * (1 - betas[0]))
            second.mul_(betas[1]).add_(g * g * (1 - betas[1]))
            mean, square = (
                moment / (1 - beta**self.updates)
                for moment, beta in zip((first, second), betas, strict=True)
            )
            decay = 0.0 if name.endswith(_UNDECAYED) else train["weight_decay"]
            weight.sub_(rate * (mean / (square.sqrt() + train["adam_eps"]) + decay * weight))
        for name, chosen in outcome.choices.items():
            bias = self.weights.get(f"{name}.router.correction_bias")
            if bias is not None:
                load = torch.bincount(chosen.flatten(), minlength=len(bias)).double()
                bias.add_((load.mean() - load).sign() * self.model["correction_rate"])

    def aims(self, tokens: Tensor, ahead: Sequence[int] = (0,)) -> list[Tensor]:
        """Return the targets at each position for each distance, -1 for none, [B, S].

        Nothing is predicted across the end of a document, nor past the end of the sequence.
        """
        read = tokens[:, :-1]
        ends, length = read == self.separator, read.shape[1]
        found = []
        for distance in ahead:
            left = length - distance
            between = [ends[:, place : place + left] for place in range(distance + 1)]
            crosses = torch.stack(between).any(dim=0)
            aims = tokens[:, distance + 1 :].masked_fill(crosses, -1)
            found.append(F.pad(aims, (0, distance), value=-1))
        return found

    def _forward(
        self, tokens: Tensor, ahead: Sequence[int], drop: tuple[int, int, int] | None
    ) -> tuple[_Pass, list[Tensor]]:
        """Run the model; for each distance the sum of the cross-entropy of what is predicted."""
        model, read = self.model, tokens[:, :-1]
        length = read.shape[1]
        ends = (read == self.separator).long()
        document = ends.cumsum(1) - ends  # a separator is the last token of its document
        same = document[:, :, None] == document[:, None, :]
        state = _Pass(same & torch.ones(length, length).tril().bool(), drop)
        table = self.weights["embedding.weight"]
        output = table if model["tie_embeddings"] else self.weights["output.weight"]
        x = self._dropped(table[read], state, "embedding")
        for layer in range(model["num_layers"]):
            x = self._block(x, layer, f"layers.{layer}", state)
        x = self._norm(x, "norm", model["norm_eps"])
        losses = []
        for distance, aims in zip(ahead, self.aims(tokens, ahead), strict=True):
            if distance:
                x = self._predict(x, table[read], distance, state)
            logits = (x @ output.T).log_softmax(-1)
            picked = logits.gather(-1, aims.clamp(min=0)[..., None])[..., 0]
            losses.append(-picked[aims >= 0].sum())
        return state, losses

    def _predict(self, x: Tensor, embedded: Tensor, distance: int, state: _Pass) -> Tensor:
        """Run a module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
        name, eps = f"mtp.{distance - 1}", self.model["norm_eps"]
        later = torch.arange(x.shape[1]).add(distance).clamp(max=x.shape[1] - 1)
        pair = (
            self._norm(embedded[:, later], f"{name}.embedding_norm", eps),
            self._norm(x, f"{name}.hidden_norm", eps),
        )
        x = self._linear(torch.cat(pair, dim=-1), f"{name}.projection")
        x = self._block(x, self.model["num_layers"] + distance - 1, f"{name}.block", state)
        return self._norm(x, f"{name}.norm", eps)

    def _block(self, x: Tensor, layer: int, name: str, state: _Pass) -> Tensor:
        model, eps = self.model, self.model["norm_eps"]
        every = model["full_attention_every"]
        window = 0 if every and (layer + 1) % every == 0 else model["sliding_window"]
        far = torch.ones_like(state.seen).tril(-window) if window else torch.zeros(())
        attend = self._latent if model["attention"] == "mla" else self._grouped
        y = self._norm(x, f"{name}.attention_norm", eps)
        q, k, v, scale = attend(y, f"{name}.attention")
        sinks = self.weights.get(f"{name}.attention.core.sinks")
        y = _attention(q * scale, k, v, state.seen & ~far.bool(), sinks)
        x = x + self._dropped(self._linear(y, f"{name}.attention.wo"), state, f"{name}.attention")
        y = self._norm(x, f"{name}.feed_forward_norm", eps)
        if model["num_experts"] == 0 or layer < model["num_dense_layers"]:
            y = self._gated(y, f"{name}.feed_forward")
        else:
            y = self._experts(y, f"{name}.moe", state)
        return x + self._dropped(y, state, f"{name}.feed_forward")

    def _grouped(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return q, k, v [B, S, N, H] and the scale, grouped-query attention (arXiv:2305.13245)."""
        model = self.model
        width = model["head_dim"] or model["dim"] // model["num_heads"]
        q, k, v = (self._linear(x, f"{name}.w{a}").unflatten(-1, (-1, width)) for a in "qkv")
        if model["qk_norm"]:
            q = self._norm(q, f"{name}.q_norm", model["norm_eps"])
            k = self._norm(k, f"{name}.k_norm", model["norm_eps"])
        share = model["num_heads"] // model["num_kv_heads"]
        q, k = self._rotated(q), self._rotated(k)
        return q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2), width**-0.5

    def _latent(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return q, k, v and the scale of latent attention (arXiv:2405.04434, section 2.1)."""
        model = self.model
        nope, rope, heads = model["nope_head_dim"], model["rope_head_dim"], model["num_heads"]
        if model["q_lora_rank"]:
            narrow = self._norm(self._linear(x, f"{name}.wq_a"), f"{name}.q_norm", 1e-6)
            q = self._linear(narrow, f"{name}.wq_b")
        else:
            q = self._linear(x, f"{name}.wq")
        q = q.unflatten(-1, (heads, nope + rope))
        both = self._linear(x, f"{name}.wkv_a")
        latent, shared = both.split([model["kv_lora_rank"], rope], dim=-1)
        kv = self._linear(self._norm(latent, f"{name}.kv_norm", 1e-6), f"{name}.wkv_b")
        k, v = kv.unflatten(-1, (heads, -1)).split([nope, model["v_head_dim"]], dim=-1)
        shared = self._rotated(shared[:, :, None]).expand(-1, -1, heads, -1)
        q = torch.cat((q[..., :nope], self._rotated(q[..., nope:])), dim=-1)
        growth = 1.0
        if model["rope_scaling"] == "yarn" and model["rope_mscale_all_dim"]:
            growth = _growth(model["rope_factor"], model["rope_mscale_all_dim"]) ** 2
        return q, torch.cat((k, shared), dim=-1), v, (nope + rope) ** -0.5 * growth

    def _rotated(self, x: Tensor) -> Tensor:
        """Apply the rotary embedding (arXiv:2104.09864) to [B, S, N, H]."""
        model, width = self.model, x.shape[-1]
        angles = torch.outer(torch.arange(x.shape[1]).double(), _frequencies(model, width))
        growth = 1.0
        if model["rope_scaling"] == "yarn":
            mscale, whole = model["rope_mscale"], model["rope_mscale_all_dim"]
            growth = _growth(model["rope_factor"], mscale if mscale and whole else 1.0)
            growth /= _growth(model["rope_factor"], whole) if mscale and whole else 1.0
        cos, sin = (part[:, None] * growth for part in (angles.cos(), angles.sin()))
        if model["rope_pairs"] == "neighbours":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def _experts(self, x: Tensor, name: str, state: _Pass) -> Tensor:
        """Add up routed experts and those that every token goes to."""
        model, (B, S, D) = self.model, x.shape
        num, top_k = model["num_experts"], model["top_k"]
        logits = self._linear(x, f"{name}.router")
        scores = logits.softmax(-1) if model["router_score"] == "softmax" else logits.sigmoid()
        bias = self.weights.get(f"{name}.router.correction_bias", torch.zeros(()))
        ranked = (scores + bias).detach()
        order = _limited(ranked, model).sort(dim=-1, descending=True, stable=True).indices
        chosen = order[..., :top_k]
        weights = scores.gather(-1, chosen)
        if model["router_normalize"]:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * model["router_scale"]
        state.choices[name], state.scores[name] = chosen, ranked
        if state.drop is not None:
            # Arxiv:2412.19437, section 2.1.2: for each sequence, shares of slots times of scores.
            used = F.one_hot(chosen, num).double().sum((1, 2)) / (S * top_k)
            shares = (scores / scores.sum(-1, keepdim=True)).mean(1)
            state.balance.append((num * used * shares).sum())
        parts = {key: self.weights.get(f"{name}.experts.{key}") for key in _EXPERT_PARTS}
        y = torch.zeros_like(x).view(B * S, D)
        for expert in range(num):
            token, slot = (chosen.view(B * S, top_k) == expert).nonzero(as_tuple=True)
            of = {key: part[expert] for key, part in parts.items() if part is not None}
            out = self._expert(x.view(B * S, D)[token], of)
            y = y.index_add(0, token, out * weights.view(B * S, top_k)[token, slot, None])
        y = y.view_as(x)
        return y + self._gated(x, f"{name}.shared") if model["num_shared_experts"] else y

    def _expert(self, x: Tensor, of: Mapping[str, Tensor]) -> Tensor:
        """Run one expert on [T, D]; `clamped_swiglu` is that of gpt-oss."""
        zero = x.new_zeros(())
        gate, up = (x @ of[f"w{i}"].T + of.get(f"b{i}", zero) for i in (1, 3))
        if self.model["expert_activation"] == "clamped_swiglu":
            limit = self.model["swiglu_limit"]
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * (gate * self.model["swiglu_alpha"]).sigmoid() * (up + 1)
        else:
            inner = gate * gate.sigmoid() * up
        return torch.matmul(inner, of["w2"].T) + of.get("b2", zero)

    def _gated(self, x: Tensor, name: str) -> Tensor:
        """Apply SwiGLU (arXiv:2002.05202)."""
        gate = self._linear(x, f"{name}.w1")
        return self._linear(gate * gate.sigmoid() * self._linear(x, f"{name}.w3"), f"{name}.w2")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        y = x @ self.weights[f"{name}.weight"].T
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """Apply a root-mean-square norm (arXiv:1910.07467)."""
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def _dropped(self, x: Tensor, state: _Pass, place: str) -> Tensor:
        rate = self.model["dropout"]
        if rate == 0.0 or state.drop is None:
            return x
        seed, step, first = state.drop
        kept = _uniform(x.shape, first, (seed, "dropout", step, place)) >= rate
        return x.mul(kept).div(1 - rate)


_EXPERT_PARTS = ("w1", "w2", "w3", "b1", "b2", "b3")


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Attend by softmax of all scores [B, S, NH]; a sink (gpt-oss) takes a share and gives nothing.

    Args:
        q: Scaled, [B, S, N, H].
        k: [B, S, N, H].
        v: [B, S, N, H].
        seen: bool [B, S, S].
        sinks: Score for each head [N].
    """
    scores = torch.einsum("bqnh,bknh->bnqk", q, k).masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bnqk,bknh->bqnh", shares, v).flatten(2)


def _limited(ranked: Tensor, model: Mapping[str, Any]) -> Tensor:
    """Leave the experts of the best groups, each as good as its best two (DeepSeek-V3)."""
    groups, limited = model["num_expert_groups"], model["num_limited_groups"]
    if limited >= groups:
        return ranked
    by_group = ranked.unflatten(-1, (groups, -1))
    worth = by_group.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    out = worth.sort(dim=-1, descending=True, stable=True).indices[..., limited:]
    is_out = torch.zeros_like(worth).scatter(-1, out, 1.0).bool()
    return torch.flatten(by_group.masked_fill(is_out[..., None], -math.inf), -2)


def _frequencies(model: Mapping[str, Any], width: int) -> Tensor:
    """Return radians per position of each pair [H / 2], stretched by transformers' `rope_type`."""
    base, factor = model["rope_theta"], model["rope_factor"]
    original = model["rope_original_positions"]
    plain: Tensor = 1.0 / base ** (torch.arange(0, width, 2).double() / width)
    slow: Tensor = plain / factor
    if model["rope_scaling"] == "llama3":
        low, high = model["rope_low_factor"], model["rope_high_factor"]
        smooth = (original / (2 * math.pi / plain) - low) / (high - low)
        between = (1 - smooth) * slow + smooth * plain
        return torch.where(smooth < 0, slow, torch.where(smooth > 1, plain, between))
    if model["rope_scaling"] == "none":
        return plain

    def channel(turns: float) -> float:  # YaRN, arXiv:2309.00071
        return float(width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)))

    low, high = channel(model["rope_beta_fast"]), channel(model["rope_beta_slow"])
    if model["rope_truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0.0
    ramp: Tensor = ((torch.arange(width // 2).double() - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + slow * ramp


def _growth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _uniform(shape: Sequence[int], first: int, key: tuple[int | str, ...]) -> Tensor:
    """Return numbers in [0, 1) by which hp-train drops activations [B, S, D]: a hash of places."""
    text = "\x1f".join(map(str, key)).encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
    sequence = torch.arange(first, first + shape[0])
    bits = _mix(_mix((sequence & _MASK) ^ (seed & _MASK)) ^ (seed >> 32) ^ (sequence >> 32))
    bits = _mix(bits[:, None] ^ _mix(torch.arange(shape[1]) + 1))
    bits = _mix(bits[:, :, None] ^ _mix(torch.arange(shape[2]) + 0x9E3779B9 & _MASK))
    return torch.div(bits >> 8, 2**24)


def _mix(x: Tensor) -> Tensor:
    """Return the hash "lowbias32" of Chris Wellons, of 32 bits held in int64."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return torch.bitwise_xor(x, x >> 16)
