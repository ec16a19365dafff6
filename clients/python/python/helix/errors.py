"""Errors of the client. Every call raises `HelixError` or one of its subclasses.

Retries have already been made by then, until the request timeout has passed.
"""

from __future__ import annotations

from typing import Any


class HelixError(Exception):
    """A call that failed.

    Attributes:
        message: Description for people.
        reason: Reason of the service, such as "TOPIC_NOT_FOUND". None if the failure is of the
            network or of this library.
        code: gRPC code, such as "NotFound"; None for errors of this library.
        retryable: The same call may succeed later.
        may_have_applied: The service may have applied the call. False is a guarantee that it has
            not.
        hint: What to do. May be empty.
        topic, partition: Where it failed, if the error concerns one.
        next_offset: Offset that the partition assigns next, for a failed condition.
        next_sequence: Sequence that the partition expects next from the producer.
        log_start_offset, high_watermark: Readable range of the partition: start, exclusive end.
        fencing_token: Fencing token in force.
        limit: Limit that was exceeded, in the unit of the reason.
        retry_after: Seconds to wait before another attempt.
        member_epoch: Current epoch of the member of a group.
        member_ids: Members of the group that are in the way, at most ten.
        is_tls_failure: The TLS handshake failed, or the node requires TLS.
        failed_records: Posted records that failed since the last flush.
    """

    message: str = ""
    reason: str | None = None
    code: str | None = None
    retryable: bool = False
    may_have_applied: bool = False
    hint: str = ""
    topic: str | None = None
    partition: int | None = None
    next_offset: int | None = None
    next_sequence: int | None = None
    log_start_offset: int | None = None
    high_watermark: int | None = None
    fencing_token: str | None = None
    limit: int | None = None
    retry_after: float | None = None
    member_epoch: int | None = None
    member_ids: list[str]
    is_tls_failure: bool = False
    failed_records: int = 0

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.member_ids = []
        self.__dict__.update(fields)

    def __str__(self) -> str:
        head = self.reason or self.code
        text = f"{head}: {self.message}" if head else self.message
        if self.topic is not None and self.partition is not None:
            text += f" ({self.topic}/{self.partition})"
        if self.may_have_applied:
            text += " (may have been applied)"
        if self.hint:
            text += f"; try: {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes, as with multiprocessing.
        fields = {name: value for name, value in self.__dict__.items() if name != "message"}
        return _rebuilt, (type(self), self.message, fields)


def _rebuilt(kind: type[HelixError], message: str, fields: dict[str, Any]) -> HelixError:
    return kind(message, **fields)


class NotFoundError(HelixError):
    """A topic, partition, group, node or token does not exist."""


class AlreadyExistsError(HelixError):
    """A topic exists with other settings."""


class TopicRecreatedError(NotFoundError):
    """The topic was deleted and created again; offsets of the old one mean nothing in it."""


class OffsetOutOfRangeError(HelixError):
    """The offset is not readable, or the group has none: see `log_start_offset`."""


class ConditionFailedError(HelixError):
    """An expected offset or fencing token does not hold. Nothing was appended."""


class ProducerFencedError(HelixError):
    """Another producer of the same name has taken over, or the identity cannot continue."""


class InvalidArgumentError(HelixError, ValueError):
    """An argument is not valid. Nothing was sent, or the service refused it."""


class RejectedRecordsError(HelixError):
    """The service does not take these records: their size, form, codec or missing key."""


class CorruptDataError(HelixError):
    """Stored bytes are damaged, or are not records."""


class GroupError(HelixError):
    """The member was removed or does not own the partition, or members are in the way."""


class AuthenticationError(HelixError):
    """The service does not know the caller: no token, a wrong one, or an expired one."""


class PermissionDeniedError(HelixError):
    """The caller may not do this."""


class ClusterChangeError(HelixError):
    """A change of the cluster's members is not possible now."""


