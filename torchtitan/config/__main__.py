"""Write the JSON schema of a configuration file, for editors: python -m torchtitan.config FILE."""

import json
import sys
from pathlib import Path

from torchtitan.config.job import json_schema
from torchtitan.files.durable import replace_file
from torchtitan.files.ownership import refuse_foreign_file


def write_schema(path: Path) -> None:
    """Write the JSON schema to a file. Raises OSError, also if the file is no such schema."""
    schema = json.dumps(json_schema(), indent=1) + "\n"
    refuse_foreign_file(path, schema.partition(",")[0].encode())
    replace_file(path, schema)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m torchtitan.config FILE")
    try:
        write_schema(Path(sys.argv[1]))
    except OSError as error:
        print(f"{sys.argv[1]}: cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
