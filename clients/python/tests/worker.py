"""A member of a group that tests kill: worker.py ADDRESSES GROUP TOPIC.

Writes "partition offset value" of each handled record to standard output, before it commits.
"""

import asyncio
import sys

import helix


async def main(addresses: str, group: str, topic: str) -> None:
    async with helix.connect(addresses) as client:
        async with client.group(group, topic, session_timeout=2.0, auto_commit=None) as member:
            async for batch in member.batches():
                for record in batch:
                    value = (record.value or b"").decode()
                    sys.stdout.write(f"{record.partition} {record.offset} {value}\n")
                sys.stdout.flush()
                await member.commit()


asyncio.run(main(*sys.argv[1:]))
