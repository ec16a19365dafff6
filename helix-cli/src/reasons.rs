//! Texts of error and health reasons: meaning, cause and hints. Printed below errors and by
//! `helix explain`. `TOPIC` and `GROUP` stand for the topic and the group of the command.

use helix_proto::log::v1::{ErrorReason, HealthReason};

/// The texts of a reason.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReasonText {
    /// Meaning of the reason.
    pub(crate) meaning: &'static str,
    /// Likely cause.
    pub(crate) why: &'static str,
    /// Commands and actions to try, one per line.
    pub(crate) hint: &'static str,
}

fn text(meaning: &'static str, why: &'static str, hint: &'static str) -> ReasonText {
    ReasonText { meaning, why, hint }
}

/// Returns the hint of a reason for a command that reads in a group, or changes its offsets, if the
/// general one does not help there. A group's reader has no `--from`: its offsets are the group's.
pub(crate) fn group_hint(reason: ErrorReason) -> Option<&'static str> {
    use ErrorReason as R;
    match reason {
        R::TopicRecreated => Some(
            "helix topic describe TOPIC   shows the new topic\n\
             stop the members, then: helix group seek GROUP TOPIC --to earliest\n\
             helix consume TOPIC --group GROUP --start earliest   starts there",
        ),
        R::OffsetOutOfRange => Some(
            "helix group explain GROUP   shows the offset and what can be read\n\
             stop the members, then: helix group reset GROUP --to earliest --unreadable\n\
             helix consume TOPIC --group GROUP --start earliest   starts there; or latest",
        ),
        R::NoLeader => Some(
            "helix cluster health   names the nodes that are needed\n\
             helix group explain GROUP   shows what waits",
        ),
        R::OutcomeUnknown => Some("helix group history GROUP   shows what was applied"),
        R::UndecodableBatch => Some(
            "helix consume TOPIC --group GROUP --skip-undecodable   reads all other records\n\
             helix topic alter TOPIC --validate-records on   rejects such batches",
        ),
        R::CorruptLog => Some(
            "helix cluster health   with several nodes, the others rebuild the replica\n\
             stop the node, then: helix wal verify DIR   names file and bytes\n\
             a single node has no other replica: helix wal repair DIR   shows what a repair keeps",
        ),
        _ => None,
    }
}

