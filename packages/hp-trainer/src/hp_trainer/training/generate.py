"""Continue a text with the model as it stands, in whatever layout it is trained.

The window is always ``seq_len`` long, so one forward-only plan serves every token; positions
after the last known token cannot influence it, because attention is causal.
"""

import torch
import torch.distributed as dist

from hp_data import Tokenizer
from hp_schedule.runtime import PipelineScheduleRuntime
from hp_trainer.model import Microbatch
from hp_trainer.model.parallelize import Pipeline
from hp_trainer.model.randomness import generator


def continue_text(
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.7,
) -> str:
    """Sample a continuation. All ranks call this together and get the same text.

    Args:
        pipeline: The model.
        tokenizer: Tokenizer of the data.
        prompt: Its last ``seq_len`` tokens are used.
        num_tokens: How many to add.
        temperature: Divides the logits; 0 takes the most likely token.

    Returns:
        The continuation without the prompt.
    """
    runner = pipeline.runner(num_microbatches=1, microbatch_size=1)
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.separator]
    start = len(ids)
    for index in range(num_tokens):
        # A model may have more rows than the tokenizer has tokens.
        known = _next_logits(pipeline, runner, ids)[: tokenizer.vocab_size]
        ids.append(_sample(known, pipeline.config.run.seed, index, temperature))
    pipeline.forget_casts()
    return tokenizer.decode(ids[start:])


def _next_logits(
    pipeline: Pipeline, runner: PipelineScheduleRuntime, ids: list[int]
) -> torch.Tensor:
    """Return logits of the token after some, [V], float64 on the CPU."""
    seq_len = pipeline.config.data.seq_len
    window = ids[-seq_len:]
    tokens = torch.zeros(1, seq_len, dtype=torch.int64, device=pipeline.device)
    tokens[0, : len(window)] = torch.tensor(window, device=pipeline.device)
    sequence = pipeline.sequence
    microbatch = Microbatch(num_sequences=1, positions=sequence.attended)
    result = runner.evaluate_microbatches([(sequence.shard(tokens),)], [{"microbatch": microbatch}])
    logits = torch.zeros(pipeline.vocab_size, dtype=torch.float64, device=pipeline.device)
    # Every data-parallel rank computes the same; one of them speaks.
    place = sequence.place(len(window) - 1)
    if pipeline.is_last and pipeline.mesh.dp_index == 0 and place is not None:
        here = pipeline.vocabulary
        found = result.outputs[0][0, place]
        if len(found) == pipeline.vocab_size:  # of a model whose ranks all have all logits
            found = found[here.start : here.stop]
        logits[here.start : here.stop] = found
    dist.all_reduce(logits, group=pipeline.mesh.world)
    return logits.cpu()


def _sample(logits: torch.Tensor, seed: int, index: int, temperature: float) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator(seed, "sample", index)))
