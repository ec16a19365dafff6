"""Values that calls take and return. Times are aware datetimes, durations seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

Durability = Literal["quorum-synced", "quorum-written", "leader-written", "none"]
"""What an ack means: durable on a majority, in the logs of a majority, in the leader's log, or
received. Without a choice, the topic's own default holds."""

Compression = Literal["none", "lz4", "zstd", "adaptive"]
"""Compression of batches. "adaptive" is LZ4 for batches that shrink by at least an eighth."""

Headers = dict[str, bytes] | list[tuple[str, bytes]] | tuple[tuple[str, bytes], ...]
"""Headers of a record, in order."""


class Partition(NamedTuple):
    """A partition of a topic. A topic that was created again has another id."""

    topic: str
    partition: int
    topic_id: int = 0


@dataclass(frozen=True)
class NewRecord:
    """A record to send.

    Attributes:
        value: Value; None is a tombstone, which deletes the key in a compacted topic.
        key: Key, which selects the partition.
        headers: Headers, in order.
        event_time: Time of the event, with a time zone.
        partition: Partition; None for that of the key, or for partitions in turn without a key.
    """

    value: bytes | str | None
    key: bytes | str | None = None
    headers: Headers = ()
    event_time: datetime | None = None
    partition: int | None = None


class Ack(NamedTuple):
    """Acknowledgement of a record or batch.

    `offset` is that of the first record, and `next_offset` that after the last one; None with the
    durabilities "leader-written" and "none". `durability` is what was reached. With `duplicate`,
    the batch had been stored before, and the offsets are those of the first copy.
    """

    partition: int
    offset: int | None
    next_offset: int | None
    durability: Durability | None
    duplicate: bool
    topic_id: int


@dataclass(frozen=True)
class Committed:
    """A start: the committed offset of a group, or the first record if it has none."""

    group: str


@dataclass(frozen=True)
class Tls:
    """Files of TLS, PEM. They are read again when they change.

    Attributes:
        ca_file: CAs that sign the certificates of the nodes.
        certificate_file: Certificate of the client with its intermediate certificates.
        key_file: Private key of the certificate.
        server_name: Name that the certificates of all nodes must have. Default: the host of the
            address.
    """

    ca_file: str
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


@dataclass(frozen=True)
class TopicConfig:
    """Settings of a topic. None is the cluster's default.

    Attributes:
        retention_time: Seconds for which records are kept.
        retention_bytes: Bytes of a partition that are kept.
        max_batch_bytes: Largest batch, before and after compression.
        max_record_bytes: Largest record.
        min_durability: Weakest durability that a producer gets.
        default_durability: Durability of producers that state none.
        allowed_compression: "any", "none", "lz4" or "zstd".
        validate_records: Check the records of compressed batches.
        cleanup: "delete", "compact" or "compact+delete".
        tombstone_retention_time: Seconds for which tombstones are kept after compaction.
        batch_format: "helix", "kafka" or "any".
    """

    retention_time: float | None = None
    retention_bytes: int | None = None
    max_batch_bytes: int | None = None
    max_record_bytes: int | None = None
    min_durability: Durability | None = None
    default_durability: Durability | None = None
    allowed_compression: str | None = None
    validate_records: bool | None = None
    cleanup: str | None = None
    tombstone_retention_time: float | None = None
    batch_format: str | None = None


@dataclass(frozen=True)
class PartitionInfo:
    """State of a partition. `leader_node_id` is None while it has no leader.

    Offsets and sizes (bytes) are None where the called node does not serve the partition's shard.
    """

    partition: int
    leader_node_id: int | None
    replicas: list[int]
    log_start_offset: int | None
    high_watermark: int | None
    shard_id: int
    live_bytes: int | None
    held_bytes: int | None
    fencing_token: str | None


@dataclass(frozen=True)
class Topic:
    """A topic."""

    name: str
    topic_id: int
    replication_factor: int
    partitions: list[PartitionInfo]
    config: TopicConfig

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Topic:
        row["partitions"] = [PartitionInfo(**it) for it in row["partitions"]]
        row["config"] = TopicConfig(**row["config"])
        return cls(**row)


@dataclass(frozen=True)
class OffsetRange:
    """A resolved offset, with the readable range of its partition."""

    partition: int
    offset: int
    log_start_offset: int
    high_watermark: int


@dataclass(frozen=True)
class HealthIssue:
    """A problem of the cluster. `needed_node_ids` are the nodes whose return helps."""

    reason: str
    message: str
    shard_id: int | None
    needed_node_ids: list[int]


@dataclass(frozen=True)
class Health:
    """Health of the cluster."""

    healthy: bool
    issues: list[HealthIssue]

    @classmethod
    def _of(cls, row: dict[str, Any]) -> Health:
        return cls(row["healthy"], [HealthIssue(**it) for it in row["issues"]])


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    node_id: int
    endpoint: str
    rack: str
    version: str
    draining: bool
    leaving: bool


