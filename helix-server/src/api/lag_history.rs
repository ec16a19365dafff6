//! Lag of the groups that this node coordinates, over the last 15 minutes. A task samples what
//! ListGroups returns; nothing of it is on the path of records.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use helix_proto::log::v1::GroupLagHistory;
use tokio::task::yield_now;
use tokio::time::{MissedTickBehavior, interval};

use super::group_lag::uncommitted_lag;
use super::time;
use crate::limits::{LAG_GROUPS_MAX, LAG_PARTITIONS_MAX, LAG_SAMPLE_INTERVAL, LAG_SAMPLES_MAX};
use crate::log::{ConsumerGroup, OffsetLag};
use crate::node::Node;
use crate::sync;

/// Groups that are read without letting other tasks run.
const GROUPS_PER_TURN: usize = 50;

/// The samples of each group, oldest first.
#[derive(Debug, Default)]
pub(super) struct LagHistory(Mutex<HashMap<Arc<str>, VecDeque<u64>>>);

impl LagHistory {
    /// Starts to sample a node, until it is dropped.
    pub(super) fn start(node: &Arc<Node>) -> Arc<Self> {
        let history = Arc::new(Self::default());
        tokio::spawn(Self::follow(Arc::downgrade(&history), Arc::downgrade(node)));
        history
    }

    /// Returns the samples of a group.
    pub(super) fn of(&self, group: &str) -> GroupLagHistory {
        let groups = sync::lock(&self.0);
        let lags = groups.get(group).map(|samples| samples.iter().copied().collect());
        let interval_us = u64::try_from(LAG_SAMPLE_INTERVAL.as_micros()).unwrap_or(u64::MAX);
        GroupLagHistory {
            interval: Some(time::to_duration(interval_us)),
            lags: lags.unwrap_or_default(),
        }
    }

    async fn follow(history: Weak<Self>, node: Weak<Node>) {
        let mut tick = interval(LAG_SAMPLE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let (Some(history), Some(node)) = (history.upgrade(), node.upgrade()) else { return };
            history.add(sample(&node).await);
        }
    }

    /// Adds a round of samples. Groups that are not in it are forgotten.
    fn add(&self, round: Vec<(Arc<str>, u64)>) {
        let mut groups = sync::lock(&self.0);
        let mut before = std::mem::take(&mut *groups);
        for (name, lag) in round {
            let mut samples = before.remove(&name).unwrap_or_default();
            if samples.len() == LAG_SAMPLES_MAX {
                samples.pop_front();
            }
            samples.push_back(lag);
            groups.insert(name, samples);
        }
    }
}

/// Returns the lag of the first groups by name on each shard that this node leads.
async fn sample(node: &Node) -> Vec<(Arc<str>, u64)> {
    let mut round = Vec::new();
    let mut partitions = 0;
    for shard in node.shards().into_iter().filter(|shard| shard.is_leader()) {
        let names: Vec<Arc<str>> = shard.read_groups(|groups| {
            let names = groups.iter().map(|(name, _)| name.clone());
            names.take(LAG_GROUPS_MAX - round.len()).collect()
        });
        for name in names {
            let Some(group) = shard.read_groups(|groups| groups.snapshot(&name)) else { continue };
            partitions += group.offset_count();
            if partitions > LAG_PARTITIONS_MAX {
                return round;
            }
            round.push((name, lag_of(node, &group)));
            if round.len().is_multiple_of(GROUPS_PER_TURN) {
                yield_now().await;
            }
        }
    }
    round
}

fn lag_of(node: &Node, group: &ConsumerGroup) -> u64 {
    let mut lag = uncommitted_lag(node, group, |_| true);
    // Rows are in the order of their topics.
    let mut known: Option<(u64, bool)> = None;
    for (key, row) in group.offsets() {
        let Some(offset) = row.offset() else { continue };
        if known.is_none_or(|(id, _)| id != key.topic_id) {
            let topic = node.topic_of(key.topic_id);
            let is_read = topic.is_some_and(|topic| !group.has_left(&topic.name));
            known = Some((key.topic_id, is_read));
        }
        if known.is_some_and(|(_, is_read)| is_read)
            && let Some(bounds) = node.known_watermarks(key, offset)
        {
            lag = lag.saturating_add(OffsetLag::new(offset, bounds).lag);
        }
    }
    lag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_newest_samples_of_the_groups_that_are_there() {
        let history = LagHistory::default();
        let name = |name: &str| -> Arc<str> { name.into() };
        history.add(vec![(name("gone"), 1)]);
        for lag in 0..LAG_SAMPLES_MAX as u64 + 5 {
            history.add(vec![(name("a"), lag), (name("b"), 7)]);
        }
        let lags = history.of("a").lags;
        assert_eq!((lags.len(), lags[0]), (LAG_SAMPLES_MAX, 5));
        assert_eq!(lags.last(), Some(&(LAG_SAMPLES_MAX as u64 + 4)));
        assert!(history.of("gone").lags.is_empty());
        assert_eq!(history.of("gone").interval.unwrap().seconds, 15);
    }
}
