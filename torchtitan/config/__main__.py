"""Write the JSON schema of a configuration file, for editors: python -m torchtitan.config FILE."""

import sys
from pathlib import Path

from torchtitan.config.job import write_schema

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m torchtitan.config FILE")
    try:
        write_schema(Path(sys.argv[1]))
    except OSError as error:
        print(f"{sys.argv[1]}: cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
