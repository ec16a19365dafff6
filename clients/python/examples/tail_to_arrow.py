#!/usr/bin/env python3
"""Follows a topic and shows the rate of each second, from Arrow tables.

Usage: tail_to_arrow.py TOPIC [SECONDS]. Connects where `helix` does. Needs pyarrow; a table becomes
a pandas frame with `to_pandas()`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pyarrow as pa

import helix
from helix.arrow import SCHEMA, record_batch


async def follow(topic: str, seconds: float) -> int:
    deadline, total = time.monotonic() + seconds, 0
    async with helix.connect() as client, client.consume(topic, start="earliest") as stream:
        while (left := deadline - time.monotonic()) > 0:
            tables: list[Any] = []
            window = time.monotonic() + min(1.0, left)
            while (wait := window - time.monotonic()) > 0:
                try:
                    # Cancelling the wait loses no record.
                    batch = await asyncio.wait_for(stream.next_batch(), wait)
                except asyncio.TimeoutError:
                    break
                if batch is None:
                    return total
                tables.append(record_batch(batch))
            table = pa.Table.from_batches(tables, schema=SCHEMA)
            total += table.num_rows
            print(f"{table.num_rows} records, {table.nbytes} bytes", flush=True)
    return total


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    count = asyncio.run(follow(sys.argv[1], float((sys.argv[2:] or ["3600"])[0])))
    print(f"{count} records in all")
