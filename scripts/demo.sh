#!/usr/bin/env bash
# The four commands on the shipped demo models, in .venv (made if it is not there). Writes to a directory of its own,
# or to the one given.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/specdec ] || scripts/install.sh
work=${1:-$(mktemp -d)}
article='def greet(name):
    """Return a greeting for the person of that name. The greeting ends with an exclamation mark."""

def farewell(name):
    """Return words of goodbye for the person of that name. They are shorter than the greeting."""

class Visitor:
    """A person who comes and goes. Keeps the time of arrival and the number of visits so far.""" TL;DR:'

# Engines that are there already, as those of the documentation's walk in CI, are not built again.
make() { if [ -e "$work/$1" ]; then printf '\n# %s is there already\n' "$1"; else show "${@:2}"; fi; }
show() { printf '\n$ specdec'; printf ' %q' "$@"; printf '\n'; .venv/bin/specdec "$@"; }

make ckpt convert --model-dir demo --output-dir "$work/ckpt" --dtype float32
make engine build --checkpoint-dir "$work/ckpt" --output-dir "$work/engine" \
    --speculative-decoding-mode draft_tokens_external --max-draft-len 10 \
    --max-batch-size 4 --max-input-len 1024 --max-seq-len 1536 --use-paged-context-fmha enable
show run --engine-dir "$work/engine" --ngram-config "[10,2,[0]]" --max-output-len 128 \
    --kv-cache-enable-block-reuse --input-text "$article"
show summarize --engine-dir "$work/engine" --hf-model-dir demo --test-hf --test-engine --batch-size 1 \
    --ngram-config "[10,2,[0]]" --kv-cache-enable-block-reuse --check-accuracy --max-ite 4

make ckpt-draft convert --model-dir demo-draft --output-dir "$work/ckpt-draft" --dtype float32
make draft-engine build --checkpoint-dir "$work/ckpt-draft" --output-dir "$work/draft-engine" \
    --max-batch-size 4 --max-input-len 1024 --max-seq-len 1536
# Layers with recurrent states.
show run --model-dir demo-hybrid --ngram-config "[10,2,[0]]" --max-output-len 128 --check-lossless --input-text "$article"

# Rejection sampling. A question has many answers: where the target is sure of every token, a check of its distribution
# tells nothing.
show run --engine-dir "$work/engine" --draft-engine-dir "$work/draft-engine" \
    --draft-target-model-config "[4,[0],[0],True]" --temperature 0.8 --top-p 0.95 --random-seed 7 \
    --max-output-len 128 --check-lossless --input-text "How does Draft-Sampling work?"
