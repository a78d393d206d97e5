"""Checks of a run before its folder is made, so that nothing is left behind by one that cannot train."""

from typing import TYPE_CHECKING

from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import cache_folder, has_latents, store_of_latents, trained_info
from torchtitan.data.base import DatasetError
from torchtitan.distributed.collectives import from_first_rank
from torchtitan.distributed.kernel_choices import check_attention
from torchtitan.distributed.mesh import Layout
from torchtitan.distributed.precision import DTYPES
from torchtitan.files.remote_path import AnyPath
from torchtitan.models.float8 import check_convertible
from torchtitan.models.flops import check_macs
from torchtitan.runs.folder import RunFolder
from torchtitan.runs.status import remove_status
from torchtitan.weights.initial_weights import check_initial_weights
from torchtitan.weights.network import alignment_plan, check_objective, network_on_meta

if TYPE_CHECKING:
    from torchtitan.alignment.alignment import Alignment
    from torchtitan.data.online import OnlineEncoder
    from torchtitan.evaluation.decoding import LatentDecoder
    from torchtitan.evaluation.sample_metrics import SampleMetrics


def checked_decoder(config: JobConfig) -> "LatentDecoder | None":
    """Decoder of the run's latents, None without one. Raises AutoencoderError, DatasetError."""
    if config.cache.enable:
        raise DatasetError(f"cache.enable: {cache_folder(config)} is not filled yet (scripts/train.sh fills it)")
    if config.autoencoder.name == "none" or not config.draws_pictures:
        return None
    from torchtitan.evaluation.decoding import run_decoder

    return run_decoder(config.autoencoder, store_of_latents(config))


def check_run(config: JobConfig, layout: Layout, checkpoints: AnyPath) -> str:
    """Check network, objective, initial weights, adapters, float8 and attention; collective.

    Returns:
        the SHA-256 of the frozen network of adapters, "" where it is not known from a file.

    Raises:
        CheckpointError, ConfigError, MiscountedModel, CannotMeasure, Float8Error, KernelError: on every rank.
    """
    training, info = config.training, trained_info(config)
    from_first_rank(check_macs, network_on_meta(config, info), config.model.name)
    from_first_rank(check_objective, config, info)
    base_sha256 = check_initial_weights(config, info, checkpoints)
    if config.lora.enable:
        from torchtitan.weights.adapted_network import check_adapters

        check_adapters(config, info)
    if config.float8.enable:
        model = network_on_meta(config, info)
        check_convertible(model, config.float8, training.local_batch_size, info.shapes, layout.degree)
    if config.gns.enable and config.gns.single_pass:
        from torchtitan.gns.capture import check_measurable

        check_measurable(network_on_meta(config, info))
    if (width := config.model.head_width) is not None:  # of attention heads, where the network says it
        check_attention(training.attention_backend, width, DTYPES[training.mixed_precision_param], layout.device)
    return base_sha256


def opened_alignment(config: JobConfig, layout: Layout) -> "Alignment | None":
    """Alignment of a run with its encoder; None without one. Raises ConfigError: on the ranks that cannot read it."""
    if (plan := alignment_plan(config, trained_info(config))) is None:
        return None
    from torchtitan.alignment.alignment import Alignment

    return Alignment(config, plan, layout)


def opened_encoder(config: JobConfig, layout: Layout) -> "OnlineEncoder | None":
    """Encoder of a run's images while it trains; None without one. Raises AutoencoderError, DatasetError."""
    if not config.autoencoder.encode:
        return None
    from torchtitan.data.online import OnlineEncoder

    keeps_pixels = config.alignment.encodes_images
    return OnlineEncoder(config.autoencoder, config.debug.seed, layout.device, keeps_pixels=keeps_pixels)


def checked_sample_metrics(config: JobConfig, layout: Layout) -> "SampleMetrics":
    """Metrics of samples; collective. Raises EvaluationError."""
    from torchtitan.evaluation.sample_metrics import SampleMetrics

    return SampleMetrics.of_run(config.evaluation, config.data, layout.device, has_latents(config))


def open_folder(folder: RunFolder) -> None:
    """Open a run's folder; by the first rank. Raises RunFolderError, Busy."""
    folder.open()
    remove_status(folder.path)
