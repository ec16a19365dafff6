//! Metrics of consumer groups. The first groups of a shard, by name, have series of their own.
//! Only a shard's leader reports them, so that each group is reported once.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::limits::{GROUP_LAG_SERIES_MAX, GROUP_SERIES_MAX};
use crate::log::{ConsumerGroup, GroupTable, OffsetLag, PartitionKey};
use crate::metrics::{MetricName, MetricsPage};
use crate::node::Node;
use crate::shard::Shard;

/// A group with series of its own.
struct ListedGroup {
    name: Arc<str>,
    members: usize,
    /// Time of the last commit or seek, in µs since the Unix epoch.
    changed_us: Option<u64>,
    offsets: Vec<(PartitionKey, u64)>,
    /// Topics that no member subscribes to, in a group with members.
    unsubscribed: BTreeSet<u64>,
}

impl ListedGroup {
    fn new(name: &Arc<str>, group: &ConsumerGroup) -> Self {
        let offsets = group.offsets().filter_map(|(key, row)| Some((key, row.offset()?)));
        let unread = group.topic_names().filter(|(_, name)| group.has_left(name));
        Self {
            unsubscribed: unread.map(|(id, _)| id).collect(),
            name: name.clone(),
            members: group.members().len(),
            changed_us: group.offsets().map(|(_, row)| row.changed_us()).max(),
            offsets: offsets.collect(),
        }
    }
}

/// Writes the metrics of a shard's groups. Asks the leaders of shards without a replica here for
/// the ends of their partitions, up to a second.
pub(super) async fn groups(page: &mut MetricsPage, node: &Node, shard: &Shard) {
    let id = &*shard.id().to_string();
    let (groups, members) = shard.read_groups(|groups| {
        let members: usize = groups.iter().map(|(_, group)| group.members().len()).sum();
        (groups.iter().len(), members)
    });
    page.put(MetricName::Groups, &[id], groups as u64);
    page.put(MetricName::GroupMembers, &[id], members as u64);
    if !shard.is_leader() {
        return;
    }
    let listed = shard.read_groups(listed);
    let keys = listed.iter().flat_map(|group| group.offsets.iter().map(|(key, _)| *key));
    let keys: Vec<PartitionKey> = keys.collect();
    node.learn_watermarks(keys).await;
    page.put(MetricName::UnlistedGroups, &[id], groups.saturating_sub(listed.len()) as u64);
    for ListedGroup { name, members, changed_us, offsets, unsubscribed } in listed {
        page.put(MetricName::GroupMemberCount, &[&name], members as u64);
        if let Some(changed_us) = changed_us {
            page.put_f64(MetricName::GroupLastCommit, &[&name], changed_us as f64 / 1e6);
        }
        let mut unsubscribed_lag = 0;
        for (key, offset) in offsets {
            let Some(topic) = node.topic_of(key.topic_id) else { continue };
            let Some(bounds) = node.known_watermarks(key, offset) else { continue };
            let OffsetLag { lag, lost } = OffsetLag::new(offset, bounds);
            if unsubscribed.contains(&key.topic_id) {
                unsubscribed_lag += lag;
                continue;
            }
            let labels = [&*name, &topic.name, &key.number.to_string()];
            page.put(MetricName::GroupLag, &labels, lag);
            page.put(MetricName::GroupLost, &labels, lost);
        }
        page.put(MetricName::GroupUnsubscribedLag, &[&name], unsubscribed_lag);
    }
}

/// Returns the groups with series of their own: the first ones by name whose partitions fit.
fn listed(groups: &GroupTable) -> Vec<ListedGroup> {
    let mut left = GROUP_LAG_SERIES_MAX;
    let mut listed = Vec::new();
    for (name, group) in groups.iter().take(GROUP_SERIES_MAX) {
        let Some(rest) = left.checked_sub(group.offset_count()) else { continue };
        left = rest;
        listed.push(ListedGroup::new(name, group));
    }
    listed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::{GroupChange, GroupCommand, OffsetUpdate, TopicOffsets};

    fn commit(table: &mut GroupTable, index: u64, group: &str, partitions: u32) {
        let update = |number| OffsetUpdate { number, offset: Some(7), metadata: String::new() };
        let offsets = (0..partitions).map(update).collect();
        let topics = vec![TopicOffsets { topic_id: 1, name: "t".to_owned(), offsets }];
        let change =
            GroupChange::Commit { member: None, offsets_epoch: None, topics, at_us: index };
        let command = GroupCommand { group: group.to_owned(), change, is_ordered: true };
        table.apply(index, &command, &mut Vec::new()).unwrap();
    }

    #[test]
    fn lists_the_first_groups_whose_partitions_fit() {
        let mut table = GroupTable::default();
        let half = u32::try_from(GROUP_LAG_SERIES_MAX / 2).unwrap();
        for (index, (group, partitions)) in
            [("a", half), ("b", half + 1), ("c", half), ("d", 1)].into_iter().enumerate()
        {
            commit(&mut table, index as u64 + 1, group, partitions);
        }
        let found = listed(&table);
        let names: Vec<_> = found.iter().map(|group| &*group.name).collect();
        assert_eq!(names, ["a", "c"], "b does not fit after a, and d not after c");
        assert_eq!(found[0].changed_us, Some(1));
        let partitions: usize = found.iter().map(|group| group.offsets.len()).sum();
        assert_eq!(partitions, GROUP_LAG_SERIES_MAX);
    }

    #[test]
    fn lists_a_bounded_number_of_groups() {
        let mut table = GroupTable::default();
        for index in 1..=GROUP_SERIES_MAX as u64 + 5 {
            commit(&mut table, index, &format!("g{index:04}"), 1);
        }
        assert_eq!(listed(&table).len(), GROUP_SERIES_MAX);
    }
}
