//! Samples of a cluster, and the rates between two of them.

use std::time::Duration;

use helix_client::proto::log::v1::{GroupSummary, SlowCall, Topic};
use tokio::time::Instant;

use crate::commands::cluster::snapshot::ClusterSnapshot;

/// The state of a cluster at one time.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) snapshot: ClusterSnapshot,
    /// None if they are too many, or no node answered.
    pub(super) topics: Option<Vec<Topic>>,
    /// None if no node answered.
    pub(super) groups: Option<Vec<GroupSummary>>,
    /// With the id of the node, the slowest first.
    pub(super) slow: Vec<(u64, SlowCall)>,
}

impl Sample {
    /// Returns the used CPU of a node since an earlier sample, in percent of one CPU.
    pub(super) fn cpu_percent(&self, before: &Self, node_id: u64) -> Option<f64> {
        let used = |sample: &Self| {
            let (_, report) = sample.snapshot.reports().find(|(id, _)| *id == node_id)?;
            Some(report.status.cpu_time_us)
        };
        let used = used(self)?.checked_sub(used(before)?)?;
        let elapsed = self.since(before).as_micros() as f64;
        Some(used as f64 * 100.0 / elapsed)
    }

    /// Returns the entries of a shard's log per second since an earlier sample.
    pub(super) fn entries_per_second(&self, before: &Self, shard_id: u32) -> Option<f64> {
        let last = |sample: &Self| {
            let nodes = sample.snapshot.nodes.iter();
            let statuses = nodes.filter_map(|node| sample.snapshot.replica(shard_id, node.node_id));
            statuses.map(|status| status.committed_index).max()
        };
        self.per_second(before, last(self)?, last(before)?)
    }

    /// Returns the appended records of a topic per second since an earlier sample.
    pub(super) fn records_per_second(&self, before: &Self, topic: &Topic) -> Option<f64> {
        let earlier = before.topics.as_ref()?.iter().find(|it| it.topic_id == topic.topic_id)?;
        self.per_second(before, end(topic)?, end(earlier)?)
    }

    fn per_second(&self, before: &Self, now: u64, earlier: u64) -> Option<f64> {
        Some(now.saturating_sub(earlier) as f64 / self.since(before).as_secs_f64())
    }

    fn since(&self, before: &Self) -> Duration {
        // Rates of samples that follow at once would be infinite.
        self.at.saturating_duration_since(before.at).max(Duration::from_millis(1))
    }
}

/// Returns the sum of the end offsets of a topic; None if one is not known.
fn end(topic: &Topic) -> Option<u64> {
    let marks = topic.partitions.iter().map(|partition| partition.watermarks);
    marks.map(|marks| Some(marks?.high_watermark)).sum()
}

/// Formats a rate: `0`, `12.5`, `1,200`, `3.4M`.
pub(super) fn rate(per_second: Option<f64>) -> String {
    match per_second {
        None => "-".to_owned(),
        Some(rate) if rate >= 1e6 => format!("{:.1}M", rate / 1e6),
        Some(rate) if rate >= 1e4 => format!("{:.0}K", rate / 1e3),
        Some(rate) if rate >= 100.0 || rate == 0.0 => format!("{rate:.0}"),
        Some(rate) => format!("{rate:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::{PartitionInfo, Watermarks};

    use super::*;
    use crate::commands::cluster::snapshot::tests::snapshot;

    fn sample(at: Instant, end: u64) -> Sample {
        let watermarks = Some(Watermarks { log_start_offset: 0, high_watermark: end });
        let partitions = vec![PartitionInfo { watermarks, ..PartitionInfo::default() }];
        let topic = Topic { topic_id: 7, partitions, ..Topic::default() };
        Sample {
            at,
            snapshot: snapshot(),
            topics: Some(vec![topic]),
            groups: None,
            slow: Vec::new(),
        }
    }

    #[test]
    fn rates_are_per_second() {
        let start = Instant::now();
        let (before, now) = (sample(start, 100), sample(start + Duration::from_secs(2), 700));
        let topic = &now.topics.as_ref().unwrap()[0];
        assert_eq!(now.records_per_second(&before, topic), Some(300.0));
        assert_eq!(now.entries_per_second(&before, 1), Some(0.0));
        assert_eq!(now.entries_per_second(&before, 99), None);
        // Node 3 does not answer.
        assert_eq!(now.cpu_percent(&before, 3), None);
    }

    #[test]
    fn rates_are_short() {
        let rates = [None, Some(0.0), Some(1.25), Some(250.4), Some(25_000.0), Some(3.4e6)];
        assert_eq!(rates.map(rate), ["-", "0", "1.2", "250", "25K", "3.4M"]);
    }
}
