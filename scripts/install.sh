#!/usr/bin/env bash
# Creates .venv beside this repository and installs specdec into it: install.sh [EXTRAS], such as install.sh '[dev]'.
# torch comes first and by its pin: a plain `torch` brings several GB of CUDA packages to a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

# step WHAT COMMAND …: says what is done, a dot every 5 seconds, and how long it took.
step() {
    local start=$SECONDS next=5 pid
    printf '%s ' "$1" >&2
    "${@:2}" &
    pid=$!
    while sleep 0.2 && kill -0 "$pid" 2>/dev/null; do
        if [ $((SECONDS - start)) -ge "$next" ]; then
            printf . >&2
            next=$((next + 5))
        fi
    done
    wait "$pid"
    printf ' %d s\n' $((SECONDS - start)) >&2
}

python=${PYTHON:-python3}
torch=$(grep '^torch==' constraints.txt)
if [ ! -x .venv/bin/python ]; then step "a Python environment in .venv" "$python" -m venv .venv; fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    step "$torch, about 200 MB to download and 750 MB on disk" .venv/bin/pip install --quiet "$torch"
fi
step "specdec and what it needs${1:+, with $1}, about 100 MB to download" \
    .venv/bin/pip install --quiet --constraint constraints.txt --editable ".${1:-}"
