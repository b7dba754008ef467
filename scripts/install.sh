#!/usr/bin/env bash
# Creates .venv beside this repository and installs specdec into it: install.sh [--cpu] [EXTRAS], such as
# install.sh --cpu '[dev]'. The kernels are compiled meanwhile, so that the first engine need not wait for them.
# On Linux PyPI's torch is the build for CUDA of several GB: --cpu takes the small one, from PyTorch's own index.
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

# uv takes half of pip's time, or less; where it does not reach the packages, pip may know another index.
install() {
    if command -v uv > /dev/null && uv pip install --quiet --python .venv/bin/python "$@" 2> /dev/null; then return; fi
    .venv/bin/pip install --quiet "$@"
}

index=()
if [ "${1:-}" = --cpu ]; then
    index=(--index-url https://download.pytorch.org/whl/cpu)
    shift
fi
python=${PYTHON:-python3}
torch=$(grep '^torch==' constraints.txt)
if [ ! -x .venv/bin/python ]; then step "a Python environment in .venv" "$python" -m venv .venv; fi
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    step "$torch, 750 MB on disk; several GB where it is built for CUDA" install "${index[@]}" "$torch"
fi
compile_kernels() { # needs torch alone
    trap 'touch .venv/kernels.done' EXIT
    .venv/bin/python -m runtime.kernels.library 2> .venv/kernels.log
}
rm -f .venv/kernels.done
compile_kernels &
kernels=$!
step "specdec and what it needs${1:+, with $1}, about 100 MB to download" \
    install --constraint constraints.txt --editable ".${1:-}"
# Who has other work meanwhile waits for .venv/kernels.done.
[ -z "${CI_KERNELS_LATER:-}" ] || exit 0
until_compiled() { while kill -0 "$kernels" 2>/dev/null; do sleep 0.2; done; }
step "kernels for this processor" until_compiled
wait "$kernels" || echo "not compiled, the first engine will say why: $(tail -n 1 .venv/kernels.log)" >&2
