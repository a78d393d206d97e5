"""What the ranks of the tests of per-bin gradient noise run; see tests.launcher."""

from pathlib import Path

import torch.distributed as dist

from tests.distributed.cases import compiler, make_trainer, remove, shared_folder
from torchtitan.gns.raw_sums import read_sums

GNS = (
    "--gns.enable", "true", "--gns.num_bins", "4", "--gns.interval", "2", "--gns.sketch_size", "4",
    "--optimizer.lr", "1e-3",
)  # fmt: skip


def raw_sums(cases: dict[str, dict]) -> dict[str, list[dict]]:
    """Train each case for some steps; every step's raw sums as lists, on the first rank."""
    folder = shared_folder()
    found = {}
    for name, case in cases.items():
        options = {"steps": 6, "accumulation": 1, "layers": 2, **case}
        layers = ("--model.num_layers", str(options.pop("layers")))
        options["overrides"] = (*GNS, *layers, *case.get("overrides", ()))
        with compiler(options.pop("backend", "inductor")):
            trainer = make_trainer(folder, name, **options)
        assert trainer.train() == 0
        trainer.close()
        if not dist.is_initialized() or dist.get_rank() == 0:
            found[name] = [
                {"step": step} | {key: value.nan_to_num().tolist() for key, value in vars(sums).items() if value is not None}
                for step, sums in read_sums(Path(folder) / name / "gns")
            ]
    remove(folder)
    return found
