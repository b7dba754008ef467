#!/usr/bin/env bash
# Lint, types and tests, in .venv (made if it is not there). Arguments go to pytest: `--slow` runs all there is.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -n "${CI_INSTALLED:-}" ] || scripts/install.sh '[dev,docs]' # one installation for all that CI runs
.venv/bin/ruff check .
.venv/bin/ruff check --preview --select PLW1514 specdec_cli commands runtime # no file in the encoding of the locale
.venv/bin/ruff format --check .
unset PYTHONDONTWRITEBYTECODE # or every process that the tests start would compile the sources again
# In a new environment each worker would compile all that the tests import, which takes three times as long as importing it.
compgen -G '.venv/lib/python*/site-packages/transformers/models/llama/__pycache__' > /dev/null ||
    .venv/bin/pytest --collect-only -qq > /dev/null || true # what is wrong is said below
# Workers import and collect while the kernels are compiled, and wait for this file before their first test.
export TESTS_WAIT_FOR="${CI_KERNELS_LATER:+$PWD/.venv/kernels.done}"
unset CI_KERNELS_LATER # tests install too
nice -n 5 .venv/bin/mypy & # where the tests leave a core idle
types=$!
# Two workers more than cores, and eight at most: tests wait for processes and files a quarter of their time. Each worker
# takes of the others' tests when it has done its own.
workers=$(($(nproc) + 2))
.venv/bin/pytest -n $((workers < 8 ? workers : 8)) --dist worksteal "$@"
wait "$types"
