"""Work of every run's start, done once by the server that forked processes are forks of; see tests.forked."""

import importlib
import importlib.util

from PIL import Image

from torchtitan.processes.importing import uncollected

IMPORTED = (
    "torchtitan_dit.commands.train", "torchtitan.run", "torchtitan.pictures.style", "tests.faults.moments",
    "tests.distributed.cases",
    # What runs, or the tests' functions in them, import when they first need it.
    "functorch.compile", "matplotlib.backends.backend_agg", "pandas", "pyarrow.parquet", "pytest", "scipy.special",
    "torch._inductor.compile_fx", "torchao.quantization",
)  # fmt: skip
with uncollected():  # a run collects before its first step; going through all of torch's objects takes as long as ten steps
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    from torchtitan.config.job import load_config
    from torchtitan.data import dataset_info
    from torchtitan.models.flops import check_macs
    from torchtitan.weights.network import network_on_meta

    Image.init()
    config = load_config(["--data.name", "synthetic"], 1)  # makes the schemas
    check_macs(network_on_meta(config, dataset_info(config.data)), config.model.name)  # fills torch's tables of operations
