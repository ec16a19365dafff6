"""Consumer groups of the asyncio client."""

from __future__ import annotations

import asyncio

import pytest
from cluster import Cluster

import helix
from helix import Partition, errors

MAX = 60.0


async def topic_with(client: helix.Client, name: str, partitions: int, records: int) -> int:
    topic = await client.topics.create(name, partitions=partitions)
    async with client.producer(name) as producer:
        for partition in range(partitions):
            batch = [f"{partition}/{number}" for number in range(records)]
            await producer.append(batch, partition=partition)
    return topic.topic_id


def test_members_divide_partitions_and_commit(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await topic_with(client, f"{name}-a", 4, 10)
            seen: set[bytes | None] = set()
            both = asyncio.Event()
            owned: dict[str, set[Partition]] = {}

            async def member(label: str) -> None:
                async with client.group(name, f"{name}*", session_timeout=10) as group:
                    async for event in group.events():
                        if isinstance(event, helix.Batch):
                            seen.update(event.values())
                        elif isinstance(event, helix.Assigned):
                            owned.setdefault(label, set()).update(event.partitions)
                        elif isinstance(event, (helix.Revoked, helix.Lost)):
                            owned[label].difference_update(event.partitions)
                        if [len(owned.get(it, ())) for it in "ab"] == [2, 2] and len(seen) == 40:
                            both.set()
                        if both.is_set():
                            break

            members = [asyncio.create_task(member(label)) for label in "ab"]
            await both.wait()
            # A member that waits for records sees that only with an event.
            async with client.producer(f"{name}-a") as producer:
                for partition in range(4):
                    await producer.send(b"end", partition=partition)
            await asyncio.gather(*members)
            description = await client.groups.describe(name)
            assert description.state == "empty" and len(description.partitions) == 4
            assert all(it.status == "unassigned" for it in description.partitions)
            offsets = await client.groups.offsets(name)
            assert len(offsets) == 4 and all(it.offset >= 10 for it in offsets.values())
            assert [it.group for it in await client.groups.list()].count(name) == 1

    asyncio.run(asyncio.wait_for(run(), MAX))


async def committed(client: helix.Client, group: str) -> dict[int, int]:
    offsets = await client.groups.offsets(group)
    return {of.partition: it.offset for of, it in offsets.items()}


def test_commit_counts_only_records_that_were_taken(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await topic_with(client, name, 1, 10)
            async with client.group(name, name, auto_commit=None) as group:
                async for record in group:
                    if record.offset == 3:
                        await group.commit()
                        break
            assert await committed(client, name) == {0: 4}
            # The block ends without an error: the record that was taken counts.
            async with client.group(name, name) as group:
                async for record in group:
                    if record.offset == 6:
                        break
            assert await committed(client, name) == {0: 7}
            # An error: that record is read again.
            with pytest.raises(RuntimeError, match="crash"):
                async with client.group(name, name) as group:
                    async for record in group:
                        if record.offset == 8:
                            raise RuntimeError("crash")
            assert await committed(client, name) == {0: 8}
            with pytest.raises(RuntimeError, match="crash"):
                async with client.group(name, name) as group:
                    async for batch in group.batches():
                        assert batch.first_offset == 8
                        raise RuntimeError("crash")
            assert await committed(client, name) == {0: 8}
            async with client.group(name, name) as group:
                async for batch in group.batches():
                    break
            assert await committed(client, name) == {0: 10}

    asyncio.run(asyncio.wait_for(run(), MAX))


def test_seek_pause_and_calls_while_another_task_waits(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            topic_id = await topic_with(client, name, 2, 5)
            async with client.group(name, name, client_name="test") as group:
                read: list[tuple[int, int]] = []
                while len(read) < 10:
                    batch = await group.next_batch()
                    assert batch is not None
                    read += [(record.partition, record.offset) for record in batch]
                assert sorted(read) == [(it, at) for it in range(2) for at in range(5)]
                first = Partition(name, 0, topic_id)
                assert sorted(await group.assignment()) == [first, Partition(name, 1, topic_id)]
                assert await group.position(first) == 5
                waiting = asyncio.create_task(group.next_batch())
                await asyncio.sleep(0)
                await group.pause([first])
                await group.commit()
                described = await client.groups.describe(name, history=True)
                assert described.members[0].client_name == "test"
                assert described.members[0].member_id == group.member_id
                await group.resume([first])
                await group.seek(first, 3)
                batch = await waiting
                assert batch is not None
                assert [record.offset for record in batch] == [3, 4]
                await group.commit({first: 1})
                with pytest.raises(errors.GroupError) as failed:
                    await group.seek(Partition("other", 0, 1), 0)
                assert failed.value.reason == "PARTITION_NOT_OWNED"
                assert await group.unmatched_topics() == []
                with pytest.raises(errors.GroupError):
                    await client.groups.commit(name, {first: 2})
                await group.seek(first, 1)
            with pytest.raises(errors.ClosedError):
                await group.commit()
            assert await group.next_batch() is None
            await client.groups.commit(name, {first: 2})
            sought = await client.groups.seek(name, {first: 4}, by="a test")
            assert [(it.partition, it.before, it.after) for it in sought] == [(first, 2, 4)]
            undone = await client.groups.undo_seek(name)
            assert [(it.before, it.after) for it in undone] == [(4, 2)]
            reset = await client.groups.reset(name, name, "earliest", validate_only=True)
            assert len(reset) == 2
            await client.groups.delete(name)
            with pytest.raises(errors.NotFoundError):
                await client.groups.describe(name)

    asyncio.run(asyncio.wait_for(run(), MAX))


def test_lost_offset_is_an_error_of_its_partition(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            topic_id = await topic_with(client, name, 1, 5)
            await client.groups.commit(name, {Partition(name, 0, topic_id): 1})
            await client.topics.trim(name, 0, 3)
            async with client.group(name, name) as group:
                with pytest.raises(errors.OffsetOutOfRangeError) as failed:
                    await group.next_batch()
                assert (failed.value.topic, failed.value.partition) == (name, 0)
                await group.seek(Partition(name, 0, topic_id), 3)
                batch = await group.next_batch()
                assert batch is not None and batch.first_offset == 3

    asyncio.run(asyncio.wait_for(run(), MAX))