/// Returns the texts of an error reason.
#[allow(clippy::too_many_lines)] // A table.
pub(crate) fn of(reason: ErrorReason) -> ReasonText {
    use ErrorReason as R;
    match reason {
        R::Unspecified => text(
            "the error has no reason that this program knows",
            "the server has a newer version than this program",
            "helix version",
        ),
        R::NotLeader => text(
            "the contacted node is not the leader of the partition's shard",
            "leadership moved while the command ran",
            "helix cluster shards\nhelix cluster health",
        ),
        R::NoLeader => text(
            "the shard has no leader",
            "an election is running, which takes about a second, or a majority of the shard's \
             replicas is down; a write that the last leader had received may still be applied",
            "helix cluster health   names the nodes that are needed\n\
             helix consume TOPIC --any-replica   reads committed records without a leader",
        ),
        R::Draining => text(
            "the node accepts no new requests",
            "it is shutting down or in maintenance; other nodes take over",
            "retry in a moment\nhelix cluster health",
        ),
        R::OutcomeUnknown => text(
            "the outcome of a write is unknown",
            "the contacted node failed before it could respond; the write may or may not have \
             been applied",
            "helix consume TOPIC --from -10   to look for the write\n\
             helix cluster health\n\
             helix produce TOPIC --producer NAME   can be resumed without doubles",
        ),
        R::StorageFailed => text(
            "a write to or sync of a node's disk failed",
            "after a failed sync the content of the disk is unknown, so the node stops; writes \
             in flight may or may not survive",
            "helix cluster health   names the node\n\
             check its log and its disk, then restart it",
        ),
        R::TopicNotFound => text(
            "the topic does not exist",
            "appends do not create topics, and names are case-sensitive",
            "helix topic list\nhelix topic create TOPIC",
        ),
        R::TopicRecreated => text(
            "the topic was deleted and created again",
            "the name belongs to a new topic; offsets and sequences of the old one mean nothing \
             in it",
            "helix topic describe TOPIC   shows the new topic\n\
             helix consume TOPIC --from earliest   reads it from its beginning",
        ),
        R::TopicDeleted => text(
            "the topic was deleted",
            "the call goes on with a topic that is gone, and no topic has its name",
            "helix topic list\nhelix topic create TOPIC   creates another topic of this name",
        ),
        R::PartitionNotFound => text(
            "the topic has no partition with this number",
            "it has fewer partitions; numbers start at 0",
            "helix topic describe TOPIC\nhelix topic add-partitions TOPIC --total N",
        ),
        R::TopicAlreadyExists => text(
            "the topic exists with other settings",
            "creating a topic again succeeds only with equal settings",
            "helix topic describe TOPIC\nhelix topic alter TOPIC ...",
        ),
        R::OffsetOutOfRange => text(
            "there is no record at this offset",
            "the offset is below the first available record, because retention or a trim deleted \
             it, or above the end",
            "helix offsets TOPIC\nhelix consume TOPIC --from earliest",
        ),
        R::ExpectedOffsetMismatch => text(
            "the next offset is not the expected offset of the append",
            "another writer appended first; nothing was written",
            "helix offsets TOPIC   shows the end\n\
             read the new records, then append again with the new expected offset",
        ),
        R::Fenced => text(
            "the fencing token of the append is not the partition's token",
            "a newer writer took over the partition by setting its own token",
            "stop this writer, or take over: helix topic fence --help",
        ),
        R::ProducerFenced => text(
            "a newer producer with the same name took over",
            "two producers have the same name, or one was restarted while the old one still runs",
            "stop this producer, or give concurrent producers different names",
        ),
        R::OutOfOrderSequence => text(
            "an earlier batch of this producer is missing",
            "an earlier batch was rejected or lost; later batches are not written, to keep the \
             order",
            "open the stream again and continue with the sequence number that it returns",
        ),
        R::UnknownProducer => text(
            "the partition has no state of this producer",
            "it was idle for so long that others replaced it, or its topic was created again",
            "get a new producer id with InitProducer; the Helix clients do so automatically",
        ),
        R::ProducerNotOwned => text(
            "the producer identity belongs to another principal",
            "the producer id was given to a caller with other credentials; its records are safe, \
             and nothing was written",
            "get an identity with these credentials from InitProducer; the Helix clients do so",
        ),
        R::SequenceReused => text(
            "the partition has another batch with this sequence",
            "two programs use one producer identity, or a retry sent other bytes than the first \
             attempt; nothing was written",
            "stop one of the programs, and let each call InitProducer; a retry must repeat the \
             same bytes",
        ),
        R::BatchTooLarge => text(
            "the batch is larger than the topic allows",
            "the limit is max_batch_bytes of the topic",
            "send smaller batches, or raise the limit: \
             helix topic alter TOPIC --max-batch-bytes 8MiB",
        ),
        R::CorruptBatch => text(
            "the batch does not match its checksum, or its content is not records",
            "it was damaged in transit, or the client builds batches differently",
            "retry; if that fails too, compare the client with docs/api.md, \"Batches\"\n\
             helix topic alter TOPIC --validate-records off   takes any content",
        ),
        R::UndecodableBatch => text(
            "the content of a batch is not records; nothing is damaged",
            "a producer wrote other bytes than records, to a topic that does not validate them",
            "helix consume TOPIC --skip-undecodable   reads all other records; also with --group, \
             and helix tail\n\
             helix topic alter TOPIC --validate-records on   rejects such batches\n\
             correct the producer; docs/clients.md has test vectors",
        ),
        R::CorruptLog => text(
            "stored bytes fail their checksum; damaged bytes are never served",
            "the disk lost or changed data",
            "helix consume TOPIC --any-replica   reads from another replica\n\
             helix cluster health   with several nodes, the others rebuild the replica\n\
             stop the node, then: helix wal verify DIR   names file and bytes\n\
             a single node has no other replica: helix wal repair DIR   shows what a repair keeps",
        ),
        R::RecordTooLarge => text(
            "a record is larger than the topic allows",
            "the limit is max_record_bytes of the topic",
            "send smaller records, or raise the limit: \
             helix topic alter TOPIC --max-record-bytes 4MiB",
        ),
        R::EmptyBatch => text(
            "the batch has no records",
            "an append needs at least one record",
            "do not send empty batches",
        ),
        R::KeyRequired => text(
            "a record has no key, but the topic is compacted by key",
            "compaction keeps the latest record of each key, and needs one in every record",
            "set a key in every record\nhelix topic alter TOPIC --cleanup delete",
        ),
        R::RecordCountMismatch => text(
            "record_count differs from the number of records in the payload",
            "the client counts differently, or the payload is not a RecordList",
            "compare the client with docs/api.md, \"Batches\"",
        ),
        R::UnsupportedCompression => text(
            "the topic or the service does not accept this compression",
            "the topic allows others, a node is older than compression, or it is not in the API",
            "use a compression that the message names\nhelix topic describe TOPIC",
        ),
        R::InvalidArgument => text(
            "a value is missing or out of range",
            "the message names the value and its limits",
            "run the command with --help",
        ),
        R::Unimplemented => text(
            "the server does not support this operation yet",
            "it is part of the API, but this version does not implement it",
            "helix version   to compare both versions",
        ),
        R::Throttled => text(
            "the node has too many requests in flight",
            "its memory limit is reached, or its disk is slower than its writers",
            "retry in a moment\nuse fewer writers or readers, or larger batches\n\
             helix config explain memory_limit",
        ),
        R::DiskFull => text(
            "the node's disk is full up to its reserve; appends are rejected, reads continue",
            "records are deleted only if a topic has a retention",
            "free some disk space; writes resume automatically\n\
             helix topic alter TOPIC --retention-bytes 1GiB\n\
             helix topic trim TOPIC --to POSITION",
        ),
        R::StaleMemberEpoch => text(
            "the group continued without this member",
            "the member was silent for too long, and its partitions were assigned to others",
            "join the group again",
        ),
        R::GroupNotFound => text(
            "the group does not exist",
            "a group exists from its first member or its first committed offset on",
            "helix group list",
        ),
        R::GroupNotEmpty => text(
            "the group still has members",
            "the operation requires a group without members, or without those of a gateway for \
             Kafka's clients",
            "stop the members first, or use another group\n\
             helix group describe GROUP   shows them and how long they have been silent",
        ),
        R::UnknownMember => text(
            "the member does not belong to the group",
            "it has left, or was silent for too long",
            "join the group again",
        ),
        R::StaleCommit => text(
            "the commit, seek or deletion is older than what the group has",
            "a later commit, a seek or a deletion of the group came first, so it changed nothing",
            "helix group history GROUP   shows what came first\n\
             read the group's offsets again, and commit only what is newer",
        ),
        R::MemberNameInUse => text(
            "another member of the group has this static name",
            "two processes use one name, or the last process ended without leaving the group",
            "give each process a name of its own\nlet a restarted process take over the name",
        ),
        R::PartitionNotOwned => text(
            "the group has given the partition to another member",
            "members joined or left, or this member was silent for too long",
            "stop reading the partition, and send a heartbeat",
        ),
        R::NoCommittedOffset => text(
            "the group has no committed offset for the partition",
            "no member has committed there yet, or the topic is new",
            "helix consume TOPIC --group GROUP --start earliest   or latest\n\
             helix group seek GROUP TOPIC --to POSITION",
        ),
        R::GroupLimitReached => text(
            "a limit of consumer groups is reached",
            "the group, or its shard, has too many members, partitions, groups or bytes",
            "see docs/limits.md, \"Consumer groups\"",
        ),
        R::NodeNotFound => text(
            "the cluster has no node with this id",
            "node ids are set with --node-id and start at 1",
            "helix cluster nodes",
        ),
        R::MembershipChangeInProgress => text(
            "another membership change is in progress",
            "only one change runs at a time, so that every majority is well defined",
            "retry when the other change is done\nhelix cluster health",
        ),
        R::MembershipChangeRefused => text(
            "a check before a membership change failed",
            "the message names it: the address does not answer, the node has data, or it is \
             another node than expected",
            "start the node with an empty data directory, --peer-addr, and --peer for each node\n\
             run the command with --dry-run   checks again and changes nothing",
        ),
        R::NotEnoughNodes => text(
            "too few nodes exist or answer",
            "a membership change needs a remaining majority, and a drain needs another node that \
             can lead",
            "helix cluster nodes   shows the nodes that answer\nhelix cluster health",
        ),
        R::Unauthenticated => text(
            "the cluster does not accept the credentials of this call",
            "neither a token nor a client certificate was sent, the token is malformed, unknown, \
             revoked or expired, or the certificate names no principal; the message states which",
            "helix whoami --token-file FILE\nask an administrator for a token: helix token create",
        ),
        R::PermissionDenied => text(
            "the rules do not allow this",
            "no rule of the principal allows the operation that the message names; it is denied \
             whether the resource exists or not",
            "helix whoami   shows the principal and its rules\n\
             ask an administrator for the right: helix acl allow",
        ),
        R::TokenNotFound => text(
            "the cluster has no token with this id",
            "it was revoked already, or the id is wrong",
            "helix token list",
        ),
        R::Internal => text(
            "the service violated one of its invariants",
            "this is a bug in Helix; acknowledged records are not affected",
            "report it, with the node's log of this time",
        ),
    }
}

