#!/usr/bin/env bash
# Builds the wheel and installs it into a virtual environment.
# Usage: wheel.sh VENV PROFILE [OUT]. PROFILE is a profile of Cargo: dev, or release.
# Makes the environment if it is missing. Exits with 69 if python3, venv or a package is missing.
set -euo pipefail
venv=$1 profile=$2
here=$(cd "$(dirname "$0")" && pwd)
out=${3:-$(mktemp -d)}
command -v python3 >/dev/null || exit 69
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" 2>/dev/null || exit 69
timeout 180 "$venv/bin/pip" install -q 'maturin>=1.9,<2' || exit 69
cd "$here"
"$venv/bin/maturin" build -q --locked --profile "$profile" --interpreter "$venv/bin/python" --out "$out"
"$venv/bin/pip" install -q --no-deps --force-reinstall "$out"/helix_log-*.whl
