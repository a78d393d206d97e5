"""Work of every run's start, done once by the server that forked processes are forks of; see tests.forked."""

import gc
import importlib

from PIL import Image

from torchtitan.config.job import load_config
from torchtitan.data import dataset_info
from torchtitan.models.flops import check_macs
from torchtitan.weights.network import network_on_meta

for name in ("matplotlib.backends.backend_agg", "pyarrow.parquet"):  # which runs import when they first need them
    importlib.import_module(name)
Image.init()
config = load_config(["--data.name", "synthetic"], 1)  # makes the schemas
check_macs(network_on_meta(config, dataset_info(config.data)), config.model.name)  # fills torch's tables of operations
gc.collect()
gc.freeze()  # a run collects before its first step; going through all of torch's objects takes as long as ten steps
