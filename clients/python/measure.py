#!/usr/bin/env python3
"""Measures the client in one process: produce, consume, memory, import.

Usage: measure.py PATH_TO_HELIX. Starts one node with memory storage on this machine, which shares
its CPUs. Use a release build of both. The CPU time is that of this process alone, with all its
threads; it depends less on what else the machine does.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

RECORDS, PARTITIONS, VALUE = 500_000, 4, b"x" * 1024
ROUNDS = 2


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


class Measured:
    """Takes the times of a number of records."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def report(self, count: int) -> None:
        seconds = time.perf_counter() - self._began
        cpu = (time.process_time() - self._cpu_began) / count * 1e6
        print(f"{self._label:<20} {count / seconds:>9,.0f} records/s of 1 KiB, {cpu:.1f} us of CPU "
              "time a record", flush=True)


async def measure(address: str) -> None:
    import helix

    async with helix.connect(address) as client:
        for round in range(ROUNDS):
            topic = f"m{round}"
            await client.topics.create(topic, partitions=PARTITIONS)
            for label in ("post_many", "post"):
                count = RECORDS if label == "post_many" else RECORDS // 2
                measured = Measured(label)
                async with client.producer(topic) as producer:
                    if label == "post_many":
                        await producer.post_many(VALUE for _ in range(count))
                    else:
                        for _ in range(count):
                            await producer.post(VALUE)
                measured.report(count)
            total = RECORDS + RECORDS // 2
            measured, count = Measured("read record.value"), 0
            async for record in client.consume(topic, follow=False):
                count += len(record.value or b"") == 1024
            measured.report(count)
            assert count == total, count
            measured, count = Measured("read batch.values()"), 0
            async for batch in client.consume(topic, follow=False).batches():
                count += len(batch.values())
            measured.report(count)
            assert count == total, count
            await client.topics.delete(topic)
    print(f"{'highest resident':<20} {resident_mib():>9.1f} MiB")


def main(helix_program: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))
    os.environ["HELIX"] = helix_program
    from cluster import Cluster

    script = "import time; t = time.perf_counter(); import helix; print(time.perf_counter() - t)"
    times = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
        times.append(float(done.stdout) * 1000)
    print(f"{'import':<20} {min(times):>9.1f} ms, the slowest of 5 {max(times):.1f} ms")
    with Cluster(1, "--memory") as cluster:
        asyncio.run(measure(cluster.addresses[0]))


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
