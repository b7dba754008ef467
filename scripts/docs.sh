#!/usr/bin/env bash
# The documentation as a site in site/, by .venv (made if it is not there); broken links and anchors fail.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/zensical ] || scripts/install.sh '[docs]'
.venv/bin/zensical build --strict --clean
