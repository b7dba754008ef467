#!/usr/bin/env bash
# TensorRT-LLM's four commands on the shipped demo model, by their defaults, and a run of a model whose layers have recurrent
# states; in .venv (made if it is not there), and in a directory of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/specdec ] || scripts/install.sh
PATH="$PWD/.venv/bin:$PATH"
cd "$(mktemp -d)"
show() { printf '\n$ specdec'; printf ' %q' "$@"; printf '\n'; specdec "$@"; }

show convert demo
show build --max-draft-len 10
show run --ngram-config "[10,2,[0]]"
show summarize --check-accuracy
show run --model-dir demo-hybrid --ngram-config "[10,2,[0]]" --max-output-len 128 --check-lossless --input-text \
    'def greet(name):
    """Return a greeting for the person of that name. The greeting ends with an exclamation mark."""

def farewell(name):
    """Return words of goodbye for the person of that name. They are shorter than the greeting.""" TL;DR:'
