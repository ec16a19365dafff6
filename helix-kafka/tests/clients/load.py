"""Loads for measurements.

load.py write BOOTSTRAP TOPIC SECONDS SIZE RECORDS IN_FLIGHT [idempotent]
                                 appends, and prints rate and latency
load.py idle BOOTSTRAP COUNT     opens connections, and holds them until standard input ends
"""

import json
import os
import socket
import struct
import sys
import time


def write(bootstrap, topic, seconds, size, records, in_flight, idempotent=None):
    """Appends batches for some time. Latency counts from the first record of a batch to its ack.

    The queue has space for the batches in flight, so a batch begins when an earlier one is acked.
    """
    import confluent_kafka

    seconds, size, records, in_flight = float(seconds), int(size), int(records), int(in_flight)
    latencies, errors = [], []
    producer = confluent_kafka.Producer({
        "bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": idempotent is not None,
        "max.in.flight.requests.per.connection": in_flight, "batch.num.messages": records,
        # A batch is full before.
        "linger.ms": 1000, "batch.size": 2 * records * size + 65536,
        "queue.buffering.max.messages": records * in_flight,
    })
    value = os.urandom(size)

    def acked(sent):
        def on_delivery(error, _):
            if error:
                errors.append(error)
            else:
                latencies.append((time.perf_counter() - sent, sent))
        return on_delivery

    def send(callback=None):
        while True:
            try:
                return producer.produce(topic, value=value, partition=0, on_delivery=callback)
            except BufferError:
                producer.poll(0.001)

    warm, began = 1.0, time.perf_counter()
    while time.perf_counter() < began + warm + seconds:
        # One callback a batch: its records are acked together. A batch has two records or more.
        send()
        sent = time.perf_counter()
        for _ in range(records - 2):
            send()
        send(acked(sent))
        producer.poll(0)
    left = producer.flush(30)
    if errors or left:
        raise SystemExit(f"{left} records left, errors {errors[:3]}")
    measured = sorted(time for time, sent in latencies if sent >= began + warm)
    if not measured:
        raise SystemExit("no batch was acked")
    print(json.dumps({
        "records_per_sec": len(measured) * records / seconds,
        "p50_us": measured[len(measured) // 2] * 1e6,
        "p99_us": measured[len(measured) * 99 // 100] * 1e6,
    }))


def idle(bootstrap, count):
    """Opens connections, each with one request, as clients do."""
    host, port = bootstrap.rsplit(":", 1)
    body = struct.pack(">hhih", 18, 0, 1, 2) + b"me"
    request = struct.pack(">i", len(body)) + body
    sockets = []
    for _ in range(int(count)):
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.sendall(request)
        sockets.append(connection)
    for connection in sockets:
        length = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))[0]
        connection.recv(length, socket.MSG_WAITALL)
    print(f"{len(sockets)} connections are open", flush=True)
    sys.stdin.read()


{"write": write, "idle": idle}[sys.argv[1]](*sys.argv[2:])
