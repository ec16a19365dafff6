#!/usr/bin/env python3
"""Writes and reads without a pause until standard input is closed, and fails at the first error.

Connects where `helix` does. Each record is acked before the next one of its partition is sent; a
group reads them and must see each once, in order. Run it beside changes of a cluster.
"""

import asyncio
import os
import sys

import helix

TOPIC = GROUP = f"steady-{os.getpid()}"
PARTITIONS = 12
LAST_RECORDS_MAX = 30.0


async def write(client: helix.Client, partition: int, acked: list[int], over: asyncio.Event) -> None:
    async with client.producer(TOPIC) as producer:
        while not over.is_set():
            number = acked[partition] + 1
            await producer.send(str(number), partition=partition)
            acked[partition] = number
            await asyncio.sleep(0.005)


async def read(client: helix.Client, seen: list[int]) -> None:
    async with client.group(GROUP, TOPIC) as member:
        async for record in member:
            number = int((record.value or b"").decode())
            expected = seen[record.partition] + 1
            if number != expected:
                raise SystemExit(
                    f"partition {record.partition}, offset {record.offset}: record {number} "
                    f"instead of {expected}"
                )
            seen[record.partition] = number


async def main() -> None:
    acked, seen, over = [0] * PARTITIONS, [0] * PARTITIONS, asyncio.Event()
    async with helix.connect() as client:
        await client.topics.create(TOPIC, partitions=PARTITIONS)
        writers = [
            asyncio.create_task(write(client, partition, acked, over))
            for partition in range(PARTITIONS)
        ]
        reader = asyncio.create_task(read(client, seen))
        closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        # A task that ends before has failed.
        await asyncio.wait([closed, reader, *writers], return_when=asyncio.FIRST_COMPLETED)
        over.set()
        await asyncio.gather(*writers)
        async with asyncio.timeout(LAST_RECORDS_MAX):
            while seen != acked and not reader.done():
                await asyncio.sleep(0.05)
        if reader.done():
            await reader
        reader.cancel()
        print(f"{sum(acked)} records written, acked and read once, in order", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
