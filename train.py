"""Train a diffusion transformer: python train.py --job.config_file FILE [--section.key value ...].

    --check-only   check the configuration and stop
    --help         every section and key
"""

import logging
import os
import sys

from torchtitan.config import ConfigError, help_text, load_config, report_and_exit
from torchtitan.distributed.restarts import REFUSED, forbid_restart
from torchtitan.terminal import escape_output


def main(arguments: list[str]) -> int:
    """Run one training process; returns its exit code (2: refused configuration, data or run folder)."""
    if "--help" in arguments or "-h" in arguments:
        print(f"{__doc__}\n{help_text()}")
        return 0
    check_only = "--check-only" in arguments
    arguments = [argument for argument in arguments if argument != "--check-only"]
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if check_only:  # before a launcher has set WORLD_SIZE
        world_size = int(os.environ.get("NGPU", world_size))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    try:
        config = load_config(arguments, world_size)
    except ConfigError as error:
        try:
            report_and_exit(error)
        finally:
            forbid_restart()
    if check_only:
        from data.base import DatasetError
        from torchtitan.autoencoders.base import AutoencoderError
        from torchtitan.evaluation.decoding import run_decoder

        try:
            run_decoder(config)
        except (AutoencoderError, DatasetError) as error:
            print(error, file=sys.stderr)
            return REFUSED
        print(f"{config.job.config_file or 'configuration'}: ok")
        return 0

    from torchtitan.run import run  # the configuration is checked before anything heavy is imported

    return run(config)


if __name__ == "__main__":
    escape_output()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    if code == REFUSED or code > 128:  # or ended by a signal
        forbid_restart()
    # A gloo thread may abort the interpreter while it shuts down.
    os._exit(code)
