#!/usr/bin/env bash
# Creates .venv beside this repository and installs specdec into it: install.sh [EXTRAS], such as install.sh '[dev]'.
# torch comes first and by its pin: a plain `torch` brings several GB of CUDA packages to a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then "$python" -m venv .venv; fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    .venv/bin/pip install --quiet "$(grep '^torch==' constraints.txt)"
fi
.venv/bin/pip install --quiet --constraint constraints.txt --editable ".${1:-}"
