//! All metrics with their kinds, labels and help texts.
//! Tests check the documentation, the dashboard and the alert rules against this list.

/// Prometheus type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows, and starts from 0 with each process.
    Counter,
    Gauge,
    /// Distribution of durations.
    Histogram,
}

impl MetricKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Name, kind, labels and help text of a metric.
#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    /// Every label has a bounded set of values: shards, nodes, methods, codes, reasons, ports, and
    /// the groups that are listed.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident $kind:ident $name:literal [$($label:literal)*] $help:literal)*) => {
        /// Identifies a metric; its index in [`METRICS`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum MetricName {
            $($id),*
        }

        /// All metrics, in the order of the page.
        pub const METRICS: &[Metric] = &[
            $(Metric {
                name: $name,
                kind: MetricKind::$kind,
                labels: &[$($label),*],
                help: $help,
            }),*
        ];
    };
}

metrics! {
    BuildInfo Gauge "helix_build_info" ["version"]
        "Always 1; the label is the version of the server"
    Ready Gauge "helix_ready" []
        "1 while the node is ready (/readyz), else 0"
    Uptime Gauge "helix_uptime_seconds" []
        "Time since the process started"
    ProtocolVersion Gauge "helix_protocol_version" []
        "Protocol version that the cluster uses; raised once every node speaks a newer one"
    NewestProtocolVersion Gauge "helix_newest_protocol_version" []
        "Newest protocol version that this program speaks"
    CpuTime Counter "process_cpu_seconds_total" []
        "CPU time of the process, user and system"
    Memory Gauge "process_resident_memory_bytes" []
        "Resident memory of the process"
    DroppedLogLines Counter "helix_log_dropped_lines_total" []
        "Log lines that standard error did not take: it was blocked, full or closed"

    Calls Counter "helix_calls_total" ["method" "code"]
        "Completed calls by status code; CANCELLED includes clients that disconnected"
    OpenCalls Gauge "helix_calls_open" ["method"]
        "Open calls and streams"
    Failures Counter "helix_failures_total" ["reason"]
        "Failed calls by error reason; see docs/api.md"
    FailedLogins Counter "helix_failed_logins_total" ["reason"]
        "Calls refused for their credentials: none, a certificate without a principal, token or JWT"
    OverQuota Counter "helix_over_quota_total" ["limit"]
        "Calls refused and streams delayed because their principal was over its quota"

    AppendedBatches Counter "helix_appended_batches_total" []
        "Batches acknowledged by this node"
    DuplicateBatches Counter "helix_duplicate_batches_total" []
        "Acknowledged batches that had already been appended"
    AppendedRecords Counter "helix_appended_records_total" []
        "Records acknowledged by this node"
    AppendedBytes Counter "helix_appended_bytes_total" []
        "Payload bytes acknowledged by this node"
    CompressedBatches Counter "helix_compressed_batches_total" ["codec"]
        "Compressed batches acknowledged by this node"
    CompressedBytes Counter "helix_compressed_bytes_total" ["codec"]
        "Payload bytes of those batches, as stored"
    UncompressedBytes Counter "helix_uncompressed_bytes_total" ["codec"]
        "Payload bytes of those batches before compression"
    AppendTimes Histogram "helix_append_seconds" []
        "Time from a batch's arrival to its acknowledgement"
    CommitTimes Histogram "helix_commit_seconds" []
        "Time from a batch's proposal until the leader has applied it"
    ReadRecords Counter "helix_read_records_total" []
        "Records sent by Fetch and Subscribe"
    ReadBytes Counter "helix_read_bytes_total" []
        "Bytes of records sent by Fetch and Subscribe"
    FetchTimes Histogram "helix_fetch_seconds" []
        "Time of a Fetch, without its wait for new records"

    ShardLeader Gauge "helix_shard_leads" ["shard"]
        "1 where this node is the shard's leader, else 0; shard 0 holds the cluster's state"
    ShardHasLeader Gauge "helix_shard_has_leader" ["shard"]
        "1 while this node knows and reaches the shard's leader, else 0"
    ShardWithheld Gauge "helix_shard_withheld" ["shard"]
        "1 while the shard is not served because its log is damaged"
    ShardInRepair Gauge "helix_shard_in_repair" ["shard"]
        "1 while a damaged log is rebuilt from other replicas; the replica neither votes nor serves"
    ShardStopped Gauge "helix_shard_stopped" ["shard"]
        "1 while the shard's replica has stopped and waits for a restart"
    ShardRestarts Counter "helix_shard_restarts_total" ["shard"]
        "Restarts of the shard's replica, for a repair or after it had stopped"
    ShardRepaired Counter "helix_shard_repaired_segments_total" ["shard"]
        "Segments of the shard's log that were repaired in place"
    ShardDamage Gauge "helix_shard_damaged_ranges" ["shard"]
        "Damaged ranges of the shard's log, which are not served"
    ShardTerm Gauge "helix_shard_term" ["shard"]
        "Raft term of the shard"
    ShardLeaderChanges Counter "helix_shard_leader_changes_total" ["shard"]
        "Leader changes seen by this node"
    ShardLastIndex Gauge "helix_shard_last_index" ["shard"]
        "Index of the last entry in the log"
    ShardSyncedIndex Gauge "helix_shard_synced_index" ["shard"]
        "Index of the last entry synced to this node's disk"
    ShardCommittedIndex Gauge "helix_shard_committed_index" ["shard"]
        "Index of the last entry that this node knows as committed"
    ShardAppliedIndex Gauge "helix_shard_applied_index" ["shard"]
        "Index of the last applied entry"
    ShardPurgedIndex Gauge "helix_shard_purged_index" ["shard"]
        "Index of the last purged entry of the Raft log; records stay until retention"
    ShardLag Gauge "helix_shard_lag_entries" ["shard" "node"]
        "Entries that a node's replica lacks; reported by the shard's leader"
    ShardFetchLeft Gauge "helix_shard_fetch_left_bytes" ["shard"]
        "Estimated bytes of records that this replica still has to fetch, else 0"
    ShardPartitions Gauge "helix_shard_partitions" ["shard"]
        "Partitions in the shard"
    ShardHighWatermarks Gauge "helix_shard_high_watermarks" ["shard"]
        "Sum of the high watermarks of the shard's partitions: records ever committed"
    ShardLogStarts Gauge "helix_shard_log_starts" ["shard"]
        "Sum of the log starts of the shard's partitions: records trimmed"
    ShardLiveBytes Gauge "helix_shard_live_bytes" ["shard"]
        "Bytes of records at or above the log starts"
    ShardInFlight Gauge "helix_shard_in_flight_bytes" ["shard"]
        "Bytes of batches that are not yet both committed and synced here"
    ShardInFlightMax Gauge "helix_shard_in_flight_bytes_max" ["shard"]
        "Limit of the bytes in flight; further appends wait, then fail with THROTTLED"
    ShardInFlightLargeMax Gauge "helix_shard_in_flight_large_bytes_max" ["shard"]
        "Current part of that limit for large batches: less while small ones arrive"

    WalSegments Gauge "helix_wal_segments" ["shard"]
        "Segments of the log"
    WalHeldBytes Gauge "helix_wal_held_bytes" ["shard"]
        "Bytes of the log's segments"
    WalReadySegments Gauge "helix_wal_ready_segments" ["shard"]
        "Segments preallocated for use"
    WalPreparedSegments Counter "helix_wal_prepared_segments_total" ["shard" "kind"]
        "Segments prepared, by kind: zeroed, or allocated"
    WalZeroedBytes Counter "helix_wal_zeroed_bytes_total" ["shard"]
        "Zeroes written to prepare segments"
    WalFreedSegments Counter "helix_wal_freed_segments_total" ["shard"]
        "Segments freed by retention"
    WalFreedBytes Counter "helix_wal_freed_bytes_total" ["shard"]
        "Bytes of segments freed by retention"
    WalColdSegments Gauge "helix_wal_cold_segments" ["shard"]
        "Segments written by compaction or fetched from another replica"
    WalRewrittenBytes Counter "helix_wal_rewritten_bytes_total" ["shard"]
        "Bytes of entries rewritten by compaction"
    CleanerPasses Counter "helix_cleaner_passes_total" ["shard"]
        "Passes of compaction by key over partitions of the shard"
    CleanerReadBytes Counter "helix_cleaner_read_bytes_total" ["shard"]
        "Bytes of batches read for compaction by key"
    CleanerBehind Gauge "helix_cleaner_behind_partitions" ["shard"]
        "Partitions whose decided round of compaction by key is not done on this node"
    CleanerUncleanable Gauge "helix_cleaner_uncleanable_partitions" ["shard"]
        "Partitions that this node could not compact by key; it retries"
    CleanerTableBytes Gauge "helix_cleaner_table_bytes" ["shard"]
        "Bytes of batches of partitions that are compacted by key"
    CleanerDirtyBytes Gauge "helix_cleaner_dirty_bytes" ["shard"]
        "Bytes of those in segments with records that are not compacted on this node"
    CleanerLag Gauge "helix_cleaner_lag_seconds" ["shard"]
        "Longest time since the newest record of a segment that is not compacted on this node"
    CleanerBlocked Gauge "helix_cleaner_blocked_partitions" ["shard"]
        "Partitions that this node serves in part only, until it has compacted them by key"
    WalQueuedRequests Gauge "helix_wal_queued_requests" ["shard"]
        "Requests waiting for the writer"
    WalQueuedBytes Gauge "helix_wal_queued_bytes" ["shard"]
        "Payload bytes waiting for the writer"
    WalGroups Counter "helix_wal_groups_total" ["shard"]
        "Written groups of entries, each with one sync"
    WalGroupBytes Counter "helix_wal_group_bytes_total" ["shard"]
        "Bytes written in groups"
    WalSyncTimes Histogram "helix_wal_sync_seconds" ["shard"]
        "Time of a sync"
    WalUnsynced Gauge "helix_wal_unsynced_seconds" ["shard"]
        "Age of the oldest append that is not synced; grows while the disk stalls"
    WalWritable Gauge "helix_wal_writable" ["shard"]
        "1 while the log accepts appends; 0 while the disk is full, or after a failure"
    TracesExported Counter "helix_traces_exported_total" []
        "Traced batches and deliveries sent to the collector of --otlp-endpoint"
    TracesDropped Counter "helix_traces_dropped_total" []
        "Traced batches and deliveries dropped, because the collector was slow or failed"
    ScrubbedBytes Counter "helix_scrubbed_bytes_total" []
        "Bytes of the logs that scrubbing has read to find damage"
    ScrubRounds Counter "helix_scrub_rounds_total" []
        "Completed scrubs of all sealed segments"
    DiskFree Gauge "helix_disk_free_bytes" []
        "Free disk space of the data directory; only with durable storage"
    DiskUsed Gauge "helix_disk_used_bytes" []
        "Bytes of all segments, including preallocated ones"

    Groups Gauge "helix_groups" ["shard"]
        "Consumer groups in the shard"
    GroupMembers Gauge "helix_group_members" ["shard"]
        "Members of the shard's consumer groups"
    UnlistedGroups Gauge "helix_group_unlisted" ["shard"]
        "Groups without series of their own, beyond the limits; reported by the shard's leader"
    GroupMemberCount Gauge "helix_group_current_members" ["group"]
        "Members of the group; reported by its coordinator"
    GroupLag Gauge "helix_group_lag_records" ["group" "topic" "partition"]
        "Records to read: from the committed offset or the log start, whichever is later, to the \
         high watermark; reported by the coordinator"
    GroupLost Gauge "helix_group_lost_records" ["group" "topic" "partition"]
        "Offsets that retention or a trim has removed before the group read them"
    GroupUnsubscribedLag Gauge "helix_group_unsubscribed_lag_records" ["group"]
        "Sum of the lag in topics that no member of a group with members subscribes to"
    GroupLastCommit Gauge "helix_group_last_commit_timestamp_seconds" ["group"]
        "Time of the group's last commit or seek, in seconds since the Unix epoch"
    GroupAssignments Counter "helix_group_assignments_total" []
        "Assignments of consumer groups that this node has computed as coordinator"
    GroupCommits Counter "helix_group_committed_offsets_total" []
        "Committed offsets acknowledged by this node"
    ExpiredMembers Counter "helix_group_expired_members_total" []
        "Members that this node removed because they were silent for their session timeouts"
    GroupFallbacks Counter "helix_group_fallbacks_total" []
        "Readers that started at a fallback because a committed offset was not usable"
    ClockOffset Gauge "helix_clock_offset_seconds" ["node"]
        "Difference of a node's clock from the time that a majority has reached; positive if ahead"
    AppendTimeAhead Gauge "helix_append_time_ahead_seconds" ["shard"]
        "Time from now to the newest append time of a shard's partitions, if it is over two minutes"
    RetentionHeld Gauge "helix_retention_held" []
        "1 while retention by time waits for clocks that agree, or for a jumped clock to be steady"

    PeerConnected Gauge "helix_peer_connected" ["node"]
        "1 while all connections to the node are open, else 0"
    PeerSentBytes Counter "helix_peer_sent_bytes_total" ["node"]
        "Bytes of Raft messages sent to the node: entries, votes, heartbeats, snapshots"
    PeerReceivedBytes Counter "helix_peer_received_bytes_total" ["node"]
        "Bytes of Raft messages received from the node"
    CopyRate Gauge "helix_copy_rate_bytes_per_second" []
        "Rate at which this node may copy records: less than --copy-rate-max while appends are slow"
    CopiedBytes Counter "helix_copied_bytes_total" []
        "Bytes of records and entries copied for moves and recovery, sent and received"
    CopyUsualAppend Gauge "helix_copy_usual_append_seconds" []
        "99th percentile of appends that counts as usual while copies run; 0 until it is known"
    ClientConnections Gauge "helix_client_connections" []
        "Open client connections"
    RequestBytes Gauge "helix_request_bytes" []
        "Bytes of requests being received or handled"
    ResponseBytes Gauge "helix_answer_bytes" []
        "Bytes of responses that clients have not read yet"
    CertificateExpiry Gauge "helix_certificate_expiry_seconds" ["kind" "serial"]
        "Time until a certificate in use expires; negative once it has"
    CertificateReloads Counter "helix_certificate_reloads_total" ["result"]
        "Reloads of changed certificate files: succeeded, or failed and the ones before stay in use"
    CertificateReloadTime Gauge "helix_certificate_reload_timestamp_seconds" []
        "Unix time of the last reload of the certificate files, or of the start"
    CertificateReloadFailed Gauge "helix_certificate_reload_failed" []
        "1 while the certificate files are not valid and the ones before are in use, else 0"
    JwksReloads Counter "helix_jwks_reloads_total" ["result"]
        "Reloads of changed JWT keys: succeeded, or failed and the ones before stay in use"
    JwksReloadFailed Gauge "helix_jwks_reload_failed" []
        "1 while the file of JWT keys is not valid and the ones before are in use, else 0"
    TlsHandshakes Counter "helix_tls_handshakes_total" ["port" "result"]
        "TLS handshakes by result; plaintext counts connections without TLS"
    LimitEvents Counter "helix_limit_events_total" ["limit"]
        "Requests refused and connections closed, by the limit that was reached"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn metric_names_follow_prometheus_conventions() {
        let names: BTreeSet<_> = METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), METRICS.len(), "each name once");
        for Metric { name, kind, labels, .. } in METRICS {
            assert_eq!(name.ends_with("_total"), *kind == MetricKind::Counter, "{name}");
            let of_histograms = ["_sum", "_count", "_bucket"];
            assert!(!of_histograms.iter().any(|suffix| name.ends_with(suffix)), "{name}");
            assert!(*kind != MetricKind::Histogram || name.ends_with("_seconds"), "{name}");
            assert!(name.starts_with("helix_") || name.starts_with("process_"), "{name}");
            let bounded = [
                "version",
                "shard",
                "node",
                "method",
                "code",
                "reason",
                "limit",
                "codec",
                "kind",
                "serial",
                "port",
                "result",
                // Of listed groups only.
                "group",
                "topic",
                "partition",
            ];
            assert!(labels.iter().all(|label| bounded.contains(label)), "{name}");
        }
    }
}
