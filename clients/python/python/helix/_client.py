"""The client, and its control calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal

from ._group import GroupConsumer
from ._helix import Batch, NativeClient, NativeStream
from ._producer import Producer
from ._starts import Start, Starts, position
from ._stream import RecordStream
from .errors import InvalidArgumentError
from .types import (
    Caller,
    ClusterInfo,
    Compression,
    Durability,
    GroupDescription,
    GroupOffset,
    GroupSummary,
    Health,
    OffsetRange,
    Partition,
    SoughtOffset,
    Tls,
    Topic,
    TopicConfig,
)

_BLOCKING = False

Token = str | Callable[[], str | None]


def connect(
    addresses: str | Iterable[str] | None = None,
    *,
    context: str | None = None,
    token: Token | None = None,
    token_file: str | PathLike[str] | None = None,
    tls: Tls | None = None,
    rack: str | None = None,
    request_timeout: float | None = None,
    connect_timeout: float | None = None,
    connections_per_node: int | None = None,
) -> Client:
    """Returns a client of a cluster. It connects when it is first used, or entered.

    Without arguments it connects where `helix` does: to `HELIX_ADDR`, to the current context of
    the command line, or to 127.0.0.1:9092.

    Args:
        addresses: "host:port" of nodes to contact first, as a list or with commas; "unix:PATH" is
            the socket of a node on this machine.
        context: Name of a context of the command line.
        token: Token that each call carries, or a function that returns the current one at once.
            Default: that of the context, or `HELIX_TOKEN`, or the file in `HELIX_TOKEN_FILE`.
        token_file: File with the token; it is read again when it changes.
        tls: Files of TLS. Default: those of the context, or `HELIX_TLS_CA` and its siblings.
        rack: Rack of this client. Where any replica may serve a read, one on a node of this rack
            is preferred. Default: that of a named context, or `HELIX_CLIENT_RACK`, or that of
            the current context.
        request_timeout: Seconds for a call with all its retries. Default: 30.
        connect_timeout: Seconds for a connect. Default: 3.
        connections_per_node: Connections to each node. Default: 1.

    Raises:
        ContextError: The context is unknown, or a file cannot be used.
        InvalidArgumentError: An address, token or time is not valid.
    """
    if addresses is None:
        listed: list[str] = []
    elif isinstance(addresses, str):
        listed = [it.strip() for it in addresses.split(",") if it.strip()]
    else:
        listed = list(addresses)
    if addresses is not None and not listed:
        raise InvalidArgumentError("no address is given")
    settings = {
        "addresses": listed,
        "context": context,
        "token": token,
        "token_file": token_file,
        "ca_file": tls.ca_file if tls else None,
        "certificate_file": tls.certificate_file if tls else None,
        "key_file": tls.key_file if tls else None,
        "server_name": tls.server_name if tls else None,
        "rack": rack,
        "request_timeout": request_timeout,
        "connect_timeout": connect_timeout,
        "connections_per_node": connections_per_node,
        "blocking": _BLOCKING,
    }
    return Client(NativeClient(settings))


class Client:
    """A client of one cluster, from `connect`. Finds leaders, and repeats calls that are safe to
    repeat. Works in any event loop and thread; a process that was forked connects again."""

    def __init__(self, native: NativeClient) -> None:
        self._native = native
        self.topics = Topics(native)
        """Topics: create, change, delete."""
        self.groups = Groups(native)
        """Consumer groups: describe, seek, delete."""
        self.cluster = Cluster(native)
        """The cluster: health, nodes."""

    @property
    def addresses(self) -> list[str]:
        """Nodes to contact first."""
        return self._native.addresses

    @property
    def source(self) -> str:
        """Setting that the addresses come from, such as "context dev"."""
        return self._native.source

    async def __aenter__(self) -> Client:
        await self._native.check()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def producer(
        self,
        topic: str,
        *,
        name: str = "",
        idempotent: bool = True,
        identity: tuple[int, int] | None = None,
        durability: Durability | None = None,
        compression: Compression = "none",
        fencing_token: str | None = None,
        linger: float = 0.001,
        batch_bytes: int = 256 << 10,
        batch_records: int = 10_000,
        buffer_bytes: int = 8 << 20,
        stop_at_failure: bool = False,
    ) -> Producer:
        """Returns a producer of a topic.

        Args:
            topic: Name of the topic, which must exist.
            name: Stable name, up to 255 bytes: a later producer of the name fences this one.
            idempotent: Send sequences, so that a retry never stores a second copy.
            identity: Producer id and epoch of an earlier producer to continue.
            durability: What to wait for. Default: the topic's own default.
            compression: Compression of batches.
            fencing_token: Token that must be in force with every batch.
            linger: Seconds for which a batch waits for more records.
            batch_bytes: Bytes, before compression, at which a batch is sent.
            batch_records: Records at which a batch is sent.
            buffer_bytes: Bytes of records that are queued or in flight before calls wait. Counts
                256 bytes more for each record.
            stop_at_failure: Refuse everything after the first batch that failed.

        Raises:
            InvalidArgumentError: A setting is not valid.
        """
        settings = {
            "name": name,
            "idempotent": idempotent,
            "identity": identity,
            "durability": durability,
            "compression": compression,
            "fencing_token": fencing_token,
            "linger": linger,
            "batch_bytes": batch_bytes,
            "batch_records": batch_records,
            "buffer_bytes": buffer_bytes,
            "stop_at_failure": stop_at_failure,
        }
        _check_sizes(settings, "batch_bytes", "batch_records", "buffer_bytes")
        return Producer(self._native.producer(topic, settings), topic)

    def consume(
        self,
        topics: str | Iterable[str],
        *,
        start: Starts = "earliest",
        follow: bool = True,
        partitions: Iterable[int] | None = None,
        until: Mapping[int, int] | None = None,
        clamp: bool = False,
        any_replica: bool = False,
        preferred_node: int | None = None,
        new_partitions: bool = False,
        skip_undecodable: bool = False,
        restart_recreated: bool = False,
    ) -> RecordStream:
        """Returns the records of topics, without a group. The order is that of each partition.

        Args:
            topics: Name of a topic, or several.
            start: Start in each partition, or a start for each partition to read.
            follow: Wait for new records. Else the stream stops at the ends that the partitions have
                when it is opened.
            partitions: Partitions to read. Default: all.
            until: Exclusive end offset of each partition, instead of `follow`.
            clamp: Move a start that is not readable to the nearest offset that is.
            any_replica: Read from any replica, which may lag, also while there is no leader.
            preferred_node: Node id to prefer with `any_replica`.
            new_partitions: Also read partitions that are added later.
            skip_undecodable: Skip batches that are not records; `Batch.undecodable` lists them.
            restart_recreated: Read a topic that is deleted and created again from its beginning.

        Cancel safe, and the errors are those of the first call of the stream. They are final: open
        another stream at `positions`.
        """
        names = [topics] if isinstance(topics, str) else list(topics)
        settings = _read_settings(
            clamp, any_replica, preferred_node, new_partitions, skip_undecodable, restart_recreated
        )
        chosen = None if partitions is None else list(partitions)

        async def open_stream() -> NativeStream:
            rows: list[Any] = []
            for topic in names:
                rows += await self._start_rows(topic, start, chosen, until, follow)
            return self._native.subscribe(rows, settings)

        return RecordStream(open_stream)

    async def _start_rows(
        self,
        topic: str,
        start: Starts,
        partitions: list[int] | None,
        until: Mapping[int, int] | None,
        follow: bool,
    ) -> list[Any]:
        if isinstance(start, Mapping):
            starts = {partition: position(it) for partition, it in start.items()}
            if partitions is not None:
                raise InvalidArgumentError("state partitions= or a start for each, not both")
        else:
            if partitions is None:
                partitions = list(range(await self._native.partition_count(topic)))
            starts = dict.fromkeys(partitions, position(start))
        ends: dict[int, int] = dict(until or {})
        if not follow and until is None:
            latest = position("latest")
            resolved = await self._native.resolve_offsets(topic, 0, list(starts), latest)
            ends = {partition: offset for partition, offset, _, _ in resolved}
        return [(topic, it, at, ends.get(it), 0) for it, at in starts.items()]

    async def fetch(
        self,
        topic: str,
        partition: int,
        start: Start,
        *,
        max_records: int | None = None,
        max_bytes: int | None = 4 << 20,
        wait: float = 0.0,
        min_bytes: int = 1,
        topic_id: int = 0,
        clamp: bool = False,
        any_replica: bool = False,
    ) -> Batch:
        """Reads records of a partition once.

        Args:
            topic, partition: Partition to read.
            start: Start position.
            max_records, max_bytes: Limits, rounded up to a batch as stored.
            wait: Longest wait for `min_bytes`, in seconds.
            min_bytes: Bytes that end the wait.
            topic_id: Id that the topic must have; 0 is any.
            clamp: Move a start that is not readable to the nearest offset that is.
            any_replica: Read from any replica, which may lag.

        Raises:
            OffsetOutOfRangeError: The start is not readable.
        """
        settings = _read_settings(clamp, any_replica, None, False, False, False)
        batches = await self._native.fetch(
            [(topic, partition, position(start), None, topic_id)],
            settings,
            records_max=max_records,
            bytes_max=max_bytes,
            bytes_min=min_bytes,
            wait=wait,
        )
        return batches[0]

    def group(
        self,
        group: str,
        topics: str | Iterable[str],
        *,
        member_id: str | None = None,
        static_name: str | None = None,
        client_name: str | None = None,
        session_timeout: float = 30.0,
        release_timeout: float = 60.0,
        start: Literal["safe", "fail", "earliest", "latest"] = "safe",
        auto_commit: float | None = 5.0,
        buffer_bytes: int = 16 << 20,
    ) -> GroupConsumer:
        """Joins a consumer group in the background, and returns the member.

        Args:
            group: Name of the group.
            topics: Names of topics; `*` stands for any characters, also in topics to come.
            member_id: Id of the member, unique in the group. Default: random.
            static_name: Name with which partitions stay while a process restarts within the
                session timeout.
            client_name: Text that names the client to operators, up to 128 bytes.
            session_timeout: Seconds without a heartbeat after which the member is removed, 1 to
                600. Heartbeats do not depend on the program's calls.
            release_timeout: Seconds for which a revoked partition waits for the next call.
            start: Start where the group has no usable offset: "safe" is the first record where it
                has never committed, and an error where its offset is gone.
            auto_commit: Seconds between automatic commits of handled records; None for none.
            buffer_bytes: Bytes to read ahead.
        """
        settings = {
            "topics": [topics] if isinstance(topics, str) else list(topics),
            "member_id": member_id,
            "static_name": static_name,
            "client_name": client_name,
            "session_timeout": session_timeout,
            "release_timeout": release_timeout,
            "start": start,
            "auto_commit": auto_commit,
            "buffer_bytes": buffer_bytes,
        }
        _check_sizes(settings, "buffer_bytes")
        return GroupConsumer(self._native.group(group, settings), group)


def _check_sizes(settings: dict[str, Any], *names: str) -> None:
    for name in names:
        size = settings[name]
        if not isinstance(size, int) or not 0 <= size < 1 << 48:
            limit = "it must be a number from 0 to 2**48 - 1"
            raise InvalidArgumentError(f"{name} is {size!r}; {limit}")


def _read_settings(
    clamp: bool,
    any_replica: bool,
    preferred_node: int | None,
    new_partitions: bool,
    skip_undecodable: bool,
    restart_recreated: bool,
) -> dict[str, Any]:
    return {
        "clamp": clamp,
        "any_replica": any_replica,
        "preferred_node": preferred_node,
        "new_partitions": new_partitions,
        "skip_undecodable": skip_undecodable,
        "restart_recreated": restart_recreated,
    }


class Topics:
    """Topics of a cluster. Calls that change one fail with `TopicRecreatedError` if `topic_id` is
    given and the name belongs to another topic by then."""

    def __init__(self, native: NativeClient) -> None:
        self._native = native

    async def create(
        self,
        name: str,
        *,
        partitions: int = 1,
        replication_factor: int = 0,
        config: TopicConfig | None = None,
        validate_only: bool = False,
    ) -> Topic:
        """Creates a topic. Succeeds if it already exists with equal settings.

        Raises:
            AlreadyExistsError: It exists with other settings.
        """
        settings = dataclasses.asdict(config or TopicConfig())
        row = await self._native.create_topic(
            name, partitions, replication_factor, settings, validate_only
        )
        return Topic._of(row)

    async def get(self, name: str) -> Topic:
        """Returns a topic.

        Raises:
            NotFoundError: There is no topic of this name.
        """
        return Topic._of(await self._native.get_topic(name))

    async def list(self, prefix: str = "") -> list[Topic]:
        """Returns all topics whose names start with a prefix, by name."""
        return [Topic._of(it) for it in await self._native.list_topics(prefix)]

    async def update(
        self, name: str, config: TopicConfig, fields: Iterable[str], *, topic_id: int = 0
    ) -> Topic:
        """Changes the settings named in `fields`. A named setting that is None returns to the
        cluster's default."""
        settings, named = dataclasses.asdict(config), _listed(fields)
        return Topic._of(await self._native.update_topic(name, topic_id, settings, named))

    async def add_partitions(self, name: str, total: int, *, topic_id: int = 0) -> Topic:
        """Raises the number of partitions. Keys move to other partitions."""
        return Topic._of(await self._native.add_partitions(name, topic_id, total))

    async def delete(self, name: str, *, topic_id: int = 0) -> None:
        """Deletes a topic with its records."""
        await self._native.delete_topic(name, topic_id)

    async def trim(self, name: str, partition: int, offset: int, *, topic_id: int = 0) -> int:
        """Deletes the records of a partition below an offset. Returns the first that is left."""
        log_start_offset, _ = await self._native.trim(name, topic_id, partition, offset)
        return log_start_offset

    async def offsets(
        self,
        name: str,
        at: Start,
        *,
        partitions: Iterable[int] = (),
        topic_id: int = 0,
    ) -> dict[int, OffsetRange]:
        """Resolves a position to offsets, by partition. Without partitions: in all of them."""
        rows = await self._native.resolve_offsets(name, topic_id, _listed(partitions), position(at))
        return {row[0]: OffsetRange(*row) for row in rows}

    async def set_fencing_token(
        self, name: str, partition: int, token: str, *, expected: str | None = None
    ) -> None:
        """Sets the fencing token of a partition, up to 64 bytes; an empty one removes it.

        Raises:
            ConditionFailedError: Another token than `expected` is in force.
        """
        await self._native.set_fencing_token(name, partition, expected, token)


