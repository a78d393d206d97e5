"""Times of decoding, encoding and writing, and the limiting stage."""

from dataclasses import dataclass, field
from typing import Any

STAGES = ("decode", "encode", "write")


@dataclass
class StageTimes:
    """Stage times of one rank.

    Attributes:
        decoders: processes that decode at once.
        images: number that passed all stages.
        busy: seconds of work of each stage, of decoding summed over its processes.
    """

    decoders: int
    images: int = 0
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def alone(self, stage: str) -> float:
        """Images per second of a stage without waiting for another."""
        seconds = self.busy[stage] / (self.decoders if stage == "decode" else 1)
        return self.images / seconds if seconds else 0.0


def summarize(ranks: list[StageTimes], seconds: float) -> dict[str, Any]:
    """Summarise all ranks, for JSON.

    Args:
        ranks: at least one with images.
        seconds: from the first image to the last shard.
    """
    images = sum(times.images for times in ranks)
    stages = {
        stage: {
            "busy_seconds": sum(times.busy[stage] for times in ranks),
            "images_per_second_alone": sum(times.alone(stage) for times in ranks),
        }
        for stage in STAGES
    }
    limit = min(STAGES, key=lambda stage: stages[stage]["images_per_second_alone"])
    return {
        "images": images, "seconds": seconds, "images_per_second": images / seconds, "ranks": len(ranks),
        "decoders_per_rank": ranks[0].decoders, "stages": stages, "limited_by": limit,
    }  # fmt: skip


def describe_times(summary: dict[str, Any]) -> list[str]:
    """Describe the times in lines for readers."""
    processes = f"{summary['ranks']} ranks" if summary["ranks"] > 1 else "1 process"
    lines = [
        f"{summary['images']:,} images in {summary['seconds']:.1f} s on {processes}: "
        f"{summary['images_per_second']:.4g} images/s, limited by {summary['limited_by']}"
    ]
    for name, stage in summary["stages"].items():
        lines.append(
            f"  {name}  busy {stage['busy_seconds']:9.1f} s, alone {stage['images_per_second_alone']:.4g} images/s"
        )
    return lines
