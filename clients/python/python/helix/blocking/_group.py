# Written by blocking_twin.py from ../_group.py; do not edit.
"""Members of consumer groups."""

from __future__ import annotations

from collections.abc import Iterator, Iterable, Mapping
from types import TracebackType

from .._helix import Batch, BatchIterator, NativeGroup, Record
from ..types import Assigned, CaughtUp, Lost, Partition, Revoked

GroupEvent = Batch | Assigned | Revoked | Lost | CaughtUp
"""What a member of a group reports."""


class GroupConsumer:
    """A member of a consumer group. Iterate over it, over `batches()` or over `events()`.

    Records are delivered at least once. Asking for the next record or batch says that the last one
    is handled; only handled records are committed. When a `with` block ends without an error, the
    last ones count as handled; after an error the group reads the last record or batch again.

    An error that names a partition stops only that partition, until a `seek`: iterate again to
    continue with the others. Calls from other tasks are served
    while one task waits for records.
    """

    def __init__(self, native: NativeGroup, group: str) -> None:
        self._native = native
        self.group = group
        """Name of the group."""
        self._rest: BatchIterator | None = None
        # What was handled of the batch in hand: None for all of it.
        self._batch: Batch | None = None

    @property
    def member_id(self) -> str:
        """Id of this member."""
        return self._native.member_id

    def __enter__(self) -> GroupConsumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self._native.close(self._handled_before_error(), False)
        except Exception:
            # The error of the block is the one to report; what is not committed is read again.
            pass

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

    def events(self) -> Iterator[GroupEvent]:
        """Iterates over batches and changes of the assignment."""
        while (event := self.next_event()) is not None:
            yield event

    def next_batch(self) -> Batch | None:
        """Returns the next batch, or None after the end. Waits without a limit for records.

        Partitions that move to other members are committed, as automatic commits say, and released.
        """
        while (event := self.next_event()) is not None:
            if isinstance(event, Batch):
                return event
        return None

    def next_event(self) -> GroupEvent | None:
        """Returns the next event, or None after the end.

        Raises:
            OffsetOutOfRangeError, TopicRecreatedError, CorruptDataError: The partition that the
                error names is not read until a `seek`.
            HelixError: The join was refused, or an automatic commit failed permanently.
        """
        event = self._native.next_event()
        self._batch, self._rest = None, None
        if event is None:
            return None
        kind, *fields = event
        if kind == "data":
            batch: Batch = fields[0]
            self._batch = batch
            return batch
        if kind == "caught_up":
            topic, partition, topic_id, end = fields
            return CaughtUp(Partition(topic, partition, topic_id), end)
        partitions = [Partition(*it) for it in fields[0]]
        if kind == "assigned":
            return Assigned(partitions)
        return Revoked(partitions) if kind == "revoked" else Lost(partitions)

    def _handled(self) -> int | None:
        return None if self._rest is None else self._rest.position

    def _handled_before_error(self) -> int | None:
        if self._batch is None:
            return None
        return self._batch.first_offset if self._rest is None else self._rest.last_offset

    def commit(self, offsets: Mapping[Partition, int] | None = None) -> None:
        """Commits everything that was delivered, and waits until that is durable.

        Within a batch of which single records are taken, only those count that were taken.

        Args:
            offsets: Offsets to read next, to commit instead.

        Raises:
            GroupError: A partition was lost: other members read its records again.
            HelixError: What failed is part of the next commit, as long as the member owns the
                partition.
        """
        if offsets is not None:
            rows = [(tuple(of), offset, "") for of, offset in offsets.items()]
            self._native.commit_offsets(rows)
            return
        self._native.commit(self._handled())
        if self._rest is None:
            self._batch = None

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stops to read these partitions; they stay assigned.

        Raises:
            GroupError: The member does not own one of them; nothing is paused.
        """
        self._native.pause([tuple(it) for it in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Reads paused partitions again.

        Raises:
            GroupError: The member does not own one of them; nothing is resumed.
        """
        self._native.resume([tuple(it) for it in partitions])

    def seek(self, partition: Partition, offset: int) -> None:
        """Continues to read a partition at this offset. Commits nothing. Also restarts a partition
        that an error has stopped. What was taken of it and not committed counts as not handled.

        Raises:
            GroupError: The member does not own the partition.
        """
        self._native.seek(tuple(partition), offset)
        if self._batch is not None and Partition(*self._batch.topic_partition) == partition:
            self._batch, self._rest = None, None

    def assignment(self) -> list[Partition]:
        """Returns the partitions of this member."""
        return [Partition(*it) for it in self._native.assignment()]

    def position(self, partition: Partition) -> int | None:
        """Returns the offset after the last batch of a partition; None if it is not known."""
        return self._native.position(tuple(partition))

    def is_settled(self) -> bool:
        """Returns whether the member has its part of the group's current assignment."""
        settled, _, _ = self._native.state()
        return settled

    def unmatched_topics(self) -> list[str]:
        """Returns subscribed names and patterns that match no topic."""
        _, unmatched, _ = self._native.state()
        return unmatched

    def close(self) -> None:
        """Commits what is handled unless automatic commits are off, and leaves the group.

        The last record or batch counts as handled. A static member does not leave: its partitions
        wait for its next process until the session timeout.

        Raises:
            HelixError: The last commit failed, or the coordinator did not respond.
        """
        self._native.close(self._handled(), False)

    def leave(self) -> None:
        """Like `close`, but a static member leaves too."""
        self._native.close(self._handled(), True)
