"""Names of settings in other programs, and the keys that do the same here."""

# Name elsewhere, SECTION.* for all keys of a section -> key here, and a value or a remark; "": there is none, and what does it.
SYNONYMS = {
    **dict.fromkeys(("amp", "bf16", "mixed_precision", "precision"), ("training.mixed_precision_param", " bfloat16")),
    **dict.fromkeys(("iterations", "max_steps", "max_train_steps", "total_steps"), ("training.steps", "")),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs"), ("training.steps", ", in steps")),
    **dict.fromkeys(
        ("batch_size", "bs", "train_batch_size"),
        ("training.global_batch_size", " for all devices together, or training.local_batch_size for each"),
    ),
    **dict.fromkeys(
        ("accumulate_grad_batches", "gradient_accumulation_steps"),
        ("training.global_batch_size", ": what one device does not hold is accumulated"),
    ),
    **dict.fromkeys(("grad_clip", "gradient_clip_val", "max_grad_norm"), ("training.max_norm", "")),
    **dict.fromkeys(
        ("ema", "ema.decay", "ema_decay", "ema_rate"),
        ("ema.tracks", ", a list of tables with name and decay, [[ema.tracks]] in a file"),
    ),
    **dict.fromkeys(("cfg", "cfg_scale"), ("sampling.guidance_scale", "")),
    **dict.fromkeys(("num_inference_steps", "num_sampling_steps"), ("sampling.num_steps", "")),
    "per_proc_batch_size": ("sampling.batch_size", ""),
    "num_fid_samples": ("evaluation.count", ""),
    "sample_every": ("sampling.interval", ""),
    **dict.fromkeys(
        ("devices", "nproc_per_node", "num_processes"), ("", "NGPU=N scripts/train.sh, or torchrun, starts N processes"),
    ),
    "autotune": ("", "scripts/train.sh --autotune searches the batch size"),
    **dict.fromkeys(("smoke", "check_only"), ("", "it is of scripts/train.sh and train.py alone")),
    "use_ema": ("ema.tracks", ", a list"),
    "device": ("", "a GPU is used where there is one, and CUDA_VISIBLE_DEVICES chooses"),
    "num_classes": ("", "there is none: the data decide"),
    "strategy": ("", "the keys of [parallelism] choose DDP, FSDP2 or HSDP"),
    "ckpt": ("checkpoint.initial_weights", ""),
    **dict.fromkeys(("checkpointing_steps", "ckpt_every", "save_every"), ("checkpoint.interval", "")),
    "log_every": ("metrics.log_freq", ""),
    **dict.fromkeys(
        ("ckpt_path", "resume", "resume_from", "resume_from_checkpoint"),
        ("checkpoint.load_step", ": without it, the same command resumes from the newest checkpoint"),
    ),
    **dict.fromkeys(("vae", "vae_path"), ("autoencoder.path", "")),
    **dict.fromkeys(("num_workers", "workers"), ("data.num_workers", "")),
    **dict.fromkeys(("data_dir", "data_path", "dataset", "folder_path", "instance_data_dir"), ("data.path", "")),
    "class_names": ("data.classes_file", ""),
    "image_size": ("data.image_size", ""),
    "resolution": ("data.image_size", ", or data.resolutions of a captioned folder"),
    **dict.fromkeys(("use_wandb", "wandb"), ("metrics.enable_wandb", " true")),
    **dict.fromkeys(("learning_rate", "lr"), ("optimizer.lr", "")),
    **dict.fromkeys(("output_dir", "results_dir"), ("job.dump_folder", "")),
    **dict.fromkeys(("d_model", "hidden_dim", "hidden_size", "n_embd"), ("model.dim", "")),
    **dict.fromkeys(("depth", "n_layers", "num_hidden_layers"), ("model.num_layers", "")),
    "model": ("model.flavor", " for its size, or model.name for its kind"),
    "path_type": ("objective.path", ""),
    "loss_weight": ("objective.weighting.name", ""),
    "negative_prompt": ("", "there are no negative prompts: guidance leads away from the null caption"),
    # Of fine-tuning
    **dict.fromkeys(("instance_prompt", "trigger_word"), ("data.trigger_word", "")),
    **dict.fromkeys(("prompts", "validation_prompt"), ("data.prompts", ", a list")),
    **dict.fromkeys(
        ("class_data_dir", "with_prior_preservation"), ("", "there is none: pictures of the class in the same folder do that"),
    ),
    "caption_dropout_rate": ("model.label_dropout", ""),
    **dict.fromkeys(("cache_latents", "cache_latents_to_disk"), ("cache.enable", " true")),
    **dict.fromkeys(("linear", "network_dim", "rank"), ("lora.rank", "")),
    **dict.fromkeys(("linear_alpha", "lora_alpha", "network_alpha"), ("lora.alpha", "")),
    "quantize": ("lora.base_dtype", " int8"),
    "optimizer": ("optimizer.name", ""),
    "use_8bit_adam": ("optimizer.name", " AdamW8bit"),
    "gradient_checkpointing": ("activation_checkpoint.mode", " full"),
    **dict.fromkeys(("global_seed", "seed"), ("debug.seed", "")),
    # TorchTitan's
    "enable_checkpoint": ("checkpoint.enable", " true"),
    "initial_load_path": ("checkpoint.initial_weights", ""),
    "last_save_model_only": ("checkpoint.final_weights", ""),
    "training.compile": ("compile.enable", " true"),
    "training.dataset": ("data.name", ""),
    "dataset_path": ("data.path", ""),
    "training.dtype": ("training.mixed_precision_param", " bfloat16"),
    **dict.fromkeys(("validation.dataset", "validation.dataset_path"), ("data.validation_path", "")),
    "validation.local_batch_size": ("validation.batch_size", ", of each process"),
    "comm.mode": ("", "there is none: --check-only tries a configuration, scripts/estimate.py its memory"),
    **dict.fromkeys(("expert_parallel_degree", "context_parallel_rotate_method"), ("", "there is none")),
    "validation.freq": ("validation.interval", ""),
    "validation.steps": ("validation.num_images", ", in images"),
    **dict.fromkeys(
        ("tensor_parallel_degree", "pipeline_parallel_degree"),
        ("", "there is none: docs/speed.md says when tensor parallelism pays"),
    ),
    "lr_scheduler.decay_ratio": ("lr_scheduler.decay_between", ", in steps"),
    "model.converters": ("float8.enable", " true"),
    "float8.recipe_name": ("float8.recipe", ""),
    "training.seq_len": ("", "there is none: the images decide"),
    "training.gc_freq": ("", "there is none: garbage is collected every 1,000 steps"),
    **dict.fromkeys(("fused", "optimizer.implementation"), ("", "there is none: it is fused")),
    "selective_ac_option": ("activation_checkpoint.mode", " selective, which keeps products and attention"),
    "early_step_in_backward": ("", "there is none: gradients are clipped first"),
    "comm.trace_buf_size": ("", "the environment's TORCH_FR_BUFFER_SIZE does that"),
    **dict.fromkeys(
        ("profiling.save_traces_folder", "metrics.save_tb_folder"),
        ("", "there is none: profile/trace and tb in the run's folder"),
    ),
    "custom_import": ("job.plugins", ""),
    "checkpoint.export_dtype": ("", "--dtype of scripts/checkpoint.py does that"),
    "memory_estimation.*": ("", "scripts/estimate.py CONFIG estimates memory"),
    "fault_tolerance.*": ("", "torchrun --max-restarts restarts a run, see docs/checkpoints.md"),
}


# Values of other programs, and those that mean the same here.
VALUES = {
    "linear": "rectified_flow", "gvp": "ddpm_cosine_continuous", "vp": "ddpm_linear_continuous",
    "eps": "noise", "epsilon": "noise", "flow_matching": "denoising",
}  # fmt: skip


def synonym(key: str, prefix: str = "") -> str:
    """Suggest a key for a setting's name in another program.

    Args:
        key: unknown dotted key; it, or else its last part, is looked up.
        prefix: of the suggested key; "--" on the command line.

    Returns:
        a question, as "did you mean --training.steps?", or advice; "" for a name that is not in the table.
    """
    name = key.replace("-", "_").lower()
    for each in (name, name.rpartition(".")[2], f"{name.partition('.')[0]}.*"):
        if each in SYNONYMS:
            wanted, more = SYNONYMS[each]
            return f"did you mean {prefix}{wanted}{more}?" if wanted else more
    return ""
