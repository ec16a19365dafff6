"""Checks one Kafka client: what it writes is what it and Helix read, once and in order.

check.py LIBRARY BOOTSTRAP NAME SEED HELIX
"""

import asyncio
import json
import random
import subprocess
import sys
import time

LIBRARY, BOOTSTRAP, NAME, SEED, HELIX = sys.argv[1:6]
RECORDS = 400
PARTITIONS = 3
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
rng = random.Random(f"{NAME}-{SEED}")


def record(number):
    """A record whose value names it; keys, values and headers are also null and empty."""
    key = rng.choice([None, b"", b"k%d" % rng.randrange(20)])
    value = b"%d:" % number + rng.randbytes(rng.choice([0, 1, 100, 5000]))
    headers = [("h%d" % i, rng.randbytes(3)) for i in range(rng.randrange(3))]
    return key, value, headers


def expect(condition, what):
    if not condition:
        raise SystemExit(f"{NAME}: {what}")


def compare(sent, got, what):
    """Compares what was sent to each partition with what was read."""
    for partition in range(PARTITIONS):
        wanted, read = sent[partition], got[partition]
        expect(len(wanted) == len(read), f"{what}: partition {partition} has {len(read)} records, not {len(wanted)}")
        for index, (one, other) in enumerate(zip(wanted, read)):
            expect(one == other, f"{what}: record {index} of partition {partition} is {other!r}, not {one!r}")


