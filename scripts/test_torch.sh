#!/usr/bin/env bash
# What depends most on torch's version, tested with another torch: test_torch.sh VERSION [PYTEST ARGUMENTS].
# For both ends of what pyproject.toml allows when they change, and for a version before it is allowed. In an environment
# of its own, .venv-torch-VERSION; all else is as in constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?"the version of torch, such as 2.13.0"}
environment=.venv-torch-$version
if [ ! -x "$environment/bin/python" ]; then "${PYTHON:-python3}" -m venv "$environment"; fi
"$environment/bin/pip" install --quiet "torch==$version"
grep -v '^torch==' constraints.txt | "$environment/bin/pip" install --quiet --requirement /dev/stdin prompt_toolkit
"$environment/bin/pip" install --quiet --no-deps --editable . # or pyproject.toml would have its word about torch
"$environment/bin/python" -m pytest tests/runtime/compiler/test_{selection,torch_internals}.py \
    tests/runtime/{builder/test_build,model/test_weights,engine/test_engine}.py "${@:2}"
