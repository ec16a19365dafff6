"""The client for programs without an event loop. The names are those of `helix`.

    with helix.blocking.connect("127.0.0.1:9092") as client:
        with client.producer("orders") as producer:
            ack = producer.send(b"...", key="k")
        for record in client.consume("orders", follow=False):
            print(record.offset, record.value)

A call that waits lets other threads run, and Ctrl-C ends it within a tenth of a second. Threads may
share a client and a producer.
"""

from ._client import Client, Cluster, Groups, Topics, connect
from ._group import GroupConsumer
from ._producer import Producer
from ._stream import RecordStream

__all__ = [
    "Client",
    "Cluster",
    "GroupConsumer",
    "Groups",
    "Producer",
    "RecordStream",
    "Topics",
    "connect",
]
