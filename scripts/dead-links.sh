#!/usr/bin/env bash
# Lists relative links of Markdown files below a directory whose files are not there, and fails if
# there are any: bash scripts/dead-links.sh [DIRECTORY]
set -euo pipefail
cd "${1:-.}"
dead=0
while IFS= read -r page; do
    # Links in code are no links.
    while IFS= read -r link; do
        file=${link%%#*}
        case $link in *://* | mailto:* | '#'*) continue ;; esac
        if [ ! -e "$(dirname "$page")/$file" ]; then
            echo "$page: $link"
            dead=$((dead + 1))
        fi
    done < <(sed '/^ *```/,/^ *```/d; s/`[^`]*`//g' "$page" | grep -oE '\]\([^) ]+\)' | sed 's/^](//; s/)$//' || true)
done < <(find . -name '*.md' -not -path '*/target/*' -not -path './dist/*' | sort)
if [ "$dead" -gt 0 ]; then
    echo "$dead dead links"
    exit 1
fi
