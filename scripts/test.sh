#!/usr/bin/env bash
# Lint, types and tests, in .venv (made if it is not there). Arguments go to pytest: `--slow` runs all there is.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh '[dev]'
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Two workers: each takes from the other's tests when it has done its own.
.venv/bin/pytest -n 2 --dist worksteal "$@"
