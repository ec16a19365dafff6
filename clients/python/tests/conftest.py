"""One cluster of three nodes for all tests. Topics and groups have unique names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from cluster import Cluster

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as started:
        yield started


@pytest.fixture
def name() -> str:
    return f"t{next(_numbers)}"
