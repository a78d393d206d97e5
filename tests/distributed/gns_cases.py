"""What the ranks of the tests of per-bin gradient noise run; see tests.launcher."""

from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from tests.distributed.cases import compiler, make_trainer, remove, shared_folder
from torchtitan.errors import TrainingError
from torchtitan.gns.raw_sums import read_sums
from torchtitan.models.dit.model import OutputLayer

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
        # Steps with and without a measurement compile; their time counts as the start's.
        assert trainer.clock.steps == options["steps"] - 2 * trainer.config.compile.enable
        trainer.close()
        if not dist.is_initialized() or dist.get_rank() == 0:
            found[name] = [
                {"step": step} | {key: value.nan_to_num().tolist() for key, value in vars(sums).items() if value is not None}
                for step, sums in read_sums(Path(folder) / name / "gns")
            ]
    remove(folder)
    return found


def refusals(cases: dict[str, dict]) -> dict[str, list]:
    """Train each case with a linear's weight used outside of its forward too; the step and the words of the refusal."""

    def forward(self, *arguments):
        return whole(self, *arguments) + self.linear.weight.sum()

    folder, found, whole = shared_folder(), {}, OutputLayer.forward
    for name, case in cases.items():
        options = {"steps": 6, "accumulation": 1, **case}
        options["overrides"] = (*GNS, "--model.num_layers", "2", *case.get("overrides", ()))
        with patch.object(OutputLayer, "forward", forward), compiler(options.pop("backend", "inductor")):
            trainer = make_trainer(folder, name, **options)
            try:
                trainer.train()
            except TrainingError as error:
                found[name] = [trainer.state.step, str(error)]
        trainer.close()
    remove(folder)
    return found