class UnavailableError(HelixError):
    """No node could serve the call in time: no leader, no connection, a full disk, draining."""


class TimedOutError(UnavailableError, TimeoutError):
    """The request timeout has passed."""


class ThrottledError(UnavailableError):
    """The service limits the caller: see `retry_after`."""


class OutcomeUnknownError(UnavailableError):
    """The node failed before it responded. Sending the record again may store it twice."""


class UnsupportedError(HelixError):
    """The cluster has an older version that does not know the call."""


class ServiceError(HelixError):
    """A failure inside the service."""


class ContextError(HelixError):
    """The contexts file of the command line cannot be used, or has no such context."""


class ClosedError(HelixError):
    """The client, producer or reader is closed."""


class BufferFullError(HelixError, BlockingIOError):
    """The producer's buffer is full; the record was not queued."""

class ForkedProcessError(HelixError):
    """A handle was made before a fork, and is used in the new process."""


# The class of each reason, and what a Python program can do about it.
_OF_REASON: dict[str, tuple[type[HelixError], str]] = {
    "NOT_LEADER": (UnavailableError, "call again; the leadership has moved"),
    "NO_LEADER": (UnavailableError, "client.cluster.health() names the nodes that are needed"),
    "DRAINING": (UnavailableError, "call again; other nodes take over"),
    "OUTCOME_UNKNOWN": (OutcomeUnknownError, "read the end of the partition before sending again"),
    "STORAGE_FAILED": (UnavailableError, "client.cluster.health() names the failed disk's node"),
    "TOPIC_NOT_FOUND": (NotFoundError, "create it with client.topics.create(name, partitions=N)"),
    "PARTITION_NOT_FOUND": (NotFoundError, "client.topics.get(name) has the partitions"),
    "TOPIC_ALREADY_EXISTS": (AlreadyExistsError, "use it, or change it with topics.update()"),
    "TOPIC_DELETED": (NotFoundError, "it is gone; a topic created again is another one"),
    "TOPIC_RECREATED": (TopicRecreatedError, 'read the new topic from "earliest"'),
    "OFFSET_OUT_OF_RANGE": (OffsetOutOfRangeError, 'start at "earliest", or pass clamp=True'),
    "EXPECTED_OFFSET_MISMATCH": (ConditionFailedError, "read up to next_offset, then decide again"),
    "FENCED": (ConditionFailedError, "stop: another writer holds the fencing token"),
    "PRODUCER_FENCED": (ProducerFencedError, "stop: another producer of this name has started"),
    "OUT_OF_ORDER_SEQUENCE": (ProducerFencedError, "make a new producer; see next_sequence"),
    "UNKNOWN_PRODUCER": (ProducerFencedError, "make a new producer"),
    "PRODUCER_NOT_OWNED": (PermissionDeniedError, "make a producer: each caller has its own"),
    "SEQUENCE_REUSED": (ProducerFencedError, "stop: two programs use one producer identity"),
    "KEY_REQUIRED": (RejectedRecordsError, "send a key: the topic is compacted by key"),
    "BATCH_TOO_LARGE": (RejectedRecordsError, "send fewer records in one batch: see limit"),
    "CORRUPT_BATCH": (RejectedRecordsError, "send it again; the bytes changed on the way"),
    "CORRUPT_LOG": (CorruptDataError, "look at client.cluster.health(); read after the offset"),
    "RECORD_TOO_LARGE": (RejectedRecordsError, "send a smaller record: see limit"),
    "EMPTY_BATCH": (RejectedRecordsError, "send at least one record"),
    "RECORD_COUNT_MISMATCH": (RejectedRecordsError, "report it: the client counted wrongly"),
    "UNSUPPORTED_COMPRESSION": (RejectedRecordsError, "use a compression that the topic allows"),
    "INVALID_ARGUMENT": (InvalidArgumentError, ""),
    "UNIMPLEMENTED": (UnsupportedError, "upgrade the cluster"),
    "UNDECODABLE_BATCH": (CorruptDataError, "pass skip_undecodable=True, or read after the offset"),
    "THROTTLED": (ThrottledError, "wait for retry_after seconds, or ask for a larger quota"),
    "DISK_FULL": (UnavailableError, "free disk space on the nodes, or lower the retention"),
    "STALE_MEMBER_EPOCH": (GroupError, "continue to read; the member joins again"),
    "GROUP_NOT_FOUND": (NotFoundError, "client.groups.list() has the groups"),
    "GROUP_NOT_EMPTY": (GroupError, "stop its members first: see member_ids"),
    "UNKNOWN_MEMBER": (GroupError, "continue to read; the member joins again"),
    "MEMBER_NAME_IN_USE": (GroupError, "stop: another process has taken over the static name"),
    "PARTITION_NOT_OWNED": (GroupError, "drop what was read of it; its new owner reads it again"),
    "NO_COMMITTED_OFFSET": (OffsetOutOfRangeError, "seek to an offset, or join with another start"),
    "STALE_COMMIT": (GroupError, "read the offsets again: a later change of them came first"),
    "GROUP_LIMIT_REACHED": (GroupError, "remove groups or members that are not needed"),
    "NODE_NOT_FOUND": (NotFoundError, "client.cluster.describe() has the nodes"),
    "MEMBERSHIP_CHANGE_IN_PROGRESS": (ClusterChangeError, "wait for the running change"),
    "NOT_ENOUGH_NODES": (ClusterChangeError, "add a node first"),
    "MEMBERSHIP_CHANGE_REFUSED": (ClusterChangeError, "look at client.cluster.health()"),
    "UNAUTHENTICATED": (AuthenticationError, "pass token= or token_file=, or renew the token"),
    "PERMISSION_DENIED": (PermissionDeniedError, "client.cluster.who_am_i() names the caller"),
    "TOKEN_NOT_FOUND": (NotFoundError, ""),
    "INTERNAL": (ServiceError, "look at the log of the node"),
}