# Within a class that has a method `list`, the name is the method's.
_listed = list
_SoughtOffsets = list[SoughtOffset]


class Groups:
    """Consumer groups of a cluster."""

    def __init__(self, native: NativeClient) -> None:
        self._native = native

    async def list(self) -> list[GroupSummary]:
        """Returns all groups, by name, as some node knows them."""
        return [GroupSummary(**it) for it in await self._native.list_groups()]

    async def describe(self, group: str, *, history: bool = False) -> GroupDescription:
        """Returns members and partitions, and for each partition why no records arrive.

        Raises:
            NotFoundError: There is no such group.
        """
        return GroupDescription._of(await self._native.describe_group(group, history))

    async def offsets(self, group: str, topics: Iterable[str] = ()) -> dict[Partition, GroupOffset]:
        """Returns committed offsets with their lags; without topics: of all topics."""
        rows = await self._native.group_offsets(group, _listed(topics))
        offsets = [GroupOffset._of(it) for it in rows]
        return {it.partition: it for it in offsets}

    async def commit(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Commits offsets of a group without members.

        Raises:
            GroupError: The group has members.
        """
        rows = [(tuple(of), offset, "") for of, offset in offsets.items()]
        await self._native.commit_group_offsets(group, rows)

    async def seek(
        self,
        group: str,
        offsets: Mapping[Partition, int],
        *,
        by: str = "",
        validate_only: bool = False,
    ) -> _SoughtOffsets:
        """Sets offsets of a group without members. `undo_seek` takes it back.

        Raises:
            GroupError: The group has members.
        """
        rows = [(tuple(of), offset, "") for of, offset in offsets.items()]
        sought = await self._native.seek_group(group, rows, by, validate_only)
        return [SoughtOffset._of(it) for it in sought]

    async def reset(
        self,
        group: str,
        topic: str,
        to: Start,
        *,
        partitions: Iterable[int] = (),
        by: str = "",
        validate_only: bool = False,
    ) -> _SoughtOffsets:
        """Sets the offsets of a group without members to a position; without partitions: in all.

        Raises:
            GroupError: The group has members.
        """
        sought = await self._native.reset_group(
            group, topic, _listed(partitions), position(to), by, validate_only
        )
        return [SoughtOffset._of(it) for it in sought]

    async def undo_seek(
        self,
        group: str,
        topics: Iterable[str] = (),
        *,
        by: str = "",
        validate_only: bool = False,
    ) -> _SoughtOffsets:
        """Takes back the last seek of each partition; without topics: of all topics."""
        sought = await self._native.undo_group_seek(group, _listed(topics), by, validate_only)
        return [SoughtOffset._of(it) for it in sought]

    async def delete(self, group: str) -> None:
        """Deletes a group without members, with its offsets.

        Raises:
            GroupError: The group has members.
        """
        await self._native.delete_group(group)


class Cluster:
    """The cluster as a whole."""

    def __init__(self, native: NativeClient) -> None:
        self._native = native

    async def health(self) -> Health:
        """Returns the health of the cluster, with its problems."""
        return Health._of(await self._native.health())

    async def describe(self) -> ClusterInfo:
        """Returns nodes and shards."""
        return ClusterInfo._of(await self._native.describe_cluster())

    async def wait_ready(self, timeout: float = 30.0) -> None:
        """Waits until every shard has a leader, for at most `timeout` seconds.

        Raises:
            UnavailableError: The time has passed.
        """
        await self._native.wait_ready(timeout)

    async def who_am_i(self) -> Caller:
        """Returns the caller as the service sees it."""
        return Caller(**await self._native.who_am_i())
