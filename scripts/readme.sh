#!/usr/bin/env bash
# Runs the shell blocks of the README from top to bottom, in one shell, and fails where one of them
# fails. Blocks after a comment `<!-- not run: ... -->` are skipped. `bash scripts/readme.sh DIR`
# uses the programs in DIR instead of a release build.
set -euo pipefail
cd "$(dirname "$0")/.."
programs=$(cd "${1:-target/release}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk -v programs="$programs" '
    /^<!-- not run/ { skips = 1 }
    /^```/ {
        if (inside) { inside = 0; skips = 0; next }
        if ($0 == "```sh" && !skips) { inside = 1; print "" } else { inside = 2 }
        next
    }
    inside == 1 {
        gsub(/\$PWD\/target\/release/, programs)
        print
    }
' README.md > "$work/blocks.sh"
echo "== the shell blocks of the README"
cat "$work/blocks.sh"
# The last block stops the cluster; this is for a run that fails before.
cat > "$work/run.sh" <<'END'
set -euo pipefail
trap 'helix dev stop >/dev/null 2>&1 || true' EXIT
END
cat "$work/blocks.sh" >> "$work/run.sh"
cd "$work"
env -u HELIX_ADDR XDG_CONFIG_HOME="$work/config" XDG_STATE_HOME="$work/state" \
    timeout 300 bash -x "$work/run.sh"
echo "the README works as printed"
