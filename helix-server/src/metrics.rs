//! Metrics of one node and the page that shows them. Nothing is global: each node has its own.
//! Values that the node has anyway are read at each scrape and not counted twice.

mod calls;
mod catalog;
mod page;
#[cfg(test)]
mod reference;
mod values;

use std::time::Duration;

pub use calls::{CallMetrics, OpenCall};
pub use catalog::{METRICS, Metric, MetricKind, MetricName};
pub use page::{CONTENT_TYPE, MetricsPage};
pub use values::{BOUNDS_US, Counter, Histogram};

/// Codecs with counters of their own: values of the label `codec`.
const CODECS: [&str; 2] = ["lz4", "zstd"];

/// Reasons of failed logins with counters of their own: values of the label `reason`.
pub const FAILED_LOGINS: [&str; 16] = [
    "missing",
    "certificate",
    "malformed",
    "unknown",
    "expired",
    "jwt_off",
    "jwt_too_large",
    "jwt_malformed",
    "jwt_algorithm",
    "jwt_unknown_key",
    "jwt_signature",
    "jwt_issuer",
    "jwt_audience",
    "jwt_expired",
    "jwt_early",
    "jwt_principal",
];

/// Limits of quotas with counters of their own: values of the label `limit`.
pub const QUOTA_LIMITS: [&str; 4] = ["bytes_in", "bytes_out", "requests", "connections"];

/// Counters of the compressed batches of one codec.
#[derive(Debug, Default)]
struct CompressedCounters {
    batches: Counter,
    bytes: Counter,
    uncompressed_bytes: Counter,
}

/// Counters of the append path and the read path: one or two additions per request, not per record.
#[derive(Debug, Default)]
pub struct Metrics {
    pub calls: CallMetrics,
    appended_batches: Counter,
    duplicate_batches: Counter,
    appended_records: Counter,
    appended_bytes: Counter,
    append_times: Histogram,
    commit_times: Histogram,
    read_records: Counter,
    read_bytes: Counter,
    fetch_times: Histogram,
    /// Of each of [`CODECS`].
    compressed: [CompressedCounters; CODECS.len()],
    scrubbed_bytes: Counter,
    scrub_rounds: Counter,
    group_assignments: Counter,
    group_commits: Counter,
    expired_members: Counter,
    group_fallbacks: Counter,
    /// For each of [`FAILED_LOGINS`].
    failed_logins: [Counter; FAILED_LOGINS.len()],
    /// For each of [`QUOTA_LIMITS`].
    over_quota: [Counter; QUOTA_LIMITS.len()],
}

/// Totals of the append path and the read path since the start.
#[derive(Debug, Clone, Default)]
pub struct MetricTotals {
    pub appended_records: u64,
    pub appended_bytes: u64,
    pub read_records: u64,
    pub read_bytes: u64,
    /// Appends by the time until their acknowledgement, for each of [`BOUNDS_US`] and above.
    pub append_times: Vec<u64>,
}

impl Metrics {
    /// Returns the totals until now.
    pub fn totals(&self) -> MetricTotals {
        MetricTotals {
            appended_records: self.appended_records.get(),
            appended_bytes: self.appended_bytes.get(),
            read_records: self.read_records.get(),
            read_bytes: self.read_bytes.get(),
            append_times: self.append_times.get().0,
        }
    }

    /// Returns the batches by the time from their proposal until the leader has applied them, for
    /// each of [`BOUNDS_US`] and above.
    pub fn commit_times(&self) -> Vec<u64> {
        self.commit_times.get().0
    }

    /// Counts an acknowledged batch; `took` is the time since its arrival.
    pub fn on_ack(&self, records: u32, bytes: usize, is_duplicate: bool, took: Duration) {
        self.append_times.observe(took);
        if is_duplicate {
            return self.duplicate_batches.add(1);
        }
        self.appended_batches.add(1);
        self.appended_records.add(records.into());
        self.appended_bytes.add(bytes as u64);
    }

    /// Counts an acknowledged batch that is compressed, beside [`Self::on_ack`].
    pub fn on_compressed(&self, codec: &str, bytes: u64, uncompressed_bytes: u64) {
        let Some(index) = CODECS.iter().position(|known| *known == codec) else { return };
        let counters = &self.compressed[index];
        counters.batches.add(1);
        counters.bytes.add(bytes);
        counters.uncompressed_bytes.add(uncompressed_bytes);
    }

    /// Counts a batch that the leader has applied; `took` is the time since its proposal.
    pub fn on_commit(&self, took: Duration) {
        self.commit_times.observe(took);
    }

