# Written by blocking_twin.py from ../_stream.py; do not edit.
"""Subscriptions."""

from __future__ import annotations

from collections.abc import Iterator, Callable
from types import TracebackType
from typing import Any

from .._helix import Batch, BatchIterator, NativeStream, Record
from ..types import CaughtUp, Heartbeat, Partition, Restarted

StreamEvent = Batch | CaughtUp | Heartbeat | Restarted
"""What a subscription reports."""


class RecordStream:
    """Records of a subscription. Iterate over it, over `batches()` or over `events()`.

    The next iteration continues where the last one stopped. Ends at the end of the range, or with
    an error. `positions` has the offset to read next of each
    partition that has delivered records.
    """

    def __init__(self, open_stream: Callable[[], Any]) -> None:
        # Starts with the first call: a start may have to be resolved first.
        self._open_stream = open_stream
        self._native: NativeStream | None = None
        self._rest: BatchIterator | None = None
        self._delivered: dict[Partition, int] = {}

    def __enter__(self) -> RecordStream:
        self._opened()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _opened(self) -> NativeStream:
        if self._native is None:
            native: NativeStream = self._open_stream()
            self._native = native
        return self._native

    @property
    def positions(self) -> dict[Partition, int]:
        """Offset to read next of each partition that has delivered records."""
        positions = dict(self._delivered)
        if self._batch is not None and self._rest is not None:
            positions[Partition(*self._batch.topic_partition)] = self._rest.position
        return positions

    _batch: Batch | None = None

    def _take(self, batch: Batch) -> None:
        self._delivered[Partition(*batch.topic_partition)] = batch.next_offset
        self._batch, self._rest = batch, None

    def __iter__(self) -> Iterator[Record]:
        return self._records()

    def _records(self) -> Iterator[Record]:
        while True:
            if self._rest is not None:
                for record in self._rest:
                    yield record
            batch = self.next_batch()
            if batch is None:
                return
            self._rest = iter(batch)

    def batches(self) -> Iterator[Batch]:
        """Iterates over batches with at least one record."""
        while (batch := self.next_batch()) is not None:
            if len(batch):
                yield batch

    def events(self) -> Iterator[StreamEvent]:
        """Iterates over batches and the other events of the subscription."""
        while (event := self.next_event()) is not None:
            yield event

    def next_batch(self) -> Batch | None:
        """Returns the next batch, or None at the end. Waits without a limit for records."""
        batch = (self._opened()).next_batch()
        if batch is not None:
            self._take(batch)
        return batch

    def next_event(self) -> StreamEvent | None:
        """Returns the next event, or None at the end."""
        event = (self._opened()).next_event()
        if event is None:
            return None
        kind, *fields = event
        if kind == "data":
            batch: Batch = fields[0]
            self._take(batch)
            return batch
        if kind == "caught_up":
            topic, partition, topic_id, end = fields
            return CaughtUp(Partition(topic, partition, topic_id), end)
        if kind == "heartbeat":
            return Heartbeat({Partition(*it): end for it, end in fields[0]})
        topic, partition, old_topic_id, topic_id = fields
        return Restarted(Partition(topic, partition, topic_id), old_topic_id)

    def close(self) -> None:
        """Ends the subscription."""
        if self._native is not None:
            self._native.close()
