#!/usr/bin/env bash
# Walks through the console in a real browser, against three nodes: every page at 360 px and 1440 px,
# light and dark, a live tail under load, a node killed while a page is open, a sign-in, a record
# with markup, and pages without scripts.
# Usage: console-browser.sh VENV PATH_TO_HELIX [DIRECTORY FOR SCREENSHOTS]. `helix-server` lies
# beside `helix`. Exits with 69 if chromium, chromedriver, python3, venv or selenium is missing.
set -euo pipefail
mkdir -p "$1"
venv=$(cd "$1" && pwd)
helix=$(realpath "$2")
screens=${3:-$venv/screens}
mkdir -p "$screens"
here=$(cd "$(dirname "$0")" && pwd)
for program in chromium chromedriver python3; do
    command -v "$program" >/dev/null || exit 69
done
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || exit 69
timeout 180 "$venv/bin/pip" install -q 'selenium>=4.30,<5' || exit 69
timeout 280 "$venv/bin/python" "$here/console-browser.py" "$helix" "$screens"
