#!/usr/bin/env bash
# Wheels with compiled kernels, into dist/: wheel.sh [MACHINE …], x86_64 and aarch64 if none is named.
# Needs g++ and, for the other machine, its cross compiler (Debian: g++-aarch64-linux-gnu, g++-x86-64-linux-gnu).
set -euo pipefail
cd "$(dirname "$0")/.."

[ -n "${CI_INSTALLED:-}" ] || scripts/install.sh '[wheel]'
exec .venv/bin/python -m scripts.tools.wheel "$@"