class Confluent:
    """confluent-kafka, over librdkafka."""

    def __init__(self):
        import confluent_kafka
        import confluent_kafka.admin

        self.lib = confluent_kafka
        self.admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": BOOTSTRAP})
        print(f"{NAME}: confluent-kafka {confluent_kafka.version()[0]}, librdkafka {confluent_kafka.libversion()[0]}")

    def codecs(self):
        return CODECS

    def create(self, topic):
        new = self.lib.admin.NewTopic(topic, num_partitions=PARTITIONS, replication_factor=3)
        self.admin.create_topics([new])[topic].result(20)
        # Another gateway than the one that created it may answer.
        deadline = time.monotonic() + 20
        while topic not in self.admin.list_topics(timeout=20).topics:
            expect(time.monotonic() < deadline, "the new topic is not listed")
            time.sleep(0.05)

    def delete(self, topic):
        self.admin.delete_topics([topic])[topic].result(20)

    def produce(self, topic, codec, records):
        errors = []
        producer = self.lib.Producer({
            "bootstrap.servers": BOOTSTRAP, "enable.idempotence": True, "linger.ms": 5,
            "compression.codec": codec,
        })
        for partition, key, value, headers in records:
            producer.produce(
                topic, partition=partition, key=key, value=value, headers=headers,
                on_delivery=lambda error, _: errors.append(error) if error else None,
            )
            producer.poll(0)
        left = producer.flush(60)
        expect(left == 0 and not errors, f"{left} records left, errors {errors[:3]}")

    def consumer(self, group, **more):
        return self.lib.Consumer({
            "bootstrap.servers": BOOTSTRAP, "group.id": group, "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "session.timeout.ms": 6000, **more,
        })

    def read(self, topic, count):
        consumer = self.consumer(f"{topic}-reader")
        consumer.assign([self.lib.TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
        got = self.drain([consumer], count)
        low, high = consumer.get_watermark_offsets(self.lib.TopicPartition(topic, 0), timeout=20)
        expect((low, high) == (0, len(got[0])), f"watermarks {low}, {high}")
        consumer.close()
        return got

    def drain(self, consumers, count, commit=False):
        got, deadline = {p: [] for p in range(PARTITIONS)}, time.time() + 60
        while sum(map(len, got.values())) < count:
            expect(time.time() < deadline, f"only {sum(map(len, got.values()))} of {count} records came")
            for consumer in consumers:
                for message in consumer.consume(200, timeout=0.1):
                    expect(not message.error(), f"{message.error()}")
                    got[message.partition()].append(
                        (message.key(), message.value(), message.headers() or [])
                    )
                if commit and len(consumer.assignment()):
                    try:
                        consumer.commit(asynchronous=False)
                    except self.lib.KafkaException as error:
                        expect(error.args[0].code() == self.lib.KafkaError._NO_OFFSET, f"{error}")
        return got

    def group(self, topic, count, group):
        pair = [self.consumer(group), self.consumer(group)]
        for consumer in pair:
            consumer.subscribe([topic])
        deadline = time.time() + 60
        while not all(len(consumer.assignment()) for consumer in pair):
            expect(time.time() < deadline, "the group did not settle")
            for consumer in pair:
                # Only heartbeats and rebalances: partitions are paused as they come.
                if consumer.assignment():
                    consumer.pause(consumer.assignment())
                consumer.poll(0.1)
        for consumer in pair:
            parts = consumer.assignment()
            for part in parts:
                part.offset = 0
                consumer.seek(part)
            consumer.resume(parts)
        got = self.drain(pair, count, commit=True)
        for consumer in pair:
            consumer.close()
        return got

    def committed(self, topic, group):
        consumer = self.consumer(group)
        parts = [self.lib.TopicPartition(topic, p) for p in range(PARTITIONS)]
        offsets = [part.offset for part in consumer.committed(parts, timeout=20)]
        consumer.close()
        return offsets


class KafkaPython:
    """kafka-python, in pure Python."""

    PRODUCER = {"enable_idempotence": True}

    def __init__(self):
        import kafka
        import kafka.admin

        self.lib = kafka
        print(f"{NAME}: kafka-python {kafka.__version__}")

    def codecs(self):
        # The others need packages.
        return ["none", "gzip"]

    def admin(self):
        return self.lib.admin.KafkaAdminClient(bootstrap_servers=BOOTSTRAP.split(","))

    def create(self, topic):
        admin = self.admin()
        admin.create_topics([self.lib.admin.NewTopic(topic, PARTITIONS, 3)])
        admin.close()

    def delete(self, topic):
        admin = self.admin()
        admin.delete_topics([topic])
        admin.close()

    def produce(self, topic, codec, records):
        producer = self.lib.KafkaProducer(
            bootstrap_servers=BOOTSTRAP.split(","), acks="all", linger_ms=5, **self.PRODUCER,
            compression_type=None if codec == "none" else codec,
        )
        sent = [
            producer.send(topic, partition=partition, key=key, value=value, headers=headers)
            for partition, key, value, headers in records
        ]
        producer.flush(60)
        for one in sent:
            one.get(60)
        producer.close()

    def consumer(self, group):
        return self.lib.KafkaConsumer(
            bootstrap_servers=BOOTSTRAP.split(","), group_id=group, auto_offset_reset="earliest",
            enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=500,
        )

    def drain(self, consumers, count, commit=False):
        got, deadline = {p: [] for p in range(PARTITIONS)}, time.time() + 60
        while sum(map(len, got.values())) < count:
            expect(time.time() < deadline, f"only {sum(map(len, got.values()))} of {count} records came")
            for consumer in consumers:
                for part, messages in consumer.poll(100).items():
                    got[part.partition] += [(m.key, m.value, list(m.headers)) for m in messages]
                if commit and consumer.assignment():
                    consumer.commit()
        return got

    def read(self, topic, count):
        consumer = self.consumer(None)
        parts = [self.lib.TopicPartition(topic, p) for p in range(PARTITIONS)]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        got = self.drain([consumer], count)
        ends = consumer.end_offsets(parts)
        expect(all(ends[part] == len(got[part.partition]) for part in parts), f"ends {ends}")
        consumer.close()
        return got

    def group(self, topic, count, group):
        import threading

        pair, results, errors = [self.consumer(group), self.consumer(group)], [], []
        settled = threading.Barrier(2)

        def run(consumer):
            try:
                consumer.subscribe([topic])
                got, deadline = {p: [] for p in range(PARTITIONS)}, time.time() + 60
                results.append(got)
                while sum(sum(map(len, one.values())) for one in results) < count:
                    expect(time.time() < deadline, "the records of the group did not come")
                    for part, messages in consumer.poll(100).items():
                        got[part.partition] += [(m.key, m.value, list(m.headers)) for m in messages]
                    if consumer.assignment():
                        consumer.commit()
                settled.wait(60)
                consumer.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(consumer,)) for consumer in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(not errors, f"{errors}")
        return {p: [record for got in results for record in got[p]] for p in range(PARTITIONS)}

    def committed(self, topic, group):
        consumer = self.consumer(group)
        offsets = [consumer.committed(self.lib.TopicPartition(topic, p)) for p in range(PARTITIONS)]
        consumer.close()
        return [-1001 if offset is None else offset for offset in offsets]


class KafkaPythonOld(KafkaPython):
    """kafka-python of 2019: no flexible versions, no idempotence."""

    PRODUCER = {}


class Aiokafka:
    """aiokafka, for asyncio."""

    def __init__(self):
        import aiokafka
        import aiokafka.admin

        self.lib = aiokafka
        self.loop = asyncio.new_event_loop()
        print(f"{NAME}: aiokafka {aiokafka.__version__}")

    def codecs(self):
        return ["none", "gzip"]

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 90))

    async def with_admin(self, call):
        admin = self.lib.admin.AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
        await admin.start()
        try:
            return await call(admin)
        finally:
            await admin.close()

    def create(self, topic):
        new = self.lib.admin.NewTopic(topic, PARTITIONS, 3)
        self.run(self.with_admin(lambda admin: admin.create_topics([new])))

    def delete(self, topic):
        self.run(self.with_admin(lambda admin: admin.delete_topics([topic])))

    def produce(self, topic, codec, records):
        async def work():
            producer = self.lib.AIOKafkaProducer(
                bootstrap_servers=BOOTSTRAP, enable_idempotence=True, linger_ms=5,
                compression_type=None if codec == "none" else codec,
            )
            await producer.start()
            sent = [
                await producer.send(topic, partition=partition, key=key, value=value, headers=headers)
                for partition, key, value, headers in records
            ]
            for one in sent:
                await one
            await producer.stop()

        self.run(work())

    def consumer(self, *topics, group):
        return self.lib.AIOKafkaConsumer(
            *topics, bootstrap_servers=BOOTSTRAP, group_id=group, auto_offset_reset="earliest",
            enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=500,
        )

    async def drain(self, consumers, count, commit=False):
        got, deadline = {p: [] for p in range(PARTITIONS)}, time.time() + 60

        async def one(consumer):
            while sum(map(len, got.values())) < count:
                expect(time.time() < deadline, f"only {sum(map(len, got.values()))} of {count} records came")
                for part, messages in (await consumer.getmany(timeout_ms=100)).items():
                    got[part.partition] += [(m.key, m.value, list(m.headers)) for m in messages]
                if commit and consumer.assignment():
                    await consumer.commit()

        await asyncio.gather(*(one(consumer) for consumer in consumers))
        return got

    def read(self, topic, count):
        async def work():
            consumer = self.consumer(group=None)
            await consumer.start()
            parts = [self.lib.TopicPartition(topic, p) for p in range(PARTITIONS)]
            consumer.assign(parts)
            await consumer.seek_to_beginning(*parts)
            got = await self.drain([consumer], count)
            ends = await consumer.end_offsets(parts)
            expect(all(ends[part] == len(got[part.partition]) for part in parts), f"ends {ends}")
            await consumer.stop()
            return got

        return self.run(work())

    def group(self, topic, count, group):
        async def work():
            pair = [self.consumer(topic, group=group), self.consumer(topic, group=group)]
            await asyncio.gather(*(consumer.start() for consumer in pair))
            got = await self.drain(pair, count, commit=True)
            await asyncio.gather(*(consumer.stop() for consumer in pair))
            return got

        return self.run(work())

    def committed(self, topic, group):
        async def work():
            consumer = self.consumer(group=group)
            await consumer.start()
            offsets = [await consumer.committed(self.lib.TopicPartition(topic, p)) for p in range(PARTITIONS)]
            await consumer.stop()
            return [-1001 if offset is None else offset for offset in offsets]

        return self.run(work())


