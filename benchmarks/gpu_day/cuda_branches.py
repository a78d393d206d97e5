"""Code of the program that CUDA alone reaches, with the stage of a visit that runs it; a test holds the list to the code."""

import re

# A line that asks for the kind of a device, or that only CUDA reaches.
PATTERN = re.compile(
    r'"cuda"|type [!=]= "cpu"|\.is_cuda|torch\.(cuda|version\.cuda)|cudagraph_mark|ProfilerActivity\.CUDA|_scaled_mm\.default'
)
# Rooms and files that decide about a device instead of using one: checks and estimates, which run without a GPU too.
ABOUT_CUDA = (
    "torchtitan/config/", "torchtitan/estimate/", "torchtitan/distributed/config.py", "torchtitan/distributed/kernel_choices.py",
)  # fmt: skip
_NO_STAGE = "none: "

# File under torchtitan/ or torchtitan_dit/ -> (what it does, stage and row).
CUDA_BRANCHES: dict[str, tuple[str, str]] = {
    "torchtitan/trainer.py": ("waits for the device where time is taken", "features: eager"),
    "torchtitan/state/data.py": ("pins batches for asynchronous copies", "features: eager; loader"),
    "torchtitan/training/data_loading.py": ("pins batches that the process itself loads", "features: eager"),
    "torchtitan/distributed/mesh.py": ("NCCL beside gloo, a rank's device, timeouts", "two ranks: NCCL"),
    "torchtitan/distributed/parallelize.py": ("DDP's device, FSDP's pinned offload, norm on the device", "two ranks"),
    "torchtitan/distributed/compile.py": ("begins CUDA graphs", "features: CUDA graphs"),
    "torchtitan/distributed/activation_checkpoint.py": ("keeps float8 products", "features: selective recomputation"),
    "torchtitan/models/float8.py": ("refuses devices without float8 products", "features: float8"),
    "torchtitan/training/muon.py": ("iterates in bfloat16", "features: Muon"),
    "torchtitan/training/optimizer.py": ("copies the guard's verdict to weights in host memory", "two ranks: FSDP2 offloaded"),
    "torchtitan/training/numerical_guard.py": ("reads the verdict one step late, by an event", "features: eager"),
    "torchtitan/training/ema.py": ("waits for weights that are on their way from the host", "two ranks: FSDP2 offloaded"),
    "torchtitan/training/hardware.py": ("device's name, peak and memory", "machine; XL/2 compiled"),
    "torchtitan/training/hardware_description.py": ("memory in summary.json", "interrupt and resume"),
    "torchtitan/diffusion/timesteps/learning.py": ("sums losses by bin in a fixed order", "features: timesteps by loss"),
    "torchtitan/diffusion/timesteps/shares.py": (
        "sums shares in a fixed order", "features: noise scale allocates timesteps",
    ),
    "torchtitan/gns/projections.py": ("sums larger second moments together", "features: noise scale"),
    "torchtitan/gns/taps.py": ("sums products of bfloat16 in float32, the whole batch at once", "features: noise scale"),
    "torchtitan/gns/step_sums.py": ("copies sums to pinned memory, read later", "features: noise scale"),
    "torchtitan/gns/ranks.py": ("waits for the stream that measured a rank's gradient", "two ranks: DDP"),
    "torchtitan/checkpoint/host_copies.py": ("copies to pinned memory beside training", "features: pinned checkpoints"),
    "torchtitan/profiling/profiler.py": ("traces kernels, memory history", "features: profiler, memory snapshot"),
    "torchtitan/experiments/autotune/tuning.py": ("memory of the device as the limit", _NO_STAGE + "needs a search"),
    "torchtitan/experiments/launchers/local.py": ("gives each cell of a grid a GPU", _NO_STAGE + "needs two GPUs"),
    "torchtitan/evaluation/decoding.py": ("frees memory after decoding a grid", _NO_STAGE + "needs an autoencoder's weights"),
    "torchtitan/evaluation/during_training.py": ("frees memory after extracting features", "interrupt and resume"),
    "torchtitan/fidelity/inception.py": ("lays channels first", _NO_STAGE + "needs Inception's weights"),
    "torchtitan/runs/folder.py": ("records CUDA's version", "machine"),
    "torchtitan_dit/commands/extract_latents.py": ("takes larger batches", _NO_STAGE + "needs an autoencoder's weights"),
    "torchtitan/extraction/extraction_plan.py": ("encodes in batches", _NO_STAGE + "needs an autoencoder's weights"),
    "torchtitan/extraction/cache_filling.py": ("frees the encoders' memory", _NO_STAGE + "needs an autoencoder's weights"),
}  # fmt: skip
