#!/usr/bin/env python3
"""Reads the largest batches of a topic with default settings through gRPC's default limits.

Usage: default_limits.py PATH_TO_HELIX. Needs grpcio-tools. Starts and stops a node of its own.
"""
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import groups
from groups import Client, Failed, free_port, generate, load, log, rpc

TOPIC, PARTITIONS = "limits", 24
BATCH_BYTES_MAX = 3 << 20  # max_batch_bytes of a topic with default settings
RECORD_BYTES_MAX = 1 << 20


def records_of(payload_bytes):
    """Returns records whose batch has exactly this many bytes of payload."""
    # A record's value has a tag and a length of three bytes, and so has the record in the batch.
    framing = 2 * (1 + 3)
    values, left = [], payload_bytes
    while left:
        value = min(left, 1_000_000) - framing
        values.append(b"x" * value)
        left -= value + framing
    return [log.Record(value=value) for value in values]


def append(client, partition, records):
    batch = dict(records=log.RecordList(records=records))
    request = log.AppendRequest(topic=TOPIC, partition=partition, batch=batch)
    return client.call("ProduceService", "Append", request, key=partition)


def starts(partitions):
    earliest = dict(named=log.NAMED_POSITION_EARLIEST)
    return [log.PartitionStart(topic=TOPIC, partition=it, start=earliest) for it in partitions]


def records_in(part):
    return len(part.records) + sum(stored.batch.record_count for stored in part.batches)


def fetch_all(client, partitions, accept_encoded):
    """Reads partitions to their ends in one call after the other, and counts the records."""
    positions, count = {it: 0 for it in partitions}, 0
    while True:
        wanted = [log.PartitionStart(topic=TOPIC, partition=it, start=dict(offset=at))
                  for it, at in positions.items()]
        request = log.FetchRequest(partitions=wanted, accept_encoded=accept_encoded)
        parts = client.call("ConsumeService", "Fetch", request).partitions
        found = sum(records_in(part) for part in parts)
        if not found:
            return count
        count += found
        positions.update((part.partition, part.next_offset) for part in parts)


def subscribe_all(client, partitions, accept_encoded, expected):
    """Reads this many records through a subscription, and returns how many there were."""
    stub = rpc.ConsumeServiceStub(next(iter(client.channels.values())))
    request = log.SubscribeRequest(partitions=starts(partitions), accept_encoded=accept_encoded)
    count = 0
    for message in stub.Subscribe(request, timeout=30):
        count += records_in(message.data)
        if count >= expected:
            return count


def check(client):
    topic = log.CreateTopicRequest(name=TOPIC, partition_count=PARTITIONS)
    client.call("TopicService", "CreateTopic", topic)
    largest = records_of(BATCH_BYTES_MAX)
    try:
        append(client, 0, records_of(BATCH_BYTES_MAX + 1))
        raise AssertionError("a batch over the limit was accepted: the test misses the boundary")
    except Failed as failed:
        assert failed.args[0] == "BATCH_TOO_LARGE", failed.args
    contents = {it: largest for it in range(PARTITIONS - 2)}
    contents[PARTITIONS - 2] = [log.Record(value=b"x" * (RECORD_BYTES_MAX - 4))]
    contents[PARTITIONS - 1] = [log.Record()] * 500_000
    for partition, records in contents.items():
        append(client, partition, records)
    expected = sum(map(len, contents.values()))
    for accept_encoded in (False, True):
        for partitions in ([0], list(contents)):
            wanted = sum(len(contents[it]) for it in partitions)
            count = fetch_all(client, partitions, accept_encoded)
            assert count == wanted, f"fetched {count} of {wanted} records"
        count = subscribe_all(client, list(contents), accept_encoded, expected)
        assert count == expected, f"{count} records in the subscription, not {expected}"
    print(f"{expected} records in batches of up to {BATCH_BYTES_MAX} bytes read by default clients")


def main(helix):
    groups.NODES = 1
    port = free_port()
    dev = [Path(helix).resolve(), "dev", "--nodes", "1", "--memory", "--port", str(port)]
    with tempfile.TemporaryDirectory() as directory:
        generate(directory)
        load(directory)
        node = subprocess.Popen(dev, stdout=subprocess.DEVNULL, cwd=directory)
        try:
            check(Client([f"127.0.0.1:{port}"]))
        finally:
            with suppress(ProcessLookupError):
                node.terminate()
            node.wait(20)


if __name__ == "__main__":
    main(sys.argv[1])
