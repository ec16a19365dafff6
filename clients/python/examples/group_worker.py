#!/usr/bin/env python3
"""A worker of a group that survives kills: counts records by key in SQLite, exactly once.

Usage: group_worker.py DATABASE GROUP TOPIC. Connects where `helix` does. Start several with
different databases, kill them, start them again. The offset is stored in the same transaction as
the result, so a record that is read again is not counted again.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys

import helix
from helix import Assigned, Batch, Lost, Partition, Revoked

SCHEMA = """
CREATE TABLE IF NOT EXISTS counts (key BLOB PRIMARY KEY, records INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS offsets (
    topic_id INTEGER, partition INTEGER, next INTEGER NOT NULL, PRIMARY KEY (topic_id, partition));
"""


def handle(database: sqlite3.Connection, batch: Batch) -> None:
    """Counts the records of a batch that are not counted yet."""
    place = (batch.topic_id, batch.partition)
    with database:
        query = "SELECT next FROM offsets WHERE topic_id = ? AND partition = ?"
        found = database.execute(query, place).fetchone()
        done = found[0] if found else 0
        keys = [(record.key or b"",) for record in batch if record.offset >= done]
        statement = """INSERT INTO counts VALUES (?, 1)
            ON CONFLICT DO UPDATE SET records = records + 1"""
        database.executemany(statement, keys)
        statement = "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?)"
        database.execute(statement, (*place, max(done, batch.next_offset)))


async def work(path: str, group: str, topic: str) -> None:
    database = sqlite3.connect(path)
    database.executescript(SCHEMA)
    async with helix.connect() as client:
        # Short enough that another worker takes over soon after a kill.
        async with client.group(group, topic, session_timeout=10.0) as member:
            async for event in member.events():
                if isinstance(event, Batch):
                    handle(database, event)
                elif isinstance(event, Assigned):
                    print("assigned:", names(event.partitions), flush=True)
                elif isinstance(event, (Revoked, Lost)):
                    print("gone:", names(event.partitions), flush=True)


def names(partitions: list[Partition]) -> str:
    return ", ".join(f"{it.topic}/{it.partition}" for it in partitions)


async def main() -> None:
    task = asyncio.create_task(work(*sys.argv[1:]))
    # A stop leaves the group, so that others take over at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        print("left the group")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    asyncio.run(main())