# Classes and hints of errors without a reason, by their gRPC code.
_OF_CODE: dict[str, tuple[type[HelixError], str]] = {
    "DeadlineExceeded": (TimedOutError, "look at client.cluster.health(); raise request_timeout"),
    "Unavailable": (UnavailableError, "check the addresses, and that the nodes run"),
    "Cancelled": (UnavailableError, "call again"),
    "Unknown": (UnavailableError, "call again"),
    "InvalidArgument": (InvalidArgumentError, ""),
    "NotFound": (NotFoundError, ""),
    "Unauthenticated": (AuthenticationError, "pass token= or token_file="),
    "PermissionDenied": (PermissionDeniedError, ""),
    "Unimplemented": (UnsupportedError, "check the address: another service may listen there"),
}

# Classes and hints of errors of this library.
_OF_KIND: dict[str, tuple[type[HelixError], str]] = {
    "context": (ContextError, ""),
    "closed": (ClosedError, "make a new one from the client"),
    "forked": (ForkedProcessError, "connect in the new process, after the fork"),
    "buffer_full": (BufferFullError, "await producer.post(...), or producer.flush()"),
    "argument": (InvalidArgumentError, ""),
}


def from_fields(fields: dict[str, Any]) -> HelixError:
    """Makes the error of a failed call. The extension module calls it."""
    kind, message, reason = fields.pop("kind"), fields.pop("message"), fields["reason"]
    found = _OF_KIND.get(kind) or _OF_REASON.get(reason or "") or _OF_CODE.get(fields["code"] or "")
    error_class, hint = found or (ServiceError if reason else UnavailableError, "")
    if fields["is_tls_failure"]:
        hint = "check tls=Tls(...) and the certificates"
    fields["hint"] = fields["hint"] or hint
    return error_class(message, **fields)
