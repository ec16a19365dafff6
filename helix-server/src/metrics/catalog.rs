//! All metrics: what each is called, what it means, and which labels it has. The documentation,
//! the dashboard and the alert rules are held to this list by tests.

/// How a metric behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from 0 at each start.
    Counter,
    Gauge,
    /// Times in classes.
    Histogram,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    /// Each from a bounded set: shards, nodes, methods, codes, reasons.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident $kind:ident $name:literal [$($label:literal)*] $help:literal)*) => {
        /// A metric of the list.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Name {
            $($id),*
        }

        /// In the order of the page.
        pub const ALL: &[Metric] = &[
            $(Metric {
                name: $name,
                kind: Kind::$kind,
                labels: &[$($label),*],
                help: $help,
            }),*
        ];
    };
}

metrics! {
    BuildInfo Gauge "helix_build_info" ["version"]
        "1, with the version of the server"
    Ready Gauge "helix_ready" []
        "1 while the node is ready, as /readyz says, else 0"
    Uptime Gauge "helix_uptime_seconds" []
        "Time since the start"
    CpuTime Counter "process_cpu_seconds_total" []
        "CPU time of the process, user and system"
    Memory Gauge "process_resident_memory_bytes" []
        "Resident memory of the process"

    Calls Counter "helix_calls_total" ["method" "code"]
        "Calls that ended, by how; CANCELLED is also a client that went away"
    OpenCalls Gauge "helix_calls_open" ["method"]
        "Calls and streams that are open"
    Failures Counter "helix_failures_total" ["reason"]
        "Calls that failed, by the reason of docs/api.md"

    AppendedBatches Counter "helix_appended_batches_total" []
        "Batches acknowledged by this node"
    DuplicateBatches Counter "helix_duplicate_batches_total" []
        "Batches acknowledged that had been appended before"
    AppendedRecords Counter "helix_appended_records_total" []
        "Records acknowledged by this node"
    AppendedBytes Counter "helix_appended_bytes_total" []
        "Payload bytes acknowledged by this node"
    AppendTimes Histogram "helix_append_seconds" []
        "From a batch's arrival to its acknowledgement"
    CommitTimes Histogram "helix_commit_seconds" []
        "From a batch's proposal to its being applied on the leader"
    ReadRecords Counter "helix_read_records_total" []
        "Records sent to readers, by Fetch and Subscribe"
    ReadBytes Counter "helix_read_bytes_total" []
        "Bytes of records sent to readers"
    FetchTimes Histogram "helix_fetch_seconds" []
        "Time in which a Fetch reads what is there, without waiting for more"

    ShardLeader Gauge "helix_shard_leads" ["shard"]
        "1 where this node leads the shard, else 0; shard 0 is the cluster's own"
    ShardLed Gauge "helix_shard_has_leader" ["shard"]
        "1 while this node knows a leader of the shard that it reaches, else 0"
    ShardWithheld Gauge "helix_shard_withheld" ["shard"]
        "1 where the shard is withheld because its log is damaged"
    ShardInRepair Gauge "helix_shard_in_repair" ["shard"]
        "1 while the shard's damaged log is fetched anew; the replica neither votes nor serves"
    ShardStopped Gauge "helix_shard_stopped" ["shard"]
        "1 while the shard's replica has stopped and waits to be started again"
    ShardRestarts Counter "helix_shard_restarts_total" ["shard"]
        "How often the shard was closed and opened again, for a repair or after it had stopped"
    ShardDamage Gauge "helix_shard_damaged_ranges" ["shard"]
        "Ranges of the shard's log that are damaged and withheld"
    ShardTerm Gauge "helix_shard_term" ["shard"]
        "Raft term"
    ShardLeaderChanges Counter "helix_shard_leader_changes_total" ["shard"]
        "Leaders that this node saw come after another"
    ShardLastIndex Gauge "helix_shard_last_index" ["shard"]
        "Index of the last entry in the log"
    ShardSyncedIndex Gauge "helix_shard_synced_index" ["shard"]
        "Index up to which the log is on this node's stable storage"
    ShardCommittedIndex Gauge "helix_shard_committed_index" ["shard"]
        "Index up to which the log is committed, as this node knows"
    ShardAppliedIndex Gauge "helix_shard_applied_index" ["shard"]
        "Index up to which the log is applied"
    ShardPurgedIndex Gauge "helix_shard_purged_index" ["shard"]
        "Index up to which the Raft log is purged; its records stay until retention"
    ShardLag Gauge "helix_shard_lag_entries" ["shard" "node"]
        "Entries that a node's replica lacks, as the shard's leader knows"
    ShardFetchLeft Gauge "helix_shard_fetch_left_bytes" ["shard"]
        "About how many bytes of records this replica has still to fetch; 0 where it lacks none"
    ShardPartitions Gauge "helix_shard_partitions" ["shard"]
        "Partitions in the shard"
    ShardHighWatermarks Gauge "helix_shard_high_watermarks" ["shard"]
        "High watermarks of the shard's partitions, added up: records ever committed"
    ShardLogStarts Gauge "helix_shard_log_starts" ["shard"]
        "Log starts of the shard's partitions, added up: records trimmed"
    ShardLiveBytes Gauge "helix_shard_live_bytes" ["shard"]
        "Bytes in the log that belong to records above the log starts"
    ShardInFlight Gauge "helix_shard_in_flight_bytes" ["shard"]
        "Bytes of batches that are not yet both committed and synced here"
    ShardInFlightMax Gauge "helix_shard_in_flight_bytes_max" ["shard"]
        "Bytes that may be in flight; beyond it appends wait, then are THROTTLED"
    ShardInFlightLargeMax Gauge "helix_shard_in_flight_large_bytes_max" ["shard"]
        "Of these, bytes that large batches may have now: fewer while there are small ones"

    WalSegments Gauge "helix_wal_segments" ["shard"]
        "Segments that hold the log"
    WalHeldBytes Gauge "helix_wal_held_bytes" ["shard"]
        "Bytes of the segments that hold the log"
    WalReadySegments Gauge "helix_wal_ready_segments" ["shard"]
        "Segments that are prepared for use"
    WalFreedSegments Counter "helix_wal_freed_segments_total" ["shard"]
        "Segments freed by retention"
    WalFreedBytes Counter "helix_wal_freed_bytes_total" ["shard"]
        "Bytes of segments freed by retention"
    WalColdSegments Gauge "helix_wal_cold_segments" ["shard"]
        "Segments that were written at once, by compaction or for records from another replica"
    WalRewrittenBytes Counter "helix_wal_rewritten_bytes_total" ["shard"]
        "Bytes of entries that compaction has written anew"
    WalQueuedRequests Gauge "helix_wal_queued_requests" ["shard"]
        "Requests that wait for the writer"
    WalQueuedBytes Gauge "helix_wal_queued_bytes" ["shard"]
        "Payload bytes that wait for the writer"
    WalGroups Counter "helix_wal_groups_total" ["shard"]
        "Groups of entries written, each with one sync"
    WalGroupBytes Counter "helix_wal_group_bytes_total" ["shard"]
        "Bytes written in groups"
    WalSyncTimes Histogram "helix_wal_sync_seconds" ["shard"]
        "Time of a sync"
    WalUnsynced Gauge "helix_wal_unsynced_seconds" ["shard"]
        "How long the oldest of what is not synced has waited; grows while the disk stalls"
    WalWritable Gauge "helix_wal_writable" ["shard"]
        "1 while the log takes appends, 0 while the disk is full or after it failed"
    ScrubbedBytes Counter "helix_scrubbed_bytes_total" []
        "Bytes of the logs that were read anew to find damage"
    ScrubRounds Counter "helix_scrub_rounds_total" []
        "How often all that is sealed has been read anew"
    DiskFree Gauge "helix_disk_free_bytes" []
        "Free space where the data is; only with durable storage"
    DiskUsed Gauge "helix_disk_used_bytes" []
        "Bytes of all segments, those that are prepared included"

    PeerConnected Gauge "helix_peer_connected" ["node"]
        "1 while all connections to the node are open, else 0"
    PeerSentBytes Counter "helix_peer_sent_bytes_total" ["node"]
        "Bytes of Raft messages sent to the node: entries, votes, heartbeats, snapshots"
    PeerReceivedBytes Counter "helix_peer_received_bytes_total" ["node"]
        "Bytes of Raft messages that came from the node"
    ClientConnections Gauge "helix_client_connections" []
        "Client connections that are open"
    RequestBytes Gauge "helix_request_bytes" []
        "Bytes of requests that are arriving or being handled"
    AnswerBytes Gauge "helix_answer_bytes" []
        "Bytes of answers that readers have not taken yet"
    LimitEvents Counter "helix_limit_events_total" ["limit"]
        "How often a limit was met: something was refused, or ended"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_those_of_the_field() {
        let names: BTreeSet<_> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len(), "each name once");
        for Metric { name, kind, labels, .. } in ALL {
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
            let of_histograms = ["_sum", "_count", "_bucket"];
            assert!(!of_histograms.iter().any(|suffix| name.ends_with(suffix)), "{name}");
            assert!(*kind != Kind::Histogram || name.ends_with("_seconds"), "{name}");
            assert!(name.starts_with("helix_") || name.starts_with("process_"), "{name}");
            let bounded = ["version", "shard", "node", "method", "code", "reason", "limit"];
            assert!(labels.iter().all(|label| bounded.contains(label)), "{name}");
        }
    }
}
