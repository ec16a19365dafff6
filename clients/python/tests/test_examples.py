"""The examples, as their first lines say."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster

import helix
import helix.blocking

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MAX = 60.0


def command(example: str, *words: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / example), *words]


@pytest.fixture(autouse=True)
def address(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIX_ADDR", ",".join(cluster.addresses))


def test_produce_csv_continues(cluster: Cluster, name: str, tmp_path: Path) -> None:
    rows = "\n".join(f"{number},row {number}" for number in range(1200))
    (tmp_path / "rows.csv").write_text(f"id,text\n{rows}\n")
    with helix.blocking.connect() as client:
        client.topics.create(name)
        for _ in range(2):
            words = command("produce_csv.py", str(tmp_path / "rows.csv"), name, "id")
            done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=MAX)
            assert done.stdout == "1200 rows are stored\n"
        records = list(client.consume(name, follow=False))
        assert [json.loads(it.value or b"")["id"] for it in records] == [
            str(number) for number in range(1200)
        ]
        assert records[7].key == b"7"


def test_group_worker_counts_once(cluster: Cluster, name: str, tmp_path: Path) -> None:
    database = tmp_path / "counts"
    words = command("group_worker.py", str(database), name, name)

    def count() -> int:
        if not database.exists():
            return 0
        with sqlite3.connect(database, timeout=MAX) as connection:
            try:
                return connection.execute("SELECT total(records) FROM counts").fetchone()[0]
            except sqlite3.OperationalError:
                return 0  # The worker has not made its tables.
            finally:
                connection.commit()

    def wait_for(records: int) -> None:
        deadline = time.monotonic() + MAX
        while count() < records:
            assert time.monotonic() < deadline, f"{count()} of {records} records"
            time.sleep(0.02)

    with helix.blocking.connect() as client:
        client.topics.create(name, partitions=2)
        with client.producer(name) as producer:
            for total in (200, 400, 600):
                producer.post_many((str(it % 10), b"x") for it in range(200))
                producer.flush()
                worker = subprocess.Popen(words, stdout=subprocess.DEVNULL)
                try:
                    wait_for(total)
                finally:
                    worker.kill() if total < 600 else worker.terminate()
                    status = worker.wait(MAX)
        assert status == 0, "a stop is no failure"
        assert count() == 600


def test_tail_to_arrow(cluster: Cluster, name: str) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    from helix.arrow import record_batch

    with helix.blocking.connect() as client:
        client.topics.create(name)
        with client.producer(name) as producer:
            producer.append([("k", b"v"), (None, b""), (b"t", None)], partition=0)
        batch = client.fetch(name, 0, 0)
        table = record_batch(batch)
        table.validate(full=True)
        columns = table.to_pydict()
        assert columns["key"] == [b"k", None, b"t"] and columns["value"] == [b"v", b"", None]
        assert columns["offset"] == [0, 1, 2] and columns["topic"] == [name] * 3
        assert [it.timestamp() for it in columns["append_time"]] == pytest.approx(
            [record.append_time.timestamp() for record in batch]
        )
    done = subprocess.run(
        command("tail_to_arrow.py", name, "3"), check=True, capture_output=True, text=True,
        timeout=MAX, env=dict(os.environ),
    )
    assert done.stdout.endswith("3 records in all\n"), done.stdout
