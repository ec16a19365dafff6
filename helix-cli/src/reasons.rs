//! What each reason of an error means, why it comes up, and what to do: one text for each, printed
//! below an error and by `helix explain`. Only texts. `TOPIC` in one stands for the topic at hand.

use helix_proto::log::v1::{ErrorReason, HealthReason};

/// The text of a reason.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text {
    /// What it says.
    pub(crate) meaning: &'static str,
    /// Why it may be.
    pub(crate) why: &'static str,
    /// What to do: commands, and what else helps.
    pub(crate) hint: &'static str,
}

fn text(meaning: &'static str, why: &'static str, hint: &'static str) -> Text {
    Text { meaning, why, hint }
}

/// The text of an error's reason.
#[allow(clippy::too_many_lines)] // A table.
pub(crate) fn of(reason: ErrorReason) -> Text {
    use ErrorReason as R;
    match reason {
        R::Unspecified => text(
            "the service gave no reason that this program knows",
            "the server is of a later version than this program",
            "helix version",
        ),
        R::NotLeader => text(
            "the node that was asked does not lead the partition's shard",
            "leadership moved while the command ran",
            "helix cluster shards\nhelix cluster health",
        ),
        R::NoLeader => text(
            "nobody leads the shard",
            "an election is under way, which takes about a second, or a majority of the shard's \
             replicas is down",
            "helix cluster health   says which nodes are needed\n\
             the same command again in a moment\n\
             helix consume TOPIC --any-replica   reads what a node knows to be committed",
        ),
        R::Draining => text(
            "the node takes no new calls",
            "it shuts down or is being maintained; the other nodes take over",
            "the same command again in a moment\nhelix cluster health",
        ),
        R::OutcomeUnknown => text(
            "a write was under way and its outcome is not known",
            "the node that took it was lost before it could answer; the write may be there or not",
            "helix consume TOPIC --from -10   to see whether it is there\n\
             helix cluster health\n\
             a producer with an identity sends it again without making a second copy",
        ),
        R::StorageFailed => text(
            "a write or sync of a node's disk failed",
            "after a failed sync nobody knows what is on the disk, so the node stops, to be safe; \
             what was under way may survive or not",
            "helix cluster health   says which node\n\
             look at its log and its disk, then start it again",
        ),
        R::TopicNotFound => text(
            "there is no topic of this name",
            "topics are not made by writing to them, and names are case-sensitive",
            "helix topic list\nhelix topic create TOPIC",
        ),
        R::PartitionNotFound => text(
            "the topic has no partition of this number",
            "it has fewer partitions; they count from 0",
            "helix topic describe TOPIC\nhelix topic add-partitions TOPIC --total N",
        ),
        R::TopicAlreadyExists => text(
            "a topic of this name exists with other settings",
            "making a topic again succeeds only with equal settings",
            "helix topic describe TOPIC\nhelix topic alter TOPIC ...",
        ),
        R::OffsetOutOfRange => text(
            "there is no record at this offset",
            "the offset is below the first one kept, since retention or a trim has dropped it, or \
             above the end",
            "helix offsets TOPIC\nhelix consume TOPIC --from earliest",
        ),
        R::ExpectedOffsetMismatch => text(
            "the batch was to be written at one offset and would have got another",
            "another writer was there first; nothing was written",
            "helix offsets TOPIC   shows the end\n\
             read what was written meanwhile, decide anew, and append with the new offset",
        ),
        R::Fenced => text(
            "the fencing token of the writer is not the partition's",
            "a newer writer has taken the partition over by setting its own token",
            "stop this writer, or take over: helix topic fence --help",
        ),
        R::ProducerFenced => text(
            "a newer producer of the same name has taken over",
            "two producers have the same name, or one was started again while the old one lives",
            "stop this producer; two that are to write at the same time need two names",
        ),
        R::OutOfOrderSequence => text(
            "a batch of this producer is missing before this one",
            "a batch before it was refused or lost, and order is kept: nothing after it is written",
            "open the stream again: it says which sequence is next, and go on from there",
        ),
        R::UnknownProducer => text(
            "the partition has no memory of this producer",
            "it was silent for so long that others have taken its place, or its topic was made \
             anew",
            "begin with a new identity (InitProducer); Helix's own clients do so",
        ),
        R::BatchTooLarge => text(
            "the batch is larger than the topic allows",
            "the limit is the topic's max_batch_bytes",
            "smaller batches, or a larger limit: helix topic alter TOPIC --max-batch-bytes 8MiB",
        ),
        R::CorruptBatch => text(
            "the batch is not what its checksum says",
            "it was damaged on its way, or the client computes the checksum in another way",
            "send it again; if that fails too, compare the client with docs/api.md, \"Batches\"",
        ),
        R::CorruptLog => text(
            "stored bytes fail their checksum, or are no records; damaged bytes are never served",
            "the disk has lost or changed what was written; or, as the message then says, a\n\
             producer wrote what is not a record",
            "begin behind what is no record\n\
             read it from another replica\n\
             helix cluster health   with several nodes the replica is filled anew by the others\n\
             stop the node, then: helix wal verify DIR   names file and bytes",
        ),
        R::RecordTooLarge => text(
            "a record is larger than the topic allows",
            "the limit is the topic's max_record_bytes",
            "smaller records, or a larger limit: helix topic alter TOPIC --max-record-bytes 4MiB",
        ),
        R::EmptyBatch => text(
            "the batch has no records",
            "an append needs at least one record",
            "leave the call out when there is nothing to write",
        ),
        R::RecordCountMismatch => text(
            "the batch has another number of records than it says",
            "the client counts in another way than the service, or the payload is no RecordList",
            "compare the client with docs/api.md, \"Batches\"",
        ),
        R::UnsupportedCompression => text(
            "the service cannot decode this compression",
            "it is of a later version, or of no version of the contract",
            "send the batch without compression\nhelix version   to compare both sides",
        ),
        R::InvalidArgument => text(
            "a value is missing or out of its range",
            "the message before this says which one, and what is allowed",
            "the same command with --help",
        ),
        R::Unimplemented => text(
            "the server does not do this yet",
            "it is part of the contract, and this version has not built it",
            "helix version   to compare both sides",
        ),
        R::Throttled => text(
            "more is under way than the node takes at once",
            "the node bounds what it holds in memory, or its disk is slower than its writers",
            "the same command again in a moment\nfewer writers at once, or larger batches",
        ),
        R::DiskFull => text(
            "the node's disk is full up to its reserve; appends are refused, reads go on",
            "nothing deletes records unless a topic has a retention",
            "free some space; writes resume by themselves\n\
             helix topic alter TOPIC --retention-bytes 1GiB\n\
             helix topic trim TOPIC --to POSITION",
        ),
        R::StaleMemberEpoch => text(
            "the group has gone on without this member",
            "it was silent for too long, and its partitions were given to others",
            "join the group again",
        ),
        R::GroupNotFound => text(
            "there is no group of this name",
            "a group is there from its first member or its first committed offset on",
            "compare the name",
        ),
        R::GroupNotEmpty => text(
            "the group still has members",
            "what was asked for is possible only while nobody reads for the group",
            "stop its members first",
        ),
        R::UnknownMember => text(
            "the group does not know this member",
            "it has left, or was silent for too long",
            "join the group again",
        ),
        R::NodeNotFound => text(
            "the cluster has no node of this id",
            "ids are those of --node-id, and count from 1",
            "helix cluster nodes",
        ),
        R::MembershipChangeInProgress => text(
            "the cluster is changing its members already",
            "one change at a time keeps every majority well defined",
            "the same command again when the first one is done\nhelix cluster health",
        ),
        R::MembershipChangeRefused => text(
            "a check before a change of the cluster's nodes failed",
            "the message names it: nobody answers at the address, the node has data, or it is not \
             the one that was meant",
            "start the node with an empty data folder, --peer-addr, and --peer for each node\n\
             the same command with --dry-run   checks again and changes nothing",
        ),
        R::NotEnoughNodes => text(
            "there are fewer nodes than this needs, or fewer that answer",
            "a change of the nodes must leave a majority that is there, and a drained node needs \
             another one that can lead",
            "helix cluster nodes   shows who answers\nhelix cluster health",
        ),
        R::Internal => text(
            "the service broke one of its own rules",
            "this is a bug of Helix; nothing that was acknowledged is in doubt because of it",
            "report it, with the node's log around this moment",
        ),
    }
}

