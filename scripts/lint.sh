#!/usr/bin/env bash
# Check the code without running it, in the tests' environment: scripts/lint.sh [arguments of ruff check, as --fix]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

set_up test
cd "$root"
"$venv/bin/python" -m ruff check "$@"
exec "$venv/bin/python" -m mypy
