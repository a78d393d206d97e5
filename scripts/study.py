"""Measure something over a run's checkpoints: scripts/study.py NAME RUN_FOLDER [options]; NAME --help lists them.

Results lie in RUN_FOLDER/studies/NAME: results.csv, pictures and summary.md. A study that was stopped goes on where it
was.
"""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan.command_line import OneLineParser
from torchtitan.config import ConfigError
from torchtitan.evaluation.studies import STUDIES, load_study
from torchtitan.evaluation.studies.frame import StudyError, add_run_options, open_run, run_study
from torchtitan.training.checkpoint import CheckpointError


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for name, entry in STUDIES.items():
            print(f"  {name:22} {entry.description}")
        return 0 if words else 2
    name = words[0]
    if name not in STUDIES:
        print(f"{name}: no such study (there are: {', '.join(STUDIES)})", file=sys.stderr)
        return 2
    study = load_study(name)
    parser = OneLineParser(prog=f"study.py {name}", description=STUDIES[name].description)
    alone = hasattr(study, "run_alone")  # it reads tables, not a run
    several_weights = getattr(study, "SEVERAL_WEIGHTS", False)
    if not alone:
        add_run_options(parser, several_weights)
    study.add_options(parser)
    arguments = parser.parse_args(words[1:])
    try:
        if alone:
            summary = study.run_alone(arguments)
        else:
            summary = run_study(name, study, open_run(arguments, several_weights))
    except (StudyError, ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(summary)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
