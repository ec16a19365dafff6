"""Python client of Helix, a replicated append-only log.

Asyncio first:

    async with helix.connect("127.0.0.1:9092") as client:
        async with client.producer("orders") as producer:
            ack = await producer.send(b"...", key="k")
        async for record in client.consume("orders", follow=False):
            print(record.offset, record.value)

`helix.blocking` has the same names for programs without an event loop.
"""

from ._client import Client, Cluster, Groups, Topics, connect
from ._group import GroupConsumer
from ._helix import Batch, Record
from ._producer import Producer
from ._stream import RecordStream
from .errors import HelixError
from .types import (
    Ack,
    Assigned,
    CaughtUp,
    Committed,
    Heartbeat,
    Lost,
    NewRecord,
    Partition,
    Restarted,
    Revoked,
    Tls,
    Topic,
    TopicConfig,
)

__all__ = [
    "Ack",
    "Assigned",
    "Batch",
    "CaughtUp",
    "Client",
    "Cluster",
    "Committed",
    "GroupConsumer",
    "Groups",
    "Heartbeat",
    "HelixError",
    "Lost",
    "NewRecord",
    "Partition",
    "Producer",
    "Record",
    "RecordStream",
    "Restarted",
    "Revoked",
    "Tls",
    "Topic",
    "TopicConfig",
    "Topics",
    "connect",
]
