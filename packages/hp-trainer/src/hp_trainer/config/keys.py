"""The settings of a run: one frozen struct per section of the TOML file.

This module is the schema and what follows from it alone: names, types, bounds, defaults and help.
Files and command lines are read by :mod:`hp_trainer.config.options`, rules across keys are in
:mod:`hp_trainer.config.rules`. None of the three imports torch, so that a bad config is answered
before torch is loaded.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, to_builtins

from hp_trainer.layout.schedules import KINDS

LARGEST = 2**31 - 1
MOST_LAYERS = 10_000
MOST_EXPERTS = 200_000
"""Of all layers together: parameters, files and ranks list every one of them."""
_COMPILE_SECONDS = 300.0

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(KINDS)]

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


def _help(text: str) -> Meta:
    return Meta(description=text)


class RunConfig(Struct, frozen=True, kw_only=True):
    """The place and the name of a run."""

    output_dir: Annotated[str, _help("Folder in which run directories are made.")] = "runs"
    name: Annotated[
        str,
        Meta(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.+-]{0,199})?$"),
        _help('Name of the run directory. "": the config\'s name and the time in UTC.'),
    ] = ""
    seed: Annotated[
        int,
        Meta(ge=0, le=2**63 - 1),
        _help("Decides weights, dropout and the order of the data, whatever the layout."),
    ] = 0
    resume: Annotated[str, _help("Run directory to go on with; leave it out for a new run.")] = ""
    init_from: Annotated[
        str, _help('Folder of a Hugging Face model whose weights to start from. "": none.')
    ] = ""
    tensorboard: Annotated[
        bool, _help("Also write TensorBoard events; needs the extra hp-train[tensorboard].")
    ] = False


class LaunchConfig(Struct, frozen=True, kw_only=True):
    """The start of processes and the time that they may take, in seconds."""

    num_processes: Annotated[
        CountOrZero, _help("Processes of the run. 0: as many as the mesh has places.")
    ] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda"], _help("auto: GPUs where there are any, else the CPU.")
    ] = "auto"
    backend: Annotated[
        Literal["auto", "gloo"],
        _help("auto: NCCL on GPUs, Gloo on CPUs. gloo: on GPUs through the host, far slower."),
    ] = "auto"
    threads_per_process: Annotated[
        CountOrZero, _help("Threads per process. 0: the cores shared out, at least 1.")
    ] = 0
    init_timeout_seconds: Annotated[
        SecondsOrZero,
        _help(
            "Seconds for processes to start and find each other. 0: 60, and 0.25 for each process."
        ),
    ] = 0.0
    step_timeout_seconds: Annotated[
        SecondsOrZero,
        _help(
            "Seconds for one collective or message between ranks. "
            "0: 300, and 0.5 for each process; 300 more with train.compile inductor."
        ),
    ] = 0.0
    hang_seconds: Annotated[
        SecondsOrZero,
        _help(
            "Seconds without progress of any rank after which the run is ended. "
            "0: 120, and 0.5 for each process; 300 more with train.compile inductor."
        ),
    ] = 0.0
    max_restarts: Annotated[
        CountOrZero,
        _help("Restarts after a rank is lost or hangs, in a row without a new checkpoint."),
    ] = 3
    stop_grace_seconds: Annotated[
        Seconds, _help("Seconds for saving after a request to stop, then the ranks are killed.")
    ] = 30.0


class MeshConfig(Struct, frozen=True, kw_only=True):
    """Ways that each axis is split; the first five fill the processes."""

    pp: Annotated[Count, _help("Pipeline ranks.")] = 1
    dp_replicate: Annotated[
        Count, _help("Data-parallel ranks that hold all of the parameters.")
    ] = 1
    dp_shard: Annotated[
        Count, _help("Data-parallel ranks that hold a shard of the parameters each (FSDP).")
    ] = 1
    cp: Annotated[Count, _help("Context-parallel ranks, which share a sequence.")] = 1
    tp: Annotated[Count, _help("Tensor-parallel ranks, which share matrices and positions.")] = 1
    ep: Annotated[
        Count, _help("Ranks that share out the experts, taken out of those of a stage.")
    ] = 1
    etp: Annotated[Count, _help("Ranks that share out the hidden width of each expert.")] = 1
    ep_buffer: Annotated[
        NotNegative,
        _help(
            "Room for the rows from each rank to each other one of mesh.ep, in multiples of an "
            "even routing; no layer then waits for the device, and a step whose rows do not fit "
            "is run again. 0: as much as it takes, which the host reads in each layer."
        ),
    ] = 0.0
    stage_tp: Annotated[
        tuple[Count, ...], _help("Tensor-parallel ranks of each pipeline rank. []: mesh.tp of all.")
    ] = ()
    stage_ep: Annotated[
        tuple[Count, ...],
        _help("Ranks that share out the experts, of each pipeline rank. []: mesh.ep of all."),
    ] = ()
    cp_heads: Annotated[
        CountOrZero,
        _help("Context-parallel ranks that share out heads; keys go to the others. 0: all, or 1."),
    ] = 0
    cp_ring: Annotated[
        bool, _help("Send keys round a ring of these others instead of gathering them.")
    ] = False
    cp_deal: Annotated[
        bool, _help("Deal out the documents of each sequence to these ranks by work and keys.")
    ] = False

    gather: Annotated[
        Literal["auto", "stage", "block"],
        _help(
            "How FSDP gathers parameters and reduces gradients: of a whole stage, for all "
            "microbatches, or block by block in every forward and backward, which keeps less and "
            "sends more. auto: what fits into the memory of a GPU, and of both the faster one by "
            "what hp plan counts; on a CPU by stage."
        ),
    ] = "auto"
    reduce_once: Annotated[
        bool,
        _help(
            "Where FSDP gathers by block: keep gradients whole, in float32, and reduce them in the "
            "backward of the last microbatch alone."
        ),
    ] = False

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Return the number of tensor-parallel ranks of each pipeline rank."""
        return self.stage_tp or (self.tp,) * self.pp

    @property
    def ep_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks that share out the experts, of each pipeline rank."""
        return self.stage_ep or (self.ep,) * self.pp

    @property
    def heads_degree(self) -> int:
        """Return the number of context-parallel ranks that share out heads."""
        return self.cp_heads or (1 if self.cp_ring else self.cp)


class PipelineConfig(Struct, frozen=True, kw_only=True):
    """In which order the stages compute."""

    schedule: Annotated[
        ScheduleName,
        _help("Order of forwards and backwards."),
    ] = "interleaved_1f1b"
    stages_per_rank: Annotated[
        Count, _help("Stages that each pipeline rank holds; what schedules allow is in the docs.")
    ] = 1
    stage_layers: Annotated[
        tuple[Count, ...],
        _help(
            "Layers of each stage, in order. []: as even as can be; the last stage also has the "
            "output matrix and the loss, and may take fewer."
        ),
    ] = ()
    overlap: Annotated[
        bool, _help("Run a backward and the next forward at once, to hide exchanges of experts.")
    ] = False
    retention: Annotated[
        Literal["keep", "recompute", "offload"],
        _help("What stages do with microbatches under way beyond keep_microbatches."),
    ] = "keep"
    keep_microbatches: Annotated[
        Count, _help("Microbatches that a rank keeps whole; retention says what others do.")
    ] = 1


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Shape of the decoder."""

    factory: Annotated[
        str, _help("A model of your own: package.module:function or file.py:function. Empty: none.")
    ] = ""
    transformers: Annotated[
        str,
        _help(
            "Folder with the config.json of a causal language model of transformers, which is "
            "trained as it is, and maybe its weights. It says the shape of the model. Empty: none."
        ),
    ] = ""
    trust_remote_code: Annotated[
        bool, _help("Run Python files of that folder, where its config.json names some.")
    ] = False
    vocab_size: Annotated[
        CountOrZero, _help("Rows of the embedding. 0: as many as the tokenizer has tokens.")
    ] = 0
    max_positions: Annotated[
        CountOrZero, _help("Longest sequence that the model is meant for. 0: data.seq_len.")
    ] = 0
    dim: Annotated[Count, _help("Width of the residual stream.")] = 128
    num_layers: Annotated[Count, _help("Transformer layers.")] = 4
    attention: Annotated[
        Literal["gqa", "mla"], _help("Grouped-query attention, or multi-head latent attention.")
    ] = "gqa"
    num_heads: Annotated[Count, _help("Query heads.")] = 4
    num_kv_heads: Annotated[
        Count, _help("Key and value heads, a divisor of num_heads; gqa only.")
    ] = 2
    head_dim: Annotated[CountOrZero, _help("Width of a head, gqa only. 0: dim // num_heads.")] = 0
    q_lora_rank: Annotated[
        CountOrZero, _help("Width that mla compresses queries to. 0: not compressed.")
    ] = 0
    kv_lora_rank: Annotated[Count, _help("Width that mla compresses keys and values to.")] = 512
    nope_head_dim: Annotated[
        Count, _help("Part of mla's query and key heads that has no position.")
    ] = 128
    rope_head_dim: Annotated[
        Count, _help("Part of mla's query and key heads that is rotated by its position.")
    ] = 64
    v_head_dim: Annotated[Count, _help("Width of mla's value heads.")] = 128
    qk_norm: Annotated[bool, _help("Normalize every query and key head; gqa only.")] = False
    attention_bias: Annotated[
        bool, _help("Biases in the four projections of attention; gqa only.")
    ] = False
    attention_sinks: Annotated[
        bool, _help("A learned score per head that takes its share of attention; gqa only.")
    ] = False
    sliding_window: Annotated[
        CountOrZero, _help("Positions that a query sees, its own included. 0: all before it.")
    ] = 0
    full_attention_every: Annotated[
        CountOrZero, _help("Every so many layers, one is without the window. 0: none is.")
    ] = 0
    num_dense_layers: Annotated[
        CountOrZero, _help("First layers that have one feed-forward instead of experts.")
    ] = 0
    dense_hidden: Annotated[Count, _help("Hidden width of those feed-forwards.")] = 512
    expert_hidden: Annotated[Count, _help("Hidden width of an expert.")] = 128
    num_experts: Annotated[
        CountOrZero, _help("Routed experts per layer. 0: none, every layer is dense.")
    ] = 8
    top_k: Annotated[Count, _help("Experts that each token goes to.")] = 2
    num_shared_experts: Annotated[CountOrZero, _help("Experts that every token goes to.")] = 1
    expert_activation: Annotated[
        Literal["swiglu", "clamped_swiglu"], _help("What experts put between their projections.")
    ] = "swiglu"
    swiglu_limit: Annotated[Positive, _help("Where clamped_swiglu clamps.")] = 7.0
    swiglu_alpha: Annotated[Positive, _help("Steepness of the gate of clamped_swiglu.")] = 1.702
    expert_bias: Annotated[bool, _help("Biases in the projections of experts.")] = False
    router_score: Annotated[
        Literal["softmax", "sigmoid"], _help("Scores over all experts, or of each by itself.")
    ] = "softmax"
    router_normalize: Annotated[
        bool, _help("Divide the weights of a token's experts by their sum.")
    ] = True
    router_scale: Annotated[Positive, _help("What those weights are multiplied by at last.")] = 1.0
    router_bias: Annotated[bool, _help("A bias on the logits of the router.")] = False
    num_expert_groups: Annotated[
        Count, _help("Runs of experts that a router chooses from, a divisor of num_experts.")
    ] = 1
    num_limited_groups: Annotated[Count, _help("Groups that a token's experts may come from.")] = 1
    correction_bias: Annotated[
        bool, _help("Balance experts by a bias on the choice alone, moved after every step.")
    ] = False
    correction_rate: Annotated[
        NotNegative, _help("How far that bias moves in a step. 0: it stays.")
    ] = 0.001
    balance_coefficient: Annotated[
        NotNegative, _help("Weight of the loss that spreads tokens over experts.")
    ] = 0.01
    num_mtp_modules: Annotated[
        CountOrZero, _help("Modules that each predict one token further ahead.")
    ] = 0
    mtp_weight: Annotated[NotNegative, _help("Weight of the mean of their losses.")] = 0.3
    rope_theta: Annotated[Positive, _help("Base of the rotary position angles.")] = 10000.0
    rope_pairs: Annotated[
        Literal["halves", "neighbours"], _help("Which channels of a head are rotated together.")
    ] = "halves"
    rope_scaling: Annotated[
        Literal["none", "llama3", "yarn"], _help("How the angles are stretched to long sequences.")
    ] = "none"
    rope_factor: Annotated[
        Annotated[float, Meta(ge=1)], _help("How far llama3 and yarn stretch the slowest angles.")
    ] = 1.0
    rope_original_positions: Annotated[
        Count, _help("Longest sequence before llama3 or yarn stretched the angles.")
    ] = 8192
    rope_low_factor: Annotated[
        Positive, _help("llama3 stretches fully below this many turns in those positions.")
    ] = 1.0
    rope_high_factor: Annotated[
        Positive, _help("llama3 leaves angles alone above this many turns in those positions.")
    ] = 4.0
    rope_beta_fast: Annotated[
        Positive, _help("yarn leaves angles alone above this many turns in those positions.")
    ] = 32.0
    rope_beta_slow: Annotated[
        Positive, _help("yarn stretches fully below this many turns in those positions.")
    ] = 1.0
    rope_truncate: Annotated[
        bool, _help("yarn rounds the channels where it begins and ends to whole ones.")
    ] = True
    rope_mscale: Annotated[
        NotNegative, _help("yarn's growth of queries and keys. 0: its default.")
    ] = 0.0
    rope_mscale_all_dim: Annotated[
        NotNegative, _help("Of that, what mla applies to whole heads instead. 0: nothing.")
    ] = 0.0
    norm_eps: Annotated[Positive, _help("Added to the mean square in RMSNorm.")] = 1e-5
    dropout: Annotated[BelowOne, _help("Share of activations dropped in training.")] = 0.0
    init_std: Annotated[Positive, _help("Standard deviation of the first weights.")] = 0.02
    tie_embeddings: Annotated[bool, _help("Use the embedding as the output matrix too.")] = False

    @property
    def is_own(self) -> bool:
        """Tell whether its blocks are not hp-train's: of a factory, or of transformers."""
        return bool(self.factory or self.transformers)

    @property
    def origin(self) -> str:
        """Return the key that says where such blocks come from, with its value, for messages."""
        key = "factory" if self.factory else "transformers"
        return f"model.{key} ({json.dumps(getattr(self, key))})"

    @property
    def stage_width(self) -> int:
        """Return the width of what travels between pipeline stages.

        Modules of multi-token prediction need embeddings at the end, so they travel along.
        """
        return self.dim * (1 + self.num_mtp_modules)

    @property
    def rotated_head_dim(self) -> int:
        """Return the width of the part of a head that is rotated by its position."""
        if self.attention == "mla":
            return self.rope_head_dim
        return self.head_dim or self.dim // self.num_heads

    @property
    def has_experts(self) -> bool:
        """Tell whether some layer has experts."""
        return not self.is_dense(self.num_layers - 1 + self.num_mtp_modules)

    def is_dense(self, layer: int) -> bool:
        """Tell whether a layer has one feed-forward instead of experts."""
        return self.num_experts == 0 or layer < self.num_dense_layers

    def has_window(self, layer: int) -> bool:
        """Tell whether queries of a layer see :attr:`sliding_window` positions only."""
        every = self.full_attention_every
        return self.sliding_window > 0 and not (every and (layer + 1) % every == 0)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return how many keys before its own a query of each layer sees; None: all."""
        layers, before = range(self.num_layers), self.sliding_window - 1
        return tuple(before if self.has_window(layer) else None for layer in layers)


class DataConfig(Struct, frozen=True, kw_only=True):
    """The text to train on."""

    paths: Annotated[
        tuple[str, ...],
        _help(
            "Files, folders and patterns of text: plain, JSON, CSV, Parquet, Arrow; token files; "
            "s3://, gs://, az://. []: text of Python's standard library."
        ),
    ] = ()
    field: Annotated[
        str,
        _help(
            'Column or key of data.paths with the text. "": text, or the only one of strings. Of a '
            ".bin of token ids: uint16, uint32 or int32."
        ),
    ] = ""
    tokenizer: Annotated[
        str,
        _help('A tokenizer.json of Hugging Face tokenizers, or a folder that has one. "": bytes.'),
    ] = ""
    separator: Annotated[
        str,
        _help(
            'Token of data.tokenizer that ends documents. "": the eos_token of '
            "tokenizer_config.json beside it, else a special token of a usual name."
        ),
    ] = ""
    seq_len: Annotated[Count, _help("Tokens per sequence.")] = 128
    documents: Annotated[
        Literal["separate", "joined"],
        _help("Whether attention and loss stop at the end of a document."),
    ] = "separate"
    packing: Annotated[
        Literal["stream", "best_fit", "planned"],
        _help(
            "stream: text is cut wherever a sequence is full; best_fit: no document shorter than a "
            "sequence is cut, what none fills is padding; planned: the documents of these "
            "sequences in microbatches, on ranks and in an order that are planned for every step."
        ),
    ] = "stream"
    plan_tokens: Annotated[
        CountOrZero,
        _help(
            "Tokens whose activations a rank may hold at once in a planned step. 0: as many as "
            "under 1f1b: mesh.pp x train.microbatch_size x data.seq_len / mesh.cp."
        ),
    ] = 0
    plan_costs: Annotated[
        str,
        _help(
            "A TOML file with seconds by which steps are planned: token, pair, key, microbatch and "
            'others of a stage. "": those of the GPU, or of a usual CPU.'
        ),
    ] = ""
    eval_fraction: Annotated[
        Annotated[float, Meta(gt=0, lt=1)], _help("Share of the text held out for evaluation.")
    ] = 0.02
    cache_gib: Annotated[
        CountOrZero,
        _help("GiB of tokens of tokenizers kept in ~/.cache/hp-train for other runs. 0: none."),
    ] = 20


class TrainConfig(Struct, frozen=True, kw_only=True):
    """The loop: batches, optimizer, and what is written when."""

    steps: Annotated[Count, _help("Updates of the weights.")] = 150
    global_batch_size: Annotated[Count, _help("Sequences per update, over all ranks.")] = 32
    microbatch_size: Annotated[Count, _help("Sequences per forward pass of a stage.")] = 4
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"], _help("Type that the model computes in.")
    ] = "float32"
    recompute: Annotated[
        Literal["none", "attention", "feed_forward", "selective", "full"],
        _help(
            "What of each block is computed again in backward instead of being kept; selective: "
            "all but attention proper and the products of experts."
        ),
    ] = "none"
    compile: Annotated[
        Literal["none", "inductor", "aot_eager"],
        _help("What compiles attention and feed-forward of blocks; torch's names of backends."),
    ] = "none"
    optimizer: Annotated[
        Literal["adamw", "muon"],
        _help(
            "What moves the weights; muon: Muon moves matrices but tables of tokens, with AdamW's "
            "rate and decay, AdamW the rest."
        ),
    ] = "adamw"
    learning_rate: Annotated[NotNegative, _help("Highest learning rate.")] = 3e-3
    min_learning_rate_ratio: Annotated[
        Share, _help("Last learning rate as a share of the highest.")
    ] = 0.1
    warmup_steps: Annotated[CountOrZero, _help("Steps of linear warm-up.")] = 10
    weight_decay: Annotated[
        NotNegative, _help("AdamW's decay of matrices; norms and biases have none.")
    ] = 0.1
    beta1: Annotated[BelowOne, _help("AdamW's decay of the mean gradient.")] = 0.9
    beta2: Annotated[BelowOne, _help("AdamW's decay of the mean square.")] = 0.95
    adam_eps: Annotated[Positive, _help("AdamW's addition to the root.")] = 1e-8
    max_grad_norm: Annotated[
        NotNegative, _help("Gradients are scaled down to this norm. 0: never.")
    ] = 1.0
    not_finite: Annotated[
        Literal["stop", "skip"],
        _help("What to do at a step whose loss or gradient is not finite."),
    ] = "stop"
    max_skipped_steps: Annotated[
        Count, _help("Steps skipped in a row after which the run is ended all the same.")
    ] = 10
    log_every: Annotated[Count, _help("Steps between printed lines.")] = 10
    eval_every: Annotated[CountOrZero, _help("Steps between evaluations. 0: none.")] = 50
    eval_batches: Annotated[Count, _help("Global batches per evaluation.")] = 4
    save_every: Annotated[CountOrZero, _help("Steps between checkpoints. 0: only at the end.")] = 0
    async_save: Annotated[
        bool, _help("Save a copy behind the training; the last save of a run is waited for.")
    ] = True
    keep_checkpoints: Annotated[Count, _help("Checkpoints kept; older ones are removed.")] = 2
    keep_every: Annotated[
        CountOrZero, _help("Checkpoints of multiples of this step are kept for good. 0: none.")
    ] = 0
    collect_every: Annotated[
        CountOrZero,
        _help("Steps between runs of Python's garbage collector. 0: whenever Python likes."),
    ] = 100
    profile: Annotated[
        tuple[Count, ...],
        _help("Steps to profile: a trace of each, and of CUDA memory a snapshot. []: none."),
    ] = ()
    profile_ranks: Annotated[
        tuple[CountOrZero, ...], _help("Ranks that are profiled then. []: the first.")
    ] = ()
    sample_tokens: Annotated[
        CountOrZero, _help("Tokens of the continuation printed at the end. 0: none.")
    ] = 200
    sample_prompt: Annotated[
        str, _help('What that continuation starts with. "": the beginning of a document.')
    ] = "def "


class Timeouts(NamedTuple):
    """Time-outs of a job in seconds.

    Attributes:
        init: Time for processes to start and find each other.
        step: Time for one collective or message between ranks.
        hang: Time without progress of any rank after which the run is ended.
    """

    init: float
    step: float
    hang: float


class Config(Struct, frozen=True, kw_only=True):
    """All settings of a run, by section."""

    run: RunConfig = RunConfig()
    launch: LaunchConfig = LaunchConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

    @property
    def world_size(self) -> int:
        """Return the number of processes that fill the mesh."""
        mesh = self.mesh
        # Not through tp_sizes: any number of pipeline ranks is counted before it is refused.
        tensor_ranks = sum(mesh.stage_tp) if mesh.stage_tp else mesh.pp * mesh.tp
        return mesh.dp_replicate * mesh.dp_shard * mesh.cp * tensor_ranks

    @property
    def batch_unit(self) -> int:
        """Return the number of sequences in one microbatch of all data-parallel ranks together."""
        return self.mesh.dp_replicate * self.mesh.dp_shard * self.train.microbatch_size

    @property
    def microbatch_tokens(self) -> int:
        """Return the number of tokens of a microbatch that attention sees on a rank."""
        return self.train.microbatch_size * self.data.seq_len // self.mesh.cp

    @property
    def timeouts(self) -> Timeouts:
        """Return the time-outs of the config, and for what is 0 there those of a job of its size.

        What grows with the ranks is counted: processes that start from one file system, the groups
        that each of them joins one after the other, the shares of a checkpoint. `inductor` compiles
        in the first step, and not on all ranks for as long.
        """
        launch, ranks = self.launch, self.world_size
        compiling = _COMPILE_SECONDS if self.train.compile == "inductor" else 0.0
        return Timeouts(
            init=launch.init_timeout_seconds or 60.0 + ranks / 4,
            step=launch.step_timeout_seconds or 300.0 + ranks / 2 + compiling,
            hang=launch.hang_seconds or 120.0 + ranks / 2 + compiling,
        )


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings as plain tables, ready for TOML or JSON."""
    tables: dict[str, dict[str, Any]] = to_builtins(config)
    return {
        section: {k: list(v) if isinstance(v, tuple) else v for k, v in table.items()}
        for section, table in tables.items()
    }
