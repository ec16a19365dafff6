#!/usr/bin/env bash
# Checks types: the package and the examples with mypy, the stubs against the extension.
# Usage: typing.sh VENV. Needs mypy in the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
"$1/bin/python" blocking_twin.py --check
"$1/bin/python" -m mypy python/helix examples
"$1/bin/python" -m mypy.stubtest helix._helix