@dataclass(frozen=True)
class Shard:
    """A shard: one Raft log. `leader_node_id` is None while it has no leader."""

    shard_id: int
    leader_node_id: int | None
    replicas: list[int]
    learners: list[int]


@dataclass(frozen=True)
class ClusterInfo:
    """Nodes and shards of the cluster."""

    cluster_id: str
    nodes: list[Node]
    shards: list[Shard]

    @classmethod
    def _of(cls, row: dict[str, Any]) -> ClusterInfo:
        nodes, shards = row["nodes"], row["shards"]
        return cls(row["cluster_id"], [Node(**it) for it in nodes], [Shard(**it) for it in shards])


@dataclass(frozen=True)
class Caller:
    """The caller as the service sees it."""

    principal: str
    token_id: str | None
    expires_at: datetime | None
    restricted: bool


@dataclass(frozen=True)
class GroupSummary:
    """A group in a list. `state` is "empty", "assigning", "reconciling" or "stable"."""

    group: str
    state: str
    member_count: int
    total_lag: int


@dataclass(frozen=True)
class GroupOffset:
    """A committed offset. `lag` is the number of records after it that can be read.

    `lag` and the offsets of the partition are None where the called node does not know them.
    """

    partition: Partition
    offset: int
    metadata: str
    high_watermark: int | None
    lag: int | None
    log_start_offset: int | None
    status: str
    committed_at: datetime | None

    @classmethod
    def _of(cls, row: dict[str, Any]) -> GroupOffset:
        row["partition"] = Partition(*row["partition"])
        return cls(**row)


@dataclass(frozen=True)
class OffsetChange:
    """A change of a committed offset: "commit", "seek" or "undo"."""

    kind: str
    by: str | None
    before: int | None
    after: int
    since: datetime | None
    until: datetime | None


@dataclass(frozen=True)
class GroupMember:
    """A member of a group. Times are seconds."""

    member_id: str
    static_name: str | None
    client_name: str | None
    topics: list[str]
    member_epoch: int
    session_timeout: float | None
    since_heartbeat: float | None
    owned: list[Partition]
    target: list[Partition]

    @classmethod
    def _of(cls, row: dict[str, Any]) -> GroupMember:
        row["owned"] = [Partition(*it) for it in row["owned"]]
        row["target"] = [Partition(*it) for it in row["target"]]
        return cls(**row)


@dataclass(frozen=True)
class GroupPartition:
    """A partition of a group, and why records flow or do not.

    `status` is "flowing", "no_new_records", "unassigned", "waiting_for_release", "owner_silent",
    "paused", "offset_out_of_range", "no_leader", "topic_deleted", "throttled" or
    "topic_recreated". `detail` explains it, and `waiting_for` names the member that others wait
    for.
    """

    partition: Partition
    owner: str | None
    target: str | None
    status: str
    detail: str | None
    waiting_for: str | None
    offset: GroupOffset | None
    history: list[OffsetChange] = field(default_factory=list)

    @classmethod
    def _of(cls, row: dict[str, Any]) -> GroupPartition:
        row["partition"] = Partition(*row["partition"])
        row["offset"] = GroupOffset._of(row["offset"]) if row["offset"] else None
        row["history"] = [OffsetChange(**it) for it in row["history"]]
        return cls(**row)


@dataclass(frozen=True)
class GroupDescription:
    """A group with its members and partitions."""

    group: str
    state: str
    group_epoch: int
    assignment_epoch: int
    shard_id: int
    coordinator_node_id: int
    members: list[GroupMember]
    partitions: list[GroupPartition]

    @classmethod
    def _of(cls, row: dict[str, Any]) -> GroupDescription:
        row["members"] = [GroupMember._of(it) for it in row["members"]]
        row["partitions"] = [GroupPartition._of(it) for it in row["partitions"]]
        return cls(**row)


@dataclass(frozen=True)
class SoughtOffset:
    """A committed offset that a seek has changed. None is no offset."""

    partition: Partition
    before: int | None
    after: int | None

    @classmethod
    def _of(cls, row: dict[str, Any]) -> SoughtOffset:
        return cls(Partition(*row["partition"]), row["before"], row["after"])


@dataclass(frozen=True)
class Assigned:
    """Partitions were assigned. The next call begins to read them, at the group's offsets unless
    `seek` has set others."""

    partitions: list[Partition]


@dataclass(frozen=True)
class Revoked:
    """Partitions move to other members. They can still be committed; the next call releases
    them."""

    partitions: list[Partition]


@dataclass(frozen=True)
class Lost:
    """Partitions were lost: other members may read them already, and commits of them fail. The
    member joins again automatically."""

    partitions: list[Partition]


@dataclass(frozen=True)
class CaughtUp:
    """All committed records of a partition have been delivered, up to `high_watermark`."""

    partition: Partition
    high_watermark: int


@dataclass(frozen=True)
class Heartbeat:
    """No new records. Has the ends of some partitions."""

    high_watermarks: dict[Partition, int]


@dataclass(frozen=True)
class Restarted:
    """A topic was deleted and created again; `partition` is read from its first record."""

    partition: Partition
    old_topic_id: int
