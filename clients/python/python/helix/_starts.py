"""Start positions as the extension module takes them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Literal, Union

from .errors import InvalidArgumentError
from .types import Committed

Start = Union[Literal["earliest", "latest"], int, datetime, Committed]
"""Start in a partition: "earliest", "latest" (only new records), an offset, a negative number (as
many records before the end), a time (the first record appended from then on), or `Committed`."""

Starts = Union[Start, Mapping[int, Start]]
"""One start for all partitions, or the start of each partition to read."""

Position = tuple[str, int, str]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def position(start: Start) -> Position:
    """Returns kind, number and text of a start.

    Raises InvalidArgumentError for another value.
    """
    if isinstance(start, str) and start in ("earliest", "latest"):
        return start, 0, ""
    if isinstance(start, bool):
        pass
    elif isinstance(start, int) and abs(start) < 1 << 64:
        return ("offset", start, "") if start >= 0 else ("tail", -start, "")
    elif isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgumentError("the start time has no time zone; pass an aware datetime")
        microseconds = (start - _EPOCH) // timedelta(microseconds=1)
        # Every record is later than the epoch.
        return "timestamp", max(microseconds, 0) * 1000, ""
    elif isinstance(start, Committed):
        return "committed", 0, start.group
    raise InvalidArgumentError(
        f'unknown start {start!r}; use "earliest", "latest", an offset, a negative number of '
        "records, an aware datetime, or Committed(group)"
    )