    /// Counts records sent to a reader.
    pub fn on_read(&self, records: u64, bytes: u64) {
        self.read_records.add(records);
        self.read_bytes.add(bytes);
    }

    /// Counts a fetch; `took` excludes its wait for new records.
    pub fn on_fetch(&self, took: Duration) {
        self.fetch_times.observe(took);
    }

    /// Counts scrubbed bytes of a log.
    pub fn on_scrub(&self, bytes: u64) {
        self.scrubbed_bytes.add(bytes);
    }

    /// Counts a completed scrub of all sealed segments.
    pub fn on_scrub_round(&self) {
        self.scrub_rounds.add(1);
    }

    /// Counts a computed assignment of a group.
    pub fn on_group_assignment(&self) {
        self.group_assignments.add(1);
    }

    /// Counts the partitions of an acknowledged commit.
    pub fn on_group_commit(&self, partitions: u64) {
        self.group_commits.add(partitions);
    }

    /// Counts members that are removed at their session timeouts.
    pub fn on_expired_members(&self, members: u64) {
        self.expired_members.add(members);
    }

    /// Counts a reader that starts at a fallback in place of a committed offset.
    pub fn on_group_fallback(&self) {
        self.group_fallbacks.add(1);
    }

    /// Counts a call whose credentials were refused, by one of [`FAILED_LOGINS`].
    pub fn on_failed_login(&self, reason: &str) {
        let index = FAILED_LOGINS.iter().position(|known| *known == reason);
        if let Some(index) = index {
            self.failed_logins[index].add(1);
        }
    }

    /// Counts a call that was refused, or a stream that was delayed, by one of [`QUOTA_LIMITS`].
    pub fn on_over_quota(&self, limit: &str) {
        if let Some(index) = QUOTA_LIMITS.iter().position(|known| *known == limit) {
            self.over_quota[index].add(1);
        }
    }

    /// Adds these metrics to a page.
    pub fn write(&self, page: &mut MetricsPage) {
        page.put(MetricName::AppendedBatches, &[], self.appended_batches.get());
        page.put(MetricName::DuplicateBatches, &[], self.duplicate_batches.get());
        page.put(MetricName::AppendedRecords, &[], self.appended_records.get());
        page.put(MetricName::AppendedBytes, &[], self.appended_bytes.get());
        for (codec, counters) in CODECS.into_iter().zip(&self.compressed) {
            page.put(MetricName::CompressedBatches, &[codec], counters.batches.get());
            page.put(MetricName::CompressedBytes, &[codec], counters.bytes.get());
            let uncompressed_bytes = counters.uncompressed_bytes.get();
            page.put(MetricName::UncompressedBytes, &[codec], uncompressed_bytes);
        }
        page.put_times(MetricName::AppendTimes, &[], &self.append_times);
        page.put_times(MetricName::CommitTimes, &[], &self.commit_times);
        page.put(MetricName::ReadRecords, &[], self.read_records.get());
        page.put(MetricName::ReadBytes, &[], self.read_bytes.get());
        page.put_times(MetricName::FetchTimes, &[], &self.fetch_times);
        page.put(MetricName::ScrubbedBytes, &[], self.scrubbed_bytes.get());
        page.put(MetricName::ScrubRounds, &[], self.scrub_rounds.get());
        page.put(MetricName::GroupAssignments, &[], self.group_assignments.get());
        page.put(MetricName::GroupCommits, &[], self.group_commits.get());
        page.put(MetricName::ExpiredMembers, &[], self.expired_members.get());
        page.put(MetricName::GroupFallbacks, &[], self.group_fallbacks.get());
        for (reason, failed) in FAILED_LOGINS.into_iter().zip(&self.failed_logins) {
            page.put(MetricName::FailedLogins, &[reason], failed.get());
        }
        for (limit, throttled) in QUOTA_LIMITS.into_iter().zip(&self.over_quota) {
            page.put(MetricName::OverQuota, &[limit], throttled.get());
        }
        self.calls.write(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_batches_are_counted_by_codec() {
        let metrics = Metrics::default();
        for codec in CODECS {
            metrics.on_compressed(codec, 10, 70);
        }
        metrics.on_compressed("lz4", 5, 30);
        let mut page = MetricsPage::default();
        metrics.write(&mut page);
        let page = page.to_string();
        for line in [
            "helix_compressed_batches_total{codec=\"lz4\"} 2",
            "helix_compressed_bytes_total{codec=\"lz4\"} 15",
            "helix_uncompressed_bytes_total{codec=\"lz4\"} 100",
            "helix_uncompressed_bytes_total{codec=\"zstd\"} 70",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in {page}");
        }
    }
}
