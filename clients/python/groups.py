#!/usr/bin/env python3
"""Produces, and consumes in a group of three processes, while a leader is killed and restarted.

Usage: groups.py PATH_TO_HELIX. Needs grpcio-tools. Starts and stops a local cluster of its own.
"""
import multiprocessing
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import grpc

PROTOS = Path(__file__).resolve().parents[2] / "helix-proto" / "proto"
TOPIC, GROUP, PARTITIONS, MEMBERS, NODES = "orders", "billing", 12, 3, 3
BATCHES, BATCH_RECORDS = 300, 10
SESSION_SECONDS, TIME_MAX = 5, 50  # of a member, and of the whole run
SERVICES = ["produce_service", "consume_service", "topic_service", "group_service"]
log, rpc = SimpleNamespace(), SimpleNamespace()  # messages and services


def generate(directory):
    files = [str(path.relative_to(PROTOS)) for path in PROTOS.glob("helix/log/v1/*.proto")]
    outputs = [f"--python_out={directory}", f"--grpc_python_out={directory}"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    subprocess.run([*protoc, *outputs, *files], check=True)


def load(directory):
    sys.path.insert(0, directory)
    for name in ["types", *SERVICES]:
        for target, ending in ((log, "_pb2"), (rpc, "_pb2_grpc")):
            vars(target).update(vars(import_module(f"helix.log.v1.{name}{ending}")))


class Failed(Exception):
    """A call that a retry does not help, or that found no leader in time.

    The last argument says whether an attempt may have been applied.
    """


class Client:
    """Sends calls to the nodes that lead, and follows them as they move."""

    RETRIED = {"NOT_LEADER", "NO_LEADER", "DRAINING", "OUTCOME_UNKNOWN", "THROTTLED"}
    TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}

    def __init__(self, nodes):
        self.channels = {address: grpc.insecure_channel(address) for address in nodes}
        self.leaders = {}  # by group or partition
        self.sent = 0.0  # when the last attempt was sent

    def call(self, service, method, request, key=None, limit=20):
        """Repeats a call until it succeeds: with sequences and ids, a copy has no effect."""
        deadline, may_have_applied = time.monotonic() + limit, False
        while True:
            address = self.leaders.get(key) or random.choice(list(self.channels))
            stub = getattr(rpc, f"{service}Stub")(self.channels[address])
            try:
                self.leaders[key], self.sent = address, time.monotonic()
                return getattr(stub, method)(request, timeout=2)
            except grpc.RpcError as error:
                trailers = dict(error.trailing_metadata() or ())
                reason = trailers.get("helix-reason")  # Without one, the error is of this library.
                may_have_applied |= not reason or trailers["helix-may-have-applied"] == "true"
                is_retried = reason in self.RETRIED if reason else error.code() in self.TRANSIENT
                if not is_retried or time.monotonic() > deadline:
                    raise Failed(reason or error.code(), error.details(), may_have_applied) from None
                self.leaders[key] = trailers.get("helix-leader-endpoint")
                if not self.leaders[key]:
                    time.sleep(0.05)  # An election takes about a second.


def produce(client, before_batch):
    """Appends batches with sequences, and returns the values."""
    producer = client.call("ProduceService", "InitProducer", log.InitProducerRequest()).producer
    sequences, values = [0] * PARTITIONS, set()
    for batch in range(BATCHES):
        before_batch(batch)
        partition = batch % PARTITIONS
        written = [f"{batch}/{record}".encode() for record in range(BATCH_RECORDS)]
        records = log.RecordList(records=[log.Record(value=value) for value in written])
        request = log.AppendRequest(topic=TOPIC, partition=partition, batch=dict(records=records),
                                    producer=producer, first_sequence=sequences[partition])
        client.call("ProduceService", "Append", request, key=partition)
        sequences[partition] += len(written)
        values.update(written)
    return values


