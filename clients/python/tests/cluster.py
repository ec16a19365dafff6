"""A local cluster of real processes: `helix dev`."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

HELIX = os.environ.get(
    "HELIX", str(Path(__file__).resolve().parents[3] / "target" / "debug" / "helix")
)
START_MAX = 60.0  # seconds


def free_port(nodes: int) -> int:
    """Returns a port for `helix dev`: clients, and peers and the admin page at distances."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            for used in [port + at + node for at in (0, 100, 552) for node in range(nodes)]:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", used))
            return port
        except OSError:
            pass


class Cluster:
    """Starts nodes, and stops them at the end of the `with` block."""

    def __init__(self, nodes: int = 3, *options: str) -> None:
        self.nodes, self.port = nodes, free_port(nodes)
        self._options = options
        self._directory = tempfile.TemporaryDirectory()
        self.home = Path(self._directory.name)

    def __enter__(self) -> Cluster:
        words = ["--nodes", str(self.nodes), *self._options]
        if "--memory" not in words:
            words += ["--dir", str(self.home / "data")]
        self._log = open(self.home / "log", "wb")
        environment = dict(os.environ, XDG_CONFIG_HOME=str(self.home), HOME=str(self.home))
        self._process = subprocess.Popen(
            [HELIX, "dev", *words, "--port", str(self.port)],
            stdout=self._log, stderr=self._log, cwd=self.home, env=environment,
        )
        self.environment = environment
        try:
            self._wait_until_it_serves()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + START_MAX
        while b"ready" not in (log := (self.home / "log").read_bytes()).lower():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the cluster does not start: {log.decode()}")
            time.sleep(0.02)

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._directory.cleanup()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{self.port + node}" for node in range(self.nodes)]

    def dev(self, *words: str) -> None:
        """Runs a command of `helix dev`, such as kill or restart with a node id."""
        words = ("dev", *words, "--port", str(self.port))
        subprocess.run([HELIX, *words], check=True, timeout=60, stdout=subprocess.DEVNULL)

    def helix(self, *words: str) -> str:
        """Runs `helix` with the contexts of this cluster, and returns what it prints."""
        done = subprocess.run(
            [HELIX, *words], check=True, timeout=60, capture_output=True, text=True,
            env=self.environment,
        )
        return done.stdout
