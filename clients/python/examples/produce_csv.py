#!/usr/bin/env python3
"""Produces a record for each row of a CSV file, with a progress bar if tqdm is installed.

Usage: produce_csv.py FILE TOPIC [KEY_COLUMN]. Connects where `helix` does. A row is sent as JSON,
with the key of its column. The topic has one partition and is for this file alone: a second run
after a crash continues where the first one stopped.
"""

from __future__ import annotations

import asyncio
import csv
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import helix

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

ROWS = 500  # rows of a batch


def batches(file: TextIO, key_column: str | None) -> Iterator[list[helix.NewRecord]]:
    """Returns the rows in lists of up to `ROWS` records."""
    batch: list[helix.NewRecord] = []
    for row in csv.DictReader(file):
        key = row[key_column] if key_column else None
        batch.append(helix.NewRecord(json.dumps(row), key=key))
        if len(batch) == ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


async def produce(path: str, topic: str, key_column: str | None) -> int:
    async with helix.connect() as client:
        producer = client.producer(topic, compression="adaptive")
        # A batch is stored as a whole or not at all, so the end is the number of stored rows.
        stored, sent = (await client.topics.offsets(topic, "latest"))[0].offset, 0
        progress: Any = tqdm(unit=" rows", unit_scale=True) if tqdm else None
        with open(path, newline="") as file:
            for batch in batches(file, key_column):
                if sent >= stored:
                    await producer.append(batch, partition=0, expected_offset=sent)
                sent += len(batch)
                if progress is not None:
                    progress.update(len(batch))
        await producer.close()
        if progress is not None:
            progress.close()
        return sent


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    column = sys.argv[3] if len(sys.argv) == 4 else None
    rows = asyncio.run(produce(sys.argv[1], sys.argv[2], column))
    print(f"{rows} rows are stored")
