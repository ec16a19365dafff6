#!/usr/bin/env bash
# Builds the Python client, checks its types, and tests it against three real nodes.
# Usage: run.sh VENV PATH_TO_HELIX [ARGUMENTS OF PYTEST]. `helix-server` lies beside `helix`.
# Exits with 69 if python3, venv or a package is missing.
set -euo pipefail
mkdir -p "$1"
venv=$(cd "$1" && pwd)
HELIX=$(realpath "$2")
export HELIX
shift 2
cd "$(dirname "$0")/.."
# The libraries that the main build has compiled are not compiled again.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$(realpath -m ../../target)}
./wheel.sh "$venv" dev
timeout 180 "$venv/bin/pip" install -q 'pytest>=8,<10' 'mypy>=1.11,<3' tqdm || exit 69
# Large, and for one test only, which says so if it is skipped.
timeout 60 "$venv/bin/pip" install -q --only-binary :all: 'pyarrow>=16' || echo "note: no pyarrow"
bash tests/typing.sh "$venv"
timeout 240 "$venv/bin/python" -m pytest "$@"
