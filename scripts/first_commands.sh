#!/usr/bin/env bash
# TensorRT-LLM's four commands, by their defaults, in a directory of its own: convert, build, run, summarize.
set -euo pipefail
cd "$(mktemp -d)"

specdec convert demo
specdec build --max-draft-len 10
specdec run --ngram-config "[10,2,[0]]"
specdec summarize --check-accuracy
