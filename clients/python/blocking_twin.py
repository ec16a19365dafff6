#!/usr/bin/env python3
"""Writes `helix.blocking` from the asyncio client: the same names, without `async` and `await`.

Usage: blocking_twin.py [--check]. With --check it only compares, and fails if a file differs.
"""
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "python" / "helix"
MODULES = ["_client", "_group", "_producer", "_stream"]
REPLACED = [
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"^_BLOCKING = False$", "_BLOCKING = True"),
    # Modules that both share.
    (r"^from \.(_helix|_starts|errors|types) import", r"from ..\1 import"),
    # A record is queued before the call returns.
    (r"\) -> Awaitable\[None\]:", ") -> None:"),
    (r"^(from collections\.abc import) Awaitable, ", r"\1 "),
    (r"return self\._native\.post\(", "self._native.post("),
    (r"        Await the result for backpressure: it ends once the buffer has capacity for another "
     r"record,\n        usually at once\.\n\n        Raises:\n            BufferFullError: [^\n]*\n",
     "        Waits for capacity in the buffer.\n"),
    (r"If the task is cancelled", "If Ctrl-C ends the call"),
    (r"Cancelling a task loses no record\. ", ""),
    (r"Cancel safe, and the errors", "The errors"),
    (r"Works in any event loop and thread", "Works in any thread"),
]


def twin(text: str, module: str) -> str:
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return f"# Written by blocking_twin.py from ../{module}.py; do not edit.\n{text}"


def main() -> None:
    is_check, differ = "--check" in sys.argv, []
    for module in MODULES:
        text = twin((PACKAGE / f"{module}.py").read_text(), module)
        path = PACKAGE / "blocking" / f"{module}.py"
        if not path.exists() or path.read_text() != text:
            differ.append(path.name)
            if not is_check:
                path.write_text(text)
    if is_check and differ:
        sys.exit(f"run blocking_twin.py: {', '.join(differ)} of helix.blocking differ")


if __name__ == "__main__":
    main()
