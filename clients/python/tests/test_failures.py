"""Members and leaders are killed under load. Judged for loss, doubles and order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cluster import Cluster

import helix
import helix.blocking

MAX = 120.0
PARTITIONS, RECORDS = 6, 3000


async def leader_of(client: helix.Client, topic: str) -> int:
    while True:
        leader = (await client.topics.get(topic)).partitions[0].leader_node_id
        if leader is not None:
            return leader
        await asyncio.sleep(0.05)


def test_leader_killed_under_load_stores_each_record_once(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name, partitions=PARTITIONS)
            killed = await leader_of(client, name)
            sent, live = 0, 0
            followed: Counter[bytes | None] = Counter()

            async def follow() -> None:
                nonlocal live
                async for record in client.consume(name):
                    followed[record.value] += 1
                    live += 1
                    if live == RECORDS:
                        return

            following = asyncio.create_task(follow())
            async with client.producer(name, linger=0.0) as producer:
                while sent < RECORDS:
                    lot = range(sent, min(sent + 50, RECORDS))
                    acks = [producer.send(str(it), key=str(it % 50)) for it in lot]
                    assert all(ack.offset is not None for ack in await asyncio.gather(*acks))
                    sent += len(lot)
                    if sent == RECORDS // 3:
                        await asyncio.to_thread(cluster.dev, "kill", str(killed))
                    if sent == RECORDS * 2 // 3:
                        await asyncio.to_thread(cluster.dev, "restart", str(killed))
            await following
            expected = Counter(str(it).encode() for it in range(RECORDS))
            assert followed == expected
            read: Counter[bytes | None] = Counter()
            last: dict[bytes | None, int] = {}
            async for record in client.consume(name, follow=False):
                read[record.value] += 1
                number = int(record.value or b"")
                assert last.get(record.key, -1) < number, "the order of a key"
                last[record.key] = number
            assert read == expected
            await client.cluster.wait_ready(MAX)

    asyncio.run(asyncio.wait_for(run(), MAX))


def test_members_killed_lose_nothing(cluster: Cluster, name: str) -> None:
    """Members are killed with kill -9: every record is handled, and only records since the last
    commit of a killed member twice."""
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as directory:

        def start() -> Path:
            out = Path(directory) / str(len(workers))
            command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            command += [",".join(cluster.addresses), name, name]
            with open(out, "wb") as file:
                workers.append(subprocess.Popen(command, stdout=file))
            return out

        def handled(path: Path) -> list[str]:
            # A killed process may leave a part of a line.
            return path.read_text().rpartition("\n")[0].splitlines()

        try:
            with helix.blocking.connect(cluster.addresses) as client:
                client.topics.create(name, partitions=PARTITIONS)
                outputs = [start(), start()]
                deadline, producer = time.monotonic() + MAX, client.producer(name)

                def lines() -> int:
                    return sum(len(handled(it)) for it in outputs)

                for number in range(RECORDS):
                    producer.post(str(number))
                    if number in (RECORDS // 3, RECORDS * 2 // 3):
                        producer.flush()
                        while lines() < number // 2:
                            assert time.monotonic() < deadline, f"{lines()} records handled"
                            time.sleep(0.02)
                        victim = workers[-1]
                        victim.kill()
                        victim.wait()
                        outputs.append(start())
                producer.close()
                while len({line for it in outputs for line in handled(it)}) < RECORDS:
                    assert time.monotonic() < deadline, f"{lines()} records handled"
                    time.sleep(0.02)
                while sum(it.lag for it in client.groups.offsets(name).values()):
                    assert time.monotonic() < deadline, client.groups.offsets(name)
                    time.sleep(0.02)
            copies = Counter(line for it in outputs for line in handled(it))
            assert Counter(line.split()[2] for line in copies) == Counter(map(str, range(RECORDS)))
            assert max(copies.values()) <= 3
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
