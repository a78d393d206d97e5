"""Code of the program that CUDA alone reaches, with the stage of a visit that runs it; a test holds the list to the code."""

import re

# A line that only CUDA reaches, or that asks CUDA.
PATTERN = re.compile(
    r'type [!=]= "cuda"|\.is_cuda|torch\.cuda\.(synchronize|empty_cache|current_stream|Event\(|memory|reset|get_device|set_device'
    r"|device_count)|cudagraph_mark|ProfilerActivity\.CUDA|_scaled_mm\.default"
)
_NO_STAGE = "none: "

# File under torchtitan/ or torchtitan_dit/ -> (what it does, stage and row).
CUDA_BRANCHES: dict[str, tuple[str, str]] = {
    "torchtitan/trainer.py": ("waits for the device where time is taken", "features: eager"),
    "torchtitan/state/data.py": ("pins batches for asynchronous copies", "features: eager; loader"),
    "torchtitan/distributed/mesh.py": ("NCCL beside gloo, a rank's device, timeouts", "two ranks: NCCL"),
    "torchtitan/distributed/parallelize.py": ("DDP's device, FSDP's pinned offload, norm on the device", "two ranks"),
    "torchtitan/distributed/compile.py": ("begins CUDA graphs", "features: CUDA graphs"),
    "torchtitan/distributed/activation_checkpoint.py": ("keeps float8 products", "features: selective recomputation"),
    "torchtitan/models/float8.py": ("refuses devices without float8 products", "features: float8"),
    "torchtitan/training/muon.py": ("iterates in bfloat16", "features: Muon"),
    "torchtitan/training/numerical_guard.py": ("reads the verdict one step late, by an event", "features: eager"),
    "torchtitan/training/ema.py": ("waits for weights that are on their way from the host", "two ranks: FSDP2 offloaded"),
    "torchtitan/training/hardware.py": ("device's name, peak and memory", "machine; XL/2 compiled"),
    "torchtitan/training/hardware_description.py": ("memory in summary.json", "interrupt and resume"),
    "torchtitan/gns/step_sums.py": ("copies sums to pinned memory, read later", "features: noise scale"),
    "torchtitan/gns/ranks.py": ("waits for the stream that measured a rank's gradient", "two ranks: DDP"),
    "torchtitan/checkpoint/host_copies.py": ("copies to pinned memory beside training", "features: pinned checkpoints"),
    "torchtitan/profiling/profiler.py": ("traces kernels, memory history", "features: profiler, memory snapshot"),
    "torchtitan/experiments/autotune/tuning.py": ("memory of the device as the limit", _NO_STAGE + "needs a search"),
    "torchtitan/experiments/launchers/local.py": ("gives each cell of a grid a GPU", _NO_STAGE + "needs two GPUs"),
    "torchtitan/evaluation/decoding.py": ("frees memory after decoding a grid", _NO_STAGE + "needs an autoencoder's weights"),
    "torchtitan/evaluation/during_training.py": ("frees memory after extracting features", "interrupt and resume"),
    "torchtitan/extraction/extraction_plan.py": ("encodes in batches", _NO_STAGE + "needs an autoencoder's weights"),
    "torchtitan/extraction/cache_filling.py": ("frees the encoders' memory", _NO_STAGE + "needs an autoencoder's weights"),
}