/// The text of what `helix cluster health` finds. None: the reason of an error of the same name
/// says it.
pub(crate) fn of_health(reason: HealthReason) -> Option<Text> {
    match reason {
        HealthReason::NodeDown => Some(text(
            "a node does not answer",
            "it is stopped, cut off, or too busy to answer in two seconds",
            "helix cluster nodes   shows where it should be\n\
             look at its process and its log; as long as a majority is there, the others go on",
        )),
        HealthReason::UnderReplicated => Some(text(
            "a shard has fewer replicas that are up to date than it should",
            "a node is down, or has come back and still catches up",
            "helix cluster shards   shows how far each replica is\n\
             wait for it, or bring the node back",
        )),
        HealthReason::Removed => Some(text(
            "the node that says so was removed from the cluster",
            "its place was given up or taken by a replacement; the others refuse it",
            "stop its process; empty its data folder before it is added again",
        )),
        HealthReason::Unspecified
        | HealthReason::NoLeader
        | HealthReason::DiskFull
        | HealthReason::StorageFailed
        | HealthReason::CorruptLog
        | HealthReason::Draining => None,
    }
}

/// The text of a failure that no server has explained: nobody was there, or nobody in time. Its
/// first hint is `helix cluster health`, which does not go with a failure of that one.
pub(crate) fn of_silence() -> Text {
    text(
        "no Helix node answers in time",
        "the address is wrong, no node runs there, or the network does not reach it",
        "helix cluster health   asks every node\n\
         helix dev   starts a cluster here\n\
         --addr HOST:PORT,... or HELIX_ADDR   for one elsewhere",
    )
}

/// The text of a failure that something else than a Helix node of this version has made up.
pub(crate) fn of_a_stranger() -> Text {
    text(
        "an answer that no Helix node of this version gives",
        "what listens there may not be a Helix node, or one of another version",
        "helix version",
    )
}
