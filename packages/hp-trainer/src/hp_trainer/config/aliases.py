"""Names that keys have elsewhere, for the hint after a key that does not exist."""

from functools import cache

_CALLED = {
    "run.seed": "random_seed manual_seed rng_seed",
    "run.output_dir": "out out_dir output save_dir run_dir dir",
    "run.name": "run_name experiment job_name",
    "run.resume": "resume_from resume_from_checkpoint load load_dir restore",
    "run.init_from": "init pretrained from_pretrained weights model_name_or_path checkpoint",
    "launch.num_processes": "nproc nproc_per_node world_size num_gpus gpus ranks workers processes",
    "launch.step_timeout_seconds": "timeout nccl_timeout dist_timeout",
    "mesh.pp": "pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "mesh.dp_replicate": "dp dp_size ddp data_parallel data_parallel_size hsdp",
    "mesh.dp_shard": "fsdp fsdp_size dp_shard_size shard zero zero_stage",
    "mesh.cp": "cp_size context_parallel context_parallel_size",
    "mesh.tp": "tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size sp",
    "mesh.ep": "ep_size expert_parallel expert_parallel_size expert_model_parallel_size",
    "mesh.etp": "etp_size expert_tensor_parallel expert_tensor_parallel_size",
    "mesh.cp_heads": "ulysses ulysses_degree sp_size",
    "mesh.cp_ring": "ring ring_attention",
    "pipeline.schedule": "pipeline_schedule pp_schedule schedules",
    "pipeline.retention": "offload activation_offload cpu_offload selective_pipeline_recompute",
    "pipeline.stages_per_rank": "vpp virtual_stages interleave chunks num_chunks stages",
    "model.dim": "hidden_size d_model n_embd width embed_dim hidden_dim model_dim",
    "model.num_layers": "layers n_layers n_layer num_hidden_layers depth",
    "model.num_heads": "heads n_heads n_head num_attention_heads attention_heads",
    "model.num_kv_heads": "kv_heads n_kv_heads num_key_value_heads num_query_groups",
    "model.dense_hidden": "intermediate_size ffn_dim ffn_hidden_size mlp_dim d_ff ffn_hidden",
    "model.expert_hidden": "moe_intermediate_size moe_ffn_hidden_size expert_dim moe_hidden",
    "model.num_experts": "experts n_experts num_local_experts n_routed_experts",
    "model.top_k": "topk k num_experts_per_tok experts_per_token moe_router_topk",
    "model.num_shared_experts": "shared_experts n_shared_experts",
    "model.num_dense_layers": "first_k_dense_replace dense_layers",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.init_std": "initializer_range init_method_std",
    "model.tie_embeddings": "tie_word_embeddings weight_tying tied",
    "model.vocab_size": "vocab n_vocab padded_vocab_size",
    "model.rope_theta": "theta rope_base rotary_base",
    "model.balance_coefficient": "aux_loss aux_loss_coef router_aux_loss_coef aux_loss_alpha",
    "model.sliding_window": "window window_size",
    "model.max_positions": "max_position_embeddings n_positions",
    "data.paths": "data dataset path data_path train_data train_file files text",
    "data.field": "column text_column text_field content_key text_key json_keys",
    "data.tokenizer": "tokenizer_path tokenizer_file tokenizer_name",
    "data.separator": "eos eos_token eod eod_token end_of_text sep sep_token",
    "data.seq_len": "seq seqlen seq_length sequence_length max_seq_len block_size ctx "
    "context_length",
    "data.eval_fraction": "eval_split val_split val_fraction validation_split",
    "train.steps": "iters iterations max_steps num_steps max_iters train_steps total_steps epochs "
    "num_epochs num_train_epochs",
    "train.global_batch_size": "bs gbs batch batch_size train_batch_size global_batch",
    "train.microbatch_size": "mbs micro_batch micro_batch_size per_device_train_batch_size "
    "gradient_accumulation_steps grad_accum num_microbatches",
    "train.dtype": "precision mixed_precision bf16 fp16 fp32 torch_dtype",
    "train.recompute": "activation_checkpointing gradient_checkpointing recomputation remat",
    "train.compile": "torch_compile compiler",
    "train.learning_rate": "lr learn_rate max_lr peak_lr base_lr",
    "train.min_learning_rate_ratio": "min_lr lr_min min_lr_ratio final_lr",
    "train.warmup_steps": "warmup warmup_iters lr_warmup lr_warmup_steps num_warmup_steps",
    "train.weight_decay": "wd decay l2",
    "train.optimizer": "optim optimizer_name optimizer_type muon",
    "train.beta1": "b1 adam_beta1 betas momentum",
    "train.beta2": "b2 adam_beta2",
    "train.adam_eps": "eps epsilon adam_epsilon",
    "train.max_grad_norm": "clip grad_clip clip_grad clip_grad_norm gradient_clipping max_norm",
    "train.log_every": "log_interval logging_steps log_steps log_freq",
    "train.eval_every": "eval_interval eval_steps val_interval eval_freq",
    "train.save_every": "save_interval save_steps checkpoint_every checkpoint_interval ckpt_every",
    "train.keep_checkpoints": "save_total_limit keep keep_last max_checkpoints",
    "train.sample_prompt": "prompt",
}


_ABSENT = {
    "lora lora_rank lora_alpha lora_r qlora peft adapter adapters": (
        "hp train changes all weights; it has no adapters"
    ),
    "ema ema_decay averaging swa": "hp train keeps no average of the weights",
    "adafactor lion sgd": (
        'the optimizer is AdamW, or with train.optimizer = "muon" Muon for matrices'
    ),
    "weights mixture mix data_weights blend data_blend": (
        "all of data.paths is read once in each epoch; nothing mixes it by weights"
    ),
    "lr_scheduler lr_schedule scheduler lr_decay_style lr_scheduler_type decay_style": (
        "the rate goes up in train.warmup_steps, and down by a cosine to "
        "train.min_learning_rate_ratio of train.learning_rate"
    ),
    "nodes nnodes num_nodes node_rank master_addr master_port": (
        "torchrun or Slurm starts hp train on each node; docs/how-to/nodes.md says how"
    ),
    "wandb mlflow tracker trackers report_to wandb_project comet": (
        "metrics are in metrics.jsonl of the run, and with run.tensorboard in its events"
    ),
    "sft chat chat_template dpo grpo instruct": (
        "hp train learns to predict the next token of text; it has no chats"
    ),
}


@cache
def absent() -> dict[str, str]:
    """Return what people look for that does not exist, by name, each with what there is."""
    return {name: text for names, text in _ABSENT.items() for name in names.split()}


@cache
def aliases() -> dict[str, str]:
    """Return the names that keys have elsewhere, without a section, and the keys."""
    return {alias: key for key, called in _CALLED.items() for alias in called.split()}
