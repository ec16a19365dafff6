"""Event loops, threads, forks, signals, contexts, and the end of the process."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from cluster import Cluster

import helix
import helix.blocking
from helix import errors

MAX = 60.0


def run_script(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ, **environment),
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=MAX)
    assert process.returncode == 0 and not err, f"exit {process.returncode}: {err}"
    return out


def test_blocking_twin(cluster: Cluster, name: str) -> None:
    with helix.blocking.connect(cluster.addresses) as client:
        client.topics.create(name, partitions=2)
        with client.producer(name, buffer_bytes=64 << 10) as producer:
            assert producer.send(b"first", partition=0).offset == 0
            for number in range(1000):
                producer.post(str(number), key=str(number))
            assert producer.post_many([b"x"] * 1000) == 1000
        records = list(client.consume(name, follow=False))
        assert len(records) == 2001
        with client.group(name, [name]) as group:
            count = 0
            for batch in group.batches():
                count += len(batch)
                if count == 2001:
                    break
        assert sum(it.offset for it in client.groups.offsets(name).values()) == 2001
        assert client.cluster.describe().nodes
        with pytest.raises(errors.NotFoundError):
            client.topics.get("missing")


def test_threads_share_a_blocking_client(cluster: Cluster, name: str) -> None:
    with helix.blocking.connect(cluster.addresses) as client:
        client.topics.create(name, partitions=2)
        with client.producer(name, buffer_bytes=64 << 10) as producer:
            def post() -> None:
                for _ in range(500):
                    producer.post(b"x" * 500)
                    producer.send(b"y") if _ % 100 == 0 else None

            threads = [threading.Thread(target=post) for _ in range(4)]
            [thread.start() for thread in threads]
            [thread.join(MAX) for thread in threads]
        assert len(list(client.consume(name, follow=False))) == 4 * 505


def test_client_works_in_several_loops(cluster: Cluster, name: str) -> None:
    client = helix.connect(cluster.addresses)
    asyncio.run(client.topics.create(name))
    for _ in range(3):
        async def send() -> None:
            async with client.producer(name) as producer:
                await producer.send(b"x")
        asyncio.run(send())

    async def read() -> int:
        return len([record async for record in client.consume(name, follow=False)])

    assert asyncio.run(read()) == 3


def test_closed_loop_is_no_error(cluster: Cluster, name: str) -> None:
    """A read waits when its loop is closed; the records that come later wake no one."""
    loop = asyncio.new_event_loop()
    client = helix.connect(cluster.addresses)
    loop.run_until_complete(client.topics.create(name))
    stream = client.consume(name)
    orphan = stream.next_batch()

    async def begin() -> None:
        orphan.send(None)  # It waits for a future of the loop.

    loop.run_until_complete(begin())
    loop.close()

    async def send() -> None:
        async with client.producer(name) as producer:
            await producer.send(b"x")

    asyncio.run(send())
    orphan.close()


def test_use_after_fork_is_an_error(cluster: Cluster, name: str) -> None:
    script = """if True:
        import os, sys, gc
        import helix.blocking
        from helix import errors
        address, topic = sys.argv[1:]
        client = helix.blocking.connect(address)
        client.topics.create(topic)
        producer, stream = client.producer(topic), client.consume(topic)
        producer.send(b"parent")
        assert stream.next_batch()
        process = os.fork()
        if process == 0:
            for call in (lambda: client.topics.get(topic), lambda: producer.post(b"x"),
                         stream.next_batch, lambda: client.producer(topic)):
                try:
                    call()
                    os._exit(3)
                except errors.ForkedProcessError as error:
                    assert "connect" in error.hint
            del client, producer, stream, call
            gc.collect()
            with helix.blocking.connect(address) as client:
                with client.producer(topic) as producer:
                    producer.send(b"child")
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
        assert [it.value for it in stream.next_batch()] == [b"child"]
        producer.send(b"parent again")
        producer.close()
        print("done")
    """
    assert finished(run_script(script, cluster.addresses[0], name)) == "done\n"


def test_ctrl_c_ends_a_blocking_call(cluster: Cluster, name: str) -> None:
    script = """if True:
        import sys
        import helix.blocking
        address, topic = sys.argv[1:]
        with helix.blocking.connect(address) as client:
            client.topics.create(topic)
            stream = client.consume(topic)
            try:
                print("waits", flush=True)
                stream.next_batch()
            except KeyboardInterrupt:
                client.producer(topic).send(b"after")
                print(stream.next_batch()[0].value.decode())
    """
    process = run_script(script, cluster.addresses[0], name)
    assert process.stdout and process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    assert finished(process) == "after\n"


def test_process_ends_quietly_with_everything_open(cluster: Cluster, name: str) -> None:
    script = """if True:
        import asyncio, sys
        import helix
        address, topic = sys.argv[1:]
        async def run():
            client = helix.connect(address, token=lambda: None if False else "x")
            client = helix.connect(address)
            await client.topics.create(topic)
            producer = client.producer(topic)
            await producer.send(b"x")
            producer.post(b"y")
            stream = client.consume(topic)
            async for record in stream:
                break
            group = client.group(topic, topic)
            async for record in group:
                break
            waiting = asyncio.create_task(group.next_batch())
            other = asyncio.create_task(stream.next_batch())
            await asyncio.sleep(0.01)
            globals().update(locals())
        asyncio.run(run())
        print("done")
    """
    assert finished(run_script(script, cluster.addresses[0], name)) == "done\n"


def test_contexts_of_the_command_line(
    cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HELIX_ADDR", raising=False)
    cluster.environment = dict(os.environ)
    cluster.helix("context", "add", "mine", "--addr", ",".join(cluster.addresses), "--use")
    with helix.blocking.connect() as client:
        assert client.source == "context mine" and client.addresses == cluster.addresses
    with helix.blocking.connect(context="mine") as client:
        assert client.cluster.describe().nodes
    with pytest.raises(errors.ContextError) as failed:
        helix.connect(context="other")
    assert "mine" in failed.value.message and "helix context add" in failed.value.hint
    (tmp_path / "helix" / "config.toml").write_text("contexts = 1")
    with pytest.raises(errors.ContextError):
        helix.connect()
    monkeypatch.setenv("HELIX_ADDR", cluster.addresses[1])
    with helix.blocking.connect() as client:
        assert client.source == "HELIX_ADDR"


def test_wrong_settings_and_addresses_are_clear() -> None:
    for addresses in ("", [], "not an address", "http://x/path"):
        with pytest.raises(errors.InvalidArgumentError):
            helix.connect(addresses)
    with pytest.raises(errors.InvalidArgumentError):
        helix.connect("127.0.0.1:1", request_timeout=-1)
    with pytest.raises(errors.InvalidArgumentError):
        helix.connect("127.0.0.1:1", token="two words")
    client = helix.blocking.connect("127.0.0.1:1", request_timeout=0.2)
    began = time.monotonic()
    with pytest.raises(errors.UnavailableError) as failed:
        client.topics.list()
    assert time.monotonic() - began < MAX and failed.value.retryable
    wrong = ({"compression": "gzip"}, {"durability": "all"}, {"linger": -1.0}, {"buffer_bytes": -1})
    for settings in wrong:
        with pytest.raises(errors.InvalidArgumentError):
            client.producer("orders", **settings)  # type: ignore[arg-type]
    for number in (-1, 1 << 32, "0"):
        with pytest.raises(errors.InvalidArgumentError):
            client.producer("orders").post(b"", partition=number)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError):
            client.producer("orders").post_many([helix.NewRecord(b"", partition=number)])
    for value in (1, 1.5, object()):
        with pytest.raises(TypeError):
            client.producer("orders").post(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="time zone"):
        import datetime
        client.producer("orders").post(b"", event_time=datetime.datetime(2026, 1, 1))


def test_errors_know_every_reason_and_cross_processes() -> None:
    from helix import _helix

    reasons = _helix.error_reasons()
    assert set(reasons) == set(errors._OF_REASON)
    fields = dict.fromkeys(
        ["code", "hint", "topic", "partition", "next_offset", "reason"], None
    )
    for reason in [*reasons, None]:
        made = errors.from_fields(
            {**fields, "kind": "service", "message": "text", "reason": reason,
             "is_tls_failure": False, "code": "Internal", "retryable": True}
        )
        assert isinstance(made, errors.HelixError) and type(made).__doc__
        copy = pickle.loads(pickle.dumps(made))
        assert (type(copy), str(copy), copy.retryable) == (type(made), str(made), True)
