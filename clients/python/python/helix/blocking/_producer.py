# Written by blocking_twin.py from ../_producer.py; do not edit.
"""Producers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from types import TracebackType

from .._helix import NativeProducer, Record
from ..types import Ack, Durability, Headers, NewRecord

Sendable = bytes | str | tuple[bytes | str | None, bytes | str | None] | NewRecord | Record
"""A record to send: a value, a tuple of key and value, a `NewRecord`, or a record that was read,
of which value, key, headers and event time are taken."""

# Records of one call into the extension module.
_LOT = 1000


class Producer:
    """Appends records to the partitions of a topic.

    A retry never stores a second copy, unless the producer is not idempotent. Records of a
    partition keep the order of the calls. Close it, or use it in a `with` block, so that nothing
    that was posted is lost when the process ends.
    """

    def __init__(self, native: NativeProducer, topic: str) -> None:
        self._native = native
        self.topic = topic
        """Name of the topic."""

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            # Queued records are still sent; their errors must not hide this one.
            self._native.close()

    def send(
        self,
        value: bytes | str | None = None,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        event_time: datetime | None = None,
        partition: int | None = None,
    ) -> Ack:
        """Sends a record and waits for its ack. Text is sent as UTF-8.

        Many calls at once share batches. If Ctrl-C ends the call before the record has a place
        in the buffer, it is not sent; afterwards it is sent all the same.

        Raises:
            HelixError: With `may_have_applied` the record may have been stored.
        """
        return Ack(*self._native.send(value, key, headers, event_time, partition))

    def post(
        self,
        value: bytes | str | None = None,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        event_time: datetime | None = None,
        partition: int | None = None,
    ) -> None:
        """Queues a record. Errors surface at `flush` or `close`.

        Waits for capacity in the buffer.
        """
        self._native.post(value, key, headers, event_time, partition)

    def post_many(self, records: Iterable[Sendable]) -> int:
        """Queues records, and waits for capacity as needed. Returns their number.

        Faster than single calls. If Ctrl-C ends the call, a part of the records is queued.
        """
        count = 0
        lot: list[Sendable] = []
        for record in records:
            lot.append(record)
            if len(lot) == _LOT:
                count += self._post_lot(lot)
                lot = []
        return count + self._post_lot(lot)

    def _post_lot(self, lot: list[Sendable]) -> int:
        posted = 0
        while posted < len(lot):
            added = self._native.post_many(lot, posted)
            posted += added
            if posted < len(lot):
                self._native.capacity()
        return posted

    def append(
        self,
        records: Iterable[Sendable],
        *,
        partition: int,
        expected_offset: int | None = None,
        fencing_token: str | None = None,
        durability: Durability | None = None,
    ) -> Ack:
        """Appends records to a partition as one batch: all or nothing.

        Args:
            records: Records of the batch; partitions that they name have no effect.
            partition: Partition.
            expected_offset: The append fails unless its first record gets this offset.
            fencing_token: The append fails unless this token is in force.
            durability: Durability to wait for. Default: that of the producer.

        Not ordered with records that were posted and not flushed. If Ctrl-C ends the call, the
        batch may or may not be stored.

        Raises:
            ConditionFailedError: A condition does not hold; `next_offset` or `fencing_token` has
                the actual value. Nothing was appended.
            HelixError: With `may_have_applied` the batch may have been stored.
        """
        result = self._native.append(
            list(records),
            partition,
            expected_offset=expected_offset,
            fencing_token=fencing_token,
            durability_name=durability,
        )
        return Ack(*result)

    def flush(self) -> None:
        """Waits until everything that was posted or sent before has an ack or an error.

        The request timeout bounds the wait for each batch. If Ctrl-C ends the call, the records
        are sent all the same.

        Raises:
            HelixError: The first error of a posted record since the last flush; `failed_records`
                is the number of them. Reported once.
        """
        self._native.flush()

    def close(self) -> None:
        """Flushes, and refuses more records.

        Raises:
            HelixError: As `flush`.
        """
        try:
            self._native.flush()
        finally:
            self._native.close()

    def identity(self) -> tuple[int, int] | None:
        """Returns producer id and epoch; None if the producer is not idempotent.

        A later producer can continue it: see `identity` of `Client.producer`.
        """
        return self._native.identity()

    def next_sequence(self, partition: int) -> int:
        """Returns how many records a partition has of this producer's identity. A producer that
        continues an earlier `identity` continues its input there."""
        return self._native.next_sequence(partition)