/// Returns the texts of a health reason; None if the error reason of the same name has them.
pub(crate) fn of_health(reason: HealthReason) -> Option<ReasonText> {
    match reason {
        HealthReason::NodeDown => Some(text(
            "a node does not answer",
            "it is stopped, partitioned, or too busy to answer within two seconds",
            "helix cluster nodes   shows its address\n\
             check its process and its log; the other nodes continue while they are a majority",
        )),
        HealthReason::UnderReplicated => Some(text(
            "a shard has too few up-to-date replicas",
            "a node is down, or was restarted and is still catching up",
            "helix cluster shards   shows the lag of each replica\n\
             wait until it has caught up, or restart the node",
        )),
        HealthReason::Removed => Some(text(
            "the reporting node was removed from the cluster",
            "it was removed or replaced; the other nodes reject it",
            "stop its process; empty its data directory before adding it again",
        )),
        HealthReason::ClockSkew => Some(text(
            "the clock of a node is wrong",
            "its time synchronization does not work, the clock was set by hand, or it was wrong \
             when records were appended that now have a time in the future",
            "correct the clock of the named node, and check its time synchronization\n\
             records get the time of the majority meanwhile\n\
             append times never decrease: partitions with records of the future keep that time \
             until it has come",
        )),
        HealthReason::Certificate => Some(text(
            "a certificate of a node expires soon, has expired, or cannot be replaced",
            "it was not renewed, or its new files do not fit together or are for another node",
            "replace the files; the node reads them without a restart\n\
             helix cert node   makes a certificate",
        )),
        HealthReason::JwtKeys => Some(text(
            "the new keys that verify JWTs are not valid",
            "the new file of --jwt-jwks is not a JWKS, or has no usable key",
            "replace the file; the node reads it without a restart",
        )),
        HealthReason::Uncleanable => Some(text(
            "a partition cannot be compacted by key",
            "a segment is damaged, the disk is full, or a producer sent a batch that is no list of \
             records",
            "the message has the reason; remove it\n\
             the node retries; records are served, and old ones stay on its disk",
        )),
        HealthReason::NoCommit => Some(text(
            "a shard does not commit",
            "a majority of its replicas did not sync a probe in time: disks or the network are \
             slow or full, or nodes are down",
            "the message has the shard and its leader\n\
             helix cluster nodes   shows how long syncs take\n\
             helix cluster shards   shows the lag of each replica",
        )),
        HealthReason::MovesPaused => Some(text(
            "moves of replicas are paused",
            "an operator has run `helix cluster pause-moves`",
            "helix cluster resume-moves   resumes them; until then no replica is replaced or moved",
        )),
        HealthReason::Unspecified
        | HealthReason::NoLeader
        | HealthReason::DiskFull
        | HealthReason::StorageFailed
        | HealthReason::CorruptLog
        | HealthReason::Draining => None,
    }
}

/// Returns the texts of a failure without a response in time. The first hint is
/// `helix cluster health`; errors of that command omit it.
pub(crate) fn of_no_response() -> ReasonText {
    text(
        "no Helix node answered in time",
        "the address is wrong, no node runs there, or the network does not reach it",
        "helix cluster health   asks every node\n\
         helix dev   starts a local cluster\n\
         --addr HOST:PORT,... or HELIX_ADDR   selects another cluster",
    )
}

/// Returns the texts of a response that no Helix node of this version sends.
pub(crate) fn of_unknown_server() -> ReasonText {
    text(
        "the response is not from a Helix node of this version",
        "the server may be another service, or a Helix node of another version",
        "helix version",
    )
}