def helix_values(topic, count):
    """Reads a topic natively."""
    command = [HELIX, "consume", topic, "--from", "earliest", "--count", str(count), "--output", "json"]
    lines = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def main():
    client = {
        "confluent": Confluent, "kafka-python": KafkaPython, "kafka-python-old": KafkaPythonOld,
        "aiokafka": Aiokafka,
    }[LIBRARY]()
    started, topic = time.time(), f"check-{NAME}"
    client.create(topic)
    sent, number = {p: [] for p in range(PARTITIONS)}, 0
    for codec in client.codecs():
        records = []
        for _ in range(RECORDS // len(client.codecs())):
            key, value, headers = record(number)
            partition = rng.randrange(PARTITIONS)
            records.append((partition, key, value, headers))
            sent[partition].append((key, value, headers))
            number += 1
        client.produce(topic, codec, records)
    # Null values, and a large record.
    extra = [(0, b"k", None, []), (1, None, b"x" * 900_000, [])]
    client.produce(topic, "none", extra)
    for partition, key, value, headers in extra:
        sent[partition].append((key, value, headers))
        number += 1
    compare(sent, client.read(topic, number), "read")
    compare(sent, client.group(topic, number, f"{topic}-group"), "group")
    committed = client.committed(topic, f"{topic}-group")
    ends = [len(sent[p]) for p in range(PARTITIONS)]
    expect(all(offset <= end for offset, end in zip(committed, ends)), f"committed {committed} of {ends}")
    described = subprocess.run(
        [HELIX, "group", "describe", f"{topic}-group", "--output", "json"],
        capture_output=True, timeout=30, check=True,
    ).stdout
    expect(topic.encode() in described, f"helix group describe shows {described[:300]!r}")
    client.delete(topic)
    print(f"{NAME}: ok, {number} records in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