def consume(directory, nodes, results, stopped):
    """A member: sends heartbeats, reads what they assign, and commits what it has handled."""
    load(directory)
    member_id, client = str(uuid.uuid4()), Client(nodes)
    epoch, owned, positions, is_idle, commits, expires = 0, [], {}, False, 0, None

    def bounded(*call, **options):
        left = SESSION_SECONDS if expires is None else expires - time.monotonic()
        return client.call(*call, limit=max(left, 0), **options)

    while not stopped.is_set():
        beat = log.HeartbeatRequest(group=GROUP, member_id=member_id, member_epoch=epoch,
                                    topics=[TOPIC], owned=owned)
        beat.session_timeout.FromSeconds(SESSION_SECONDS)
        beat.max_wait.FromMilliseconds(200 if is_idle else 0)
        try:
            beat = bounded("GroupService", "Heartbeat", beat, key=GROUP)
        except Failed:  # Removed, or the session is over: join again.
            epoch, owned, positions, expires = 0, [], {}, None
            continue
        # The session counts from the sending of the attempt that was answered.
        expires = client.sent + SESSION_SECONDS
        # Everything handled is committed, so the next heartbeat releases what is not assigned.
        epoch, owned, is_idle = beat.member_epoch, list(beat.assigned), True
        positions = {it.partition: positions.get(it.partition) for it in owned}
        for partition in owned:
            if time.monotonic() >= expires:  # Another member may have the partitions.
                break
            number, at = partition.partition, positions[partition.partition]
            place = dict(topic=TOPIC, partition=number, topic_id=partition.topic_id)
            start = dict(committed_group=GROUP) if at is None else dict(offset=at)
            fetch = log.FetchRequest(partitions=[log.PartitionStart(**place, start=start)])
            commits += 1  # All copies of one commit have its number.
            commit = log.CommitOffsetsRequest(group=GROUP, member_id=member_id, member_epoch=epoch,
                                              sequence=commits)
            try:
                found = bounded("ConsumeService", "Fetch", fetch, key=number).partitions[0]
                if not found.records:
                    continue
                if time.monotonic() >= expires:
                    break
                is_idle = False
                results.put([record.record.value for record in found.records])
                commit.offsets.add(partition=partition, offset=found.next_offset)
                bounded("GroupService", "CommitOffsets", commit, key=GROUP)
            except Failed as failed:  # Another heartbeat first: these records may be read again.
                print("fetch or commit failed:", *failed.args)
                break
            positions[number] = found.next_offset
    with suppress(Failed):  # Without a leave, its session ends it.
        bounded("GroupService", "Leave", log.LeaveRequest(group=GROUP, member_id=member_id), GROUP)


def free_port():
    """Returns a port for `helix dev`: clients, and peers and the admin page at distances."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            for used in [port + at + node for at in (0, 100, 552) for node in range(NODES)]:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", used))
            return port
        except OSError:
            pass


def check_refusal(client):
    """A call that the service refuses says that it was not applied."""
    try:
        client.call("TopicService", "CreateTopic", log.CreateTopicRequest(name="no/name"))
    except Failed as failed:
        assert (failed.args[0], failed.args[2]) == ("INVALID_ARGUMENT", False), failed.args
    else:
        raise AssertionError("the name was taken")


def run(directory, dev, nodes, deadline):
    client, spawning = Client(nodes), multiprocessing.get_context("spawn")
    topic = log.CreateTopicRequest(name=TOPIC, partition_count=PARTITIONS)
    client.call("TopicService", "CreateTopic", topic)
    check_refusal(client)
    results, stopped, killed = spawning.Queue(), spawning.Event(), []
    arguments = (directory, nodes, results, stopped)
    process = lambda: spawning.Process(target=consume, args=arguments, daemon=True)
    members = [process() for _ in range(MEMBERS)]
    [member.start() for member in members]

    def before_batch(batch):
        if batch == BATCHES // 3:
            killed.append(str(nodes.index(client.leaders[0]) + 1))
            subprocess.run(dev("kill", *killed), check=True, timeout=20)
        elif batch == BATCHES * 2 // 3:
            subprocess.run(dev("restart", *killed), check=True, timeout=20)

    missing, copies = produce(client, before_batch), 0
    while missing:
        for value in results.get(timeout=max(deadline - time.monotonic(), 0.1)):
            copies += value not in missing
            missing.discard(value)
    shares = []
    while shares != [PARTITIONS // MEMBERS] * MEMBERS:
        assert time.monotonic() < deadline, f"partitions of the members: {shares}"
        describe = log.DescribeGroupRequest(group=GROUP)
        described = client.call("GroupService", "DescribeGroup", describe, key=GROUP)
        shares = [len(member.owned) for member in described.members]
    stopped.set()
    [member.join(10) for member in members]
    found = client.call("GroupService", "GetOffsets", log.GetOffsetsRequest(group=GROUP), GROUP)
    lag = sum(offset.lag for offset in found.offsets)
    assert lag == 0, f"{lag} records are not committed"
    print(f"{BATCHES * BATCH_RECORDS} records read by {MEMBERS} members, {copies} of them twice; "
          f"node {killed[0]} was killed and restarted")


def main(helix):
    port, deadline = free_port(), time.monotonic() + TIME_MAX
    dev = lambda *words: [helix, "dev", *words, "--port", str(port)]
    with tempfile.TemporaryDirectory() as directory:
        generate(directory)
        load(directory)
        cluster = subprocess.Popen(dev("--dir", f"{directory}/data"), stdout=subprocess.DEVNULL)
        try:
            run(directory, dev, [f"127.0.0.1:{port + node}" for node in range(NODES)], deadline)
        finally:
            cluster.terminate()
            cluster.wait(20)


if __name__ == "__main__":
    main(sys.argv[1])
