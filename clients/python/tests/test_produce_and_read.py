"""Producers, reads and subscriptions of the asyncio client."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from cluster import Cluster

import helix
from helix import errors

MAX = 60.0  # seconds, for waits that end much earlier


def test_records_keep_key_headers_and_times(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name, partitions=3)
            at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
            async with client.producer(name, compression="lz4") as producer:
                ack = await producer.send(
                    "text", key="k", headers={"a": b"1", "b": b""}, event_time=at
                )
                assert ack.offset == 0 and ack.next_offset == 1 and not ack.duplicate
                assert ack.durability == "quorum-synced"
                other = await producer.send(bytearray(b"more"), key=memoryview(b"k"))
                assert (other.partition, other.offset) == (ack.partition, 1)
                assert (await producer.send(None, key="k")).offset == 2
            stream = client.consume(name, follow=False)
            first, second, tombstone = [record async for record in stream]
            assert (first.key, first.value, first.event_time) == (b"k", b"text", at)
            assert first.headers == [("a", b"1"), ("b", b"")]
            assert first.topic == name and first.partition == ack.partition
            assert abs(datetime.now(timezone.utc) - first.append_time) < timedelta(minutes=10)
            assert second.value == b"more" and second.event_time is None
            assert tombstone.value is None and tombstone.offset == 2
            assert list(stream.positions.values()) == [3]

    asyncio.run(run())


def test_posted_records_arrive_once_and_in_order(cluster: Cluster, name: str) -> None:
    count = 5000

    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name, partitions=4)
            # A small buffer, so that both ways of posting wait for capacity.
            async with client.producer(name, buffer_bytes=128 << 10) as producer:
                for number in range(count):
                    await producer.post(str(number), key=f"key {number % 20}")
                numbers = range(count, 2 * count)
                more = (helix.NewRecord(str(it), key=f"key {it % 20}") for it in numbers)
                assert await producer.post_many(more) == count
            values: dict[int, list[int]] = {}
            async for batch in client.consume(name, follow=False).batches():
                assert batch.offsets() == [record.offset for record in batch]
                read = values.setdefault(batch.partition, [])
                read += [int(value or b"") for value in batch.values()]
            assert sorted(sum(values.values(), [])) == list(range(2 * count))
            for read in values.values():
                for key in range(20):
                    of_key = [number for number in read if number % 20 == key]
                    assert of_key == sorted(of_key)

    asyncio.run(run())


def test_full_buffer_is_an_error_without_await(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)
            async with client.producer(name, buffer_bytes=64 << 10, linger=0.05) as producer:
                posted = 0
                with pytest.raises(errors.BufferFullError) as failed:
                    while True:
                        producer.post(b"x" * 1000)
                        posted += 1
                assert failed.value.retryable and not failed.value.may_have_applied
                await producer.flush()
                await producer.post(b"last")
            records = [record async for record in client.consume(name, follow=False)]
            assert len(records) == posted + 1

    asyncio.run(run())


def test_errors_of_posts_surface_at_flush(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            producer = client.producer(name)
            for _ in range(3):
                producer.post(b"lost")
            with pytest.raises(errors.NotFoundError) as failed:
                await producer.flush()
            error = failed.value
            assert error.reason == "TOPIC_NOT_FOUND" and error.failed_records == 3
            assert not error.may_have_applied and "topics.create" in error.hint
            await producer.flush()  # Reported once.
            with pytest.raises(errors.NotFoundError):
                await producer.send(b"lost")
            await producer.close()
            with pytest.raises(errors.ClosedError):
                producer.post(b"late")
            with pytest.raises(errors.ClosedError):
                await producer.send(b"late")
            # The error of the block is not hidden by one of the producer.
            with pytest.raises(KeyError):
                async with client.producer(name) as other:
                    other.post(b"lost")
                    raise KeyError

    asyncio.run(run())


def test_conditional_appends(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)
            producer = client.producer(name)
            ack = await producer.append([b"a", ("k", b"b")], partition=0, expected_offset=0)
            assert (ack.offset, ack.next_offset) == (0, 2)
            with pytest.raises(errors.ConditionFailedError) as failed:
                await producer.append([b"c"], partition=0, expected_offset=1)
            assert failed.value.next_offset == 2 and not failed.value.may_have_applied
            await client.topics.set_fencing_token(name, 0, "me")
            with pytest.raises(errors.ConditionFailedError) as failed:
                await producer.append([b"c"], partition=0, fencing_token="you")
            assert failed.value.reason == "FENCED"
            await producer.append([b"c"], partition=0, fencing_token="me")
            with pytest.raises(errors.ConditionFailedError):
                await client.topics.set_fencing_token(name, 0, "you", expected="other")
            await producer.close()

    asyncio.run(run())


def test_named_producer_fences_and_continues(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)
            first = client.producer(name, name=f"{name}-producer")
            await first.send(b"a")
            assert await first.next_sequence(0) == 1
            identity = await first.identity()
            assert identity is not None
            continued = client.producer(name, identity=identity)
            assert await continued.next_sequence(0) == 1
            second = client.producer(name, name=f"{name}-producer")
            await second.send(b"b")
            with pytest.raises(errors.ProducerFencedError):
                await first.send(b"c")

    asyncio.run(run())


def test_starts_and_ranges(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)
            before = datetime.now(timezone.utc) - timedelta(hours=1)
            async with client.producer(name) as producer:
                await producer.append([str(number) for number in range(10)], partition=0)

            async def read(start: object, **more: object) -> list[int]:
                stream = client.consume(name, start=start, follow=False, **more)  # type: ignore
                return [record.offset async for record in stream]

            assert await read("earliest") == list(range(10))
            assert await read("latest") == []
            assert await read(7) == [7, 8, 9]
            assert await read(-2) == [8, 9]
            assert await read({0: 9}) == [9]
            assert await read(before) == list(range(10))
            assert await read(3, until={0: 5}) == [3, 4]
            assert await read(helix.Committed(f"{name}-none")) == list(range(10))
            batch = await client.fetch(name, 0, 4)
            assert [record.offset for record in batch][:2] == [4, 5]
            assert (batch.next_offset, batch.high_watermark) == (10, 10)
            assert (len(batch), batch[-1].offset, batch[0].value) == (6, 9, b"4")
            with pytest.raises(IndexError):
                batch[6]
            assert len(await client.fetch(name, 0, "latest", wait=0.01)) == 0
            with pytest.raises(errors.OffsetOutOfRangeError) as failed:
                await client.fetch(name, 0, 99)
            assert failed.value.high_watermark == 10
            assert await client.topics.trim(name, 0, 2) == 2
            assert await read(0, clamp=True) == list(range(2, 10))
            for wrong in ("end", 1.5, True, 1 << 64, datetime(2026, 1, 1)):
                with pytest.raises(errors.InvalidArgumentError):
                    await read(wrong)

    asyncio.run(run())


def test_cancelled_reads_lose_nothing(cluster: Cluster, name: str) -> None:
    """Reads are cancelled at many moments while records arrive; every record is read once."""
    count = 300

    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)

            async def produce() -> None:
                async with client.producer(name, linger=0.0) as producer:
                    for number in range(count):
                        await producer.send(str(number))

            producing = asyncio.create_task(produce())
            stream, read, cancelled, wait = client.consume(name), [], 0, 0.0001
            while len(read) < count:
                try:
                    batch = await asyncio.wait_for(stream.next_batch(), wait)
                    assert batch is not None
                    read += [int(value or b"") for value in batch.values()]
                except asyncio.TimeoutError:
                    cancelled += 1
                wait = wait * 1.3 if wait < 0.01 else 0.0001
            await producing
            assert read == list(range(count)) and cancelled > 0
            await stream.close()
            assert await stream.next_batch() is None

    asyncio.run(asyncio.wait_for(run(), MAX))


def test_iteration_continues_within_a_batch(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)
            async with client.producer(name) as producer:
                await producer.append([b""] * 10, partition=0)
            stream, read = client.consume(name, follow=False), []
            async for record in stream:
                read.append(record.offset)
                if record.offset == 3:
                    break
            assert list(stream.positions.values()) == [4]
            read += [record.offset async for record in stream]
            assert read == list(range(10))

    asyncio.run(run())


def test_subscription_reports_its_events(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(cluster.addresses) as client:
            await client.topics.create(name)
            async with client.producer(name) as producer:
                await producer.send(b"a")
            async with client.consume(name) as stream:
                seen = 0
                async for event in stream.events():
                    if isinstance(event, helix.Batch):
                        seen += len(event)
                    if isinstance(event, helix.CaughtUp):
                        assert (event.partition.topic, event.high_watermark) == (name, 1)
                        break
                assert seen == 1

    asyncio.run(asyncio.wait_for(run(), MAX))


def test_topics_and_cluster(cluster: Cluster, name: str) -> None:
    async def run() -> None:
        async with helix.connect(",".join(cluster.addresses)) as client:
            config = helix.TopicConfig(retention_time=3600.5, cleanup="compact+delete")
            topic = await client.topics.create(name, partitions=2, config=config)
            assert topic.config.retention_time == 3600.5
            assert topic.config.cleanup == "compact+delete"
            assert await client.topics.get(name) == await client.topics.create(
                name, partitions=2, config=config
            )
            with pytest.raises(errors.AlreadyExistsError):
                await client.topics.create(name, partitions=3)
            changed = await client.topics.update(
                name, helix.TopicConfig(max_record_bytes=1000), ["max_record_bytes"]
            )
            assert changed.config.max_record_bytes == 1000
            assert len((await client.topics.add_partitions(name, 3)).partitions) == 3
            assert [it.name for it in await client.topics.list(name)].count(name) == 1
            offsets = await client.topics.offsets(name, "latest")
            assert sorted(offsets) == [0, 1, 2] and offsets[0].offset == 0
            with pytest.raises(errors.RejectedRecordsError) as failed:
                await client.producer(name).send(b"x" * 2000, key="k")
            assert failed.value.limit == 1000
            with pytest.raises(errors.TopicRecreatedError):
                await client.topics.delete(name, topic_id=topic.topic_id + 1000)
            await client.topics.delete(name)
            with pytest.raises(errors.NotFoundError):
                await client.topics.get(name)
            await client.cluster.wait_ready(MAX)
            described = await client.cluster.describe()
            assert [node.node_id for node in described.nodes] == [1, 2, 3]
            assert all(shard.leader_node_id for shard in described.shards)
            assert isinstance((await client.cluster.health()).healthy, bool)
            assert (await client.cluster.who_am_i()).token_id is None

    asyncio.run(run())
