#!/usr/bin/env python3
"""Calls a node over its Unix domain socket, as gRPC's C core does: with the path as authority.

Usage: unix_socket.py PATH_TO_HELIX. Needs grpcio-tools, and helix-server beside helix. Starts and
stops a node of its own.
"""
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import grpc
from groups import free_port, generate, load, log, rpc

TOPIC = "socket"


def check(target):
    with grpc.insecure_channel(target) as channel:
        produce = rpc.ProduceServiceStub(channel)
        batch = dict(records=log.RecordList(records=[log.Record(value=b"x")]))
        append = log.AppendRequest(topic=TOPIC, partition=0, batch=batch)
        # Several calls, so that later ones send the authority by its index.
        for _ in range(5):
            ack = produce.Append(append, timeout=30, wait_for_ready=True).ack
        return ack.next_offset


def main(helix):
    server = Path(helix).resolve().with_name("helix-server")
    with tempfile.TemporaryDirectory() as directory:
        generate(directory)
        load(directory)
        path = Path(directory) / "helix.sock"
        node = subprocess.Popen([
            server, "--node-id=1", f"--listen-addr=127.0.0.1:{free_port()}", "--admin-addr=off",
            f"--listen-socket=unix:{path}", f"--data-dir={directory}/data", f"--topic={TOPIC}:1",
        ], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            found = [check(f"unix:{path}"), check(f"unix://{path}")]
            assert found == [5, 10], found
            print("10 appends over a Unix domain socket by a default client")
        finally:
            with suppress(ProcessLookupError):
                node.terminate()
            node.wait(30)


if __name__ == "__main__":
    main(sys.argv[1])
