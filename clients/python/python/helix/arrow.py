"""Batches as Arrow tables. Needs pyarrow: `pip install helix-log[arrow]`.

The columns of a batch are joined in Rust, with one copy for each column and no Python object for a
record. pyarrow then uses these buffers as they are.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from ._helix import Batch

SCHEMA = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("partition", pa.uint32(), nullable=False),
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("append_time", pa.timestamp("ns", tz="UTC")),
        pa.field("event_time", pa.timestamp("ns", tz="UTC")),
        pa.field("key", pa.large_binary()),
        pa.field("value", pa.large_binary()),
    ]
)
"""Columns of `record_batch`. Headers are not among them."""


def record_batch(batch: Batch) -> Any:
    """Returns a `pyarrow.RecordBatch` of the records, with the columns of `SCHEMA`."""
    if sys.byteorder != "little":
        raise NotImplementedError("only for processors with little-endian numbers")
    count, columns = len(batch), batch._columns()

    def times(buffers: tuple[bytes, bytes]) -> Any:
        kind = pa.timestamp("ns", tz="UTC")
        return pa.Array.from_buffers(kind, count, [pa.py_buffer(it) for it in buffers])

    def binary(buffers: tuple[bytes, bytes, bytes]) -> Any:
        kind = pa.large_binary()
        return pa.Array.from_buffers(kind, count, [pa.py_buffer(it) for it in buffers])

    indices = pa.nulls(count, pa.int32()).fill_null(0)
    topics = pa.DictionaryArray.from_arrays(indices, pa.array([batch.topic]))
    partitions = pa.nulls(count, pa.uint32()).fill_null(batch.partition)
    offsets = pa.Array.from_buffers(pa.uint64(), count, [None, pa.py_buffer(columns["offsets"])])
    arrays = [
        topics,
        partitions,
        offsets,
        times(columns["append_times"]),
        times(columns["event_times"]),
        binary(columns["keys"]),
        binary(columns["values"]),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
