"""TLS and tokens."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import HELIX, START_MAX, Cluster, free_port

import helix.blocking
from helix import Tls, errors


def test_tls(name: str) -> None:
    with Cluster(3, "--tls") as cluster:
        files = cluster.home / "data" / "tls"
        tls = Tls(
            str(files / "ca.pem"), str(files / "client-dev.pem"), str(files / "client-dev.key")
        )
        with helix.blocking.connect(cluster.addresses, tls=tls) as client:
            client.topics.create(name)
            with client.producer(name) as producer:
                producer.send(b"secret")
            assert [it.value for it in client.consume(name, follow=False)] == [b"secret"]
        client = helix.blocking.connect(cluster.addresses, request_timeout=1.0)
        with pytest.raises(errors.HelixError) as failed:
            client.topics.list()
        assert failed.value.is_tls_failure and "tls=" in failed.value.hint
        with pytest.raises(errors.ContextError):
            helix.blocking.connect(cluster.addresses, tls=Tls(tls.ca_file, tls.certificate_file))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A node that requires tokens, and the file of the first one."""
    port = free_port(1)
    server = str(Path(HELIX).with_name("helix-server"))
    log = open(tmp_path / "log", "wb")
    process = subprocess.Popen(
        [server, "--auth", "required", "--data-dir", str(tmp_path / "data"),
         "--listen-addr", f"127.0.0.1:{port}", "--admin-addr", "off"],
        stdout=log, stderr=log,
    )
    token_file, deadline = tmp_path / "data" / "admin-token", time.monotonic() + START_MAX
    try:
        while not token_file.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield f"127.0.0.1:{port}", token_file
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def test_tokens(node: tuple[str, Path], name: str) -> None:
    address, token_file = node
    with helix.blocking.connect(address, token_file=token_file) as admin:
        assert admin.cluster.who_am_i().principal == "admin"
        admin.topics.create(name)
        command = [HELIX, "token", "create", "reader", "--role", f"consumer:{name}",
                   "--addr", address, "--token-file", str(token_file)]
        made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        token = made.stdout.strip().splitlines()[-1]
        asked = []

        def supply() -> str:
            asked.append(1)
            return token

        for given in (token, supply):
            with helix.blocking.connect(address, token=given) as reader:
                assert reader.cluster.who_am_i().principal == "reader"
                assert list(reader.consume(name, follow=False)) == []
                with pytest.raises(errors.PermissionDeniedError) as denied:
                    reader.topics.create("other")
                assert denied.value.reason == "PERMISSION_DENIED"
                assert not denied.value.may_have_applied
        assert len(asked) >= 3
    for wrong in (None, "helix_0000000000000001_wrong", lambda: None):
        client = helix.blocking.connect(address, token=wrong)
        with pytest.raises(errors.AuthenticationError):
            client.topics.list()
