#!/usr/bin/env bash
# Lint, types and tests, in .venv (made if it is not there). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh '[dev]'
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/pytest "$@"
