"""What the ranks of test_shard_drawing.py run."""

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.distributed.cases import BASE, make_trainer, remove, shared_folder
from torchtitan.config.job import JobConfig, load_config
from torchtitan.data import dataset_info
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.parallelize import named_parameters, parallelize
from torchtitan.distributed.shard_drawing import place_shards
from torchtitan.files.weight_files import named_weights
from torchtitan.models.base import DiffusionModel
from torchtitan.weights.adapted_network import add_adapters, drawn_sha256
from torchtitan.weights.network import new_network, sharded_network


def sha256_of_weights(cases: dict[str, tuple[str, ...]], replicas: int, shards: int) -> dict[str, str]:
    """For each case (overrides), the hash of all weights; "filled" is of those that a file holds, "frozen" that of a
    checkpoint of adapters.
    """
    folder, found = Path(shared_folder()), {}
    for name, overrides in cases.items():
        config, path = _config(folder, replicas, shards, overrides), folder / f"{name}.safetensors"
        found[name] = _hash(network(config))
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.manual_seed(7)
            wanted = new_network(config, dataset_info(config.data), torch.device("cpu"))
            save_file({key: torch.rand(value.shape) for key, value in named_weights(wanted).items()}, path)
        if dist.is_initialized():
            dist.barrier()
        found[f"{name}, filled"] = _hash(network(config, str(path)))
        if config.lora.enable:
            found[f"{name}, frozen"] = drawn_sha256(network(config))
    remove(str(folder))
    return found


def network(config: JobConfig, initial_weights: str = "") -> DiffusionModel:
    info, layout = dataset_info(config.data), Layout(config.parallelism)
    if not layout.sharded:
        model = new_network(config, info, layout.device, initial_weights)
        if config.lora.enable:
            add_adapters(model, config, info, layout.device)
        return model
    model, shards = sharded_network(config, info, layout, initial_weights)
    assert shards and all(parameter.is_meta for parameter in model.parameters())
    if config.lora.enable:
        add_adapters(model, config, info, layout.device)
    parallelize(model, layout)
    place_shards(model, shards)
    assert not shards
    return model


def first_steps(cases: dict[str, dict]) -> dict[str, list]:
    """For each case, the hash of a trainer's weights before its first step, and the first two gradient norms."""
    folder, found = shared_folder(), {}
    for name, case in cases.items():
        trainer = make_trainer(folder, name, steps=10, accumulation=1, **case)
        found[name] = [_hash(trainer.state.model)]
        for _ in range(2):
            trainer.state.step += 1
            found[name].append(float(trainer.train_step()[0]))
        trainer.close()
    remove(folder)
    return found


def _config(folder: Path, replicas: int, shards: int, overrides: tuple[str, ...]) -> JobConfig:
    file = folder / f"rank-{dist.get_rank() if dist.is_initialized() else 0}.toml"
    ranks = replicas * shards
    file.write_text(BASE.format(steps=10, local_batch_size=16 // ranks, replicas=replicas, shards=shards))
    return load_config(["--job.config_file", str(file), "--job.dump_folder", str(folder), *overrides], ranks)


def _hash(model: DiffusionModel) -> str:
    digest = hashlib.sha256()
    weights = named_weights(model) | {name: value.detach() for name, value in named_parameters(model).items()}
    for name in sorted(name for name in weights if "_checkpoint_wrapped_module" not in name):
        value = weights[name]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(name.encode() + str((whole.shape, whole.dtype)).encode() + whole.contiguous().float().numpy().tobytes())
    return digest.hexdigest()
