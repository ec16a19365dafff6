//! Computes the targets of a group: sticky, balanced and deterministic.
//! The coordinator runs this before it proposes an assignment; apply does not run it.

use std::collections::{BTreeMap, BTreeSet};

use super::command::Assignment;
use super::{ConsumerGroup, PARTITIONS_PER_GROUP_MAX, PartitionKey, TOPICS_PER_GROUP_MAX};

/// A topic that a subscription of a group matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchedTopic {
    pub topic_id: u64,
    pub name: String,
    pub partition_count: u32,
}

/// Returns whether a subscribed text is a pattern. Topic names have no `*`.
pub fn is_pattern(text: &str) -> bool {
    text.contains('*')
}

/// Returns whether the pattern, in which `*` stands for any characters, matches the whole name.
pub fn pattern_matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut at, mut star, mut next, mut retry) = (0, None, 0, 0);
    while next < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                (star, retry) = (Some(at), next);
                at += 1;
            }
            Some(byte) if *byte == name[next] => {
                at += 1;
                next += 1;
            }
            _ => {
                // The last star takes one more byte.
                let Some(star) = star else { return false };
                at = star + 1;
                retry += 1;
                next = retry;
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

impl ConsumerGroup {
    /// Returns the subscribed names and patterns of all members, each once.
    pub fn subscriptions(&self) -> BTreeSet<&str> {
        let topics = self.members.values().flat_map(|member| member.settings.topics.iter());
        topics.map(String::as_str).collect()
    }

    /// Returns the next assignment, if members or topics have changed since the last one.
    ///
    /// `topics` are the topics that the subscriptions match, in the order of their ids. Leaves out
    /// topics and partitions beyond the limits of a group.
    pub fn next_assignment(&self, topics: &[MatchedTopic]) -> Option<Assignment> {
        if self.members.is_empty() {
            return None;
        }
        let topics = within_limits(topics);
        let topics = topics.as_slice();
        let has_same_topics = || {
            let counts = topics.iter().map(|topic| (topic.topic_id, topic.partition_count));
            counts.eq(self.assigned_topics.iter().map(|(id, count)| (*id, *count)))
        };
        if self.is_assigned() && has_same_topics() {
            return None;
        }
        let places: BTreeMap<&str, u32> = self.members.keys().map(|id| &**id).zip(0..).collect();
        let owners = self.owners();
        let mut current = Vec::new();
        for topic in topics {
            for number in 0..topic.partition_count {
                let partition = PartitionKey { topic_id: topic.topic_id, number };
                current.push(owners.get(&partition).map(|owner| places[&***owner]));
            }
        }
        self.prefer_targets(topics, &places, &mut current);
        let candidates = self.candidates(topics);
        let counts: Vec<(u32, &[u32])> = topics
            .iter()
            .zip(&candidates)
            .map(|(topic, candidates)| (topic.partition_count, candidates.as_slice()))
            .collect();
        let owners = assign(self.members.len(), &counts, &current);
        Some(Assignment {
            group_epoch: self.epoch,
            topics: topics.iter().map(|it| (it.topic_id, it.partition_count)).collect(),
            owners: owners.into_iter().map(|owner| owner.map_or(0, |member| member + 1)).collect(),
        })
    }

    /// Replaces owners by targets, so that a partition that is already moving keeps its new owner.
    fn prefer_targets(
        &self,
        topics: &[MatchedTopic],
        places: &BTreeMap<&str, u32>,
        current: &mut [Option<u32>],
    ) {
        let mut starts = BTreeMap::new();
        let mut start = 0;
        for topic in topics {
            starts.insert(topic.topic_id, (start, topic.partition_count));
            start += topic.partition_count as usize;
        }
        for (id, member) in self.members.iter() {
            for PartitionKey { topic_id, number } in member.target.iter() {
                if let Some((start, count)) = starts.get(topic_id)
                    && number < count
                {
                    current[start + *number as usize] = Some(places[&**id]);
                }
            }
        }
    }

    /// Returns the members that subscribe to each topic.
    fn candidates(&self, topics: &[MatchedTopic]) -> Vec<Vec<u32>> {
        let mut by_name: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for (member, place) in self.members.values().zip(0..) {
            for topic in member.settings.topics.iter() {
                by_name.entry(topic).or_default().push(place);
            }
        }
        let (patterns, names): (Vec<_>, Vec<_>) =
            by_name.iter().partition(|(name, _)| is_pattern(name));
        let names: BTreeMap<&str, &Vec<u32>> =
            names.into_iter().map(|(name, members)| (*name, members)).collect();
        let members_of = |topic: &MatchedTopic| {
            let mut members = names.get(&*topic.name).map_or_else(Vec::new, |it| (*it).clone());
            for (pattern, subscribed) in &patterns {
                if pattern_matches(pattern, &topic.name) {
                    members.extend(*subscribed);
                }
            }
            members.sort_unstable();
            members.dedup();
            members
        };
        topics.iter().map(members_of).collect()
    }
}

/// Returns the first of these topics, as many as fit into one assignment.
///
/// The last one may be truncated, so that a group with one topic that is too large still gets
/// partitions.
pub fn within_limits(topics: &[MatchedTopic]) -> Vec<MatchedTopic> {
    let mut left = u32::try_from(PARTITIONS_PER_GROUP_MAX).unwrap_or(u32::MAX);
    let mut kept = Vec::new();
    for topic in topics.iter().take(TOPICS_PER_GROUP_MAX) {
        if left == 0 {
            break;
        }
        let partition_count = topic.partition_count.min(left);
        left -= partition_count;
        kept.push(MatchedTopic { partition_count, ..topic.clone() });
    }
    kept
}

/// Loads of the members, in partitions.
struct Loads {
    counts: Vec<u32>,
    /// Members by load; `None` if topics have different candidates, which then have to be searched.
    order: Option<BTreeSet<(u32, u32)>>,
}

impl Loads {
    fn add(&mut self, member: u32, change: i32) {
        let count = &mut self.counts[member as usize];
        let before = *count;
        *count = before.wrapping_add_signed(change);
        if let Some(order) = &mut self.order
            && order.remove(&(before, member))
        {
            order.insert((*count, member));
        }
    }

    /// Returns the candidate with the least load.
    fn least(&self, candidates: &[u32]) -> Option<u32> {
        match &self.order {
            Some(order) => order.first().map(|(_, member)| *member),
            None => candidates.iter().copied().min_by_key(|it| (self.counts[*it as usize], *it)),
        }
    }
}

/// Assigns each partition to one of its topic's candidates.
///
/// A partition stays with its current member if that member is a candidate. Then partitions move
/// from members to candidates with at least two fewer, until no move is left. Members that are
/// candidates for the same topics then differ by at most one partition, and only surplus partitions
/// move.
fn assign(
    member_count: usize,
    topics: &[(u32, &[u32])],
    current: &[Option<u32>],
) -> Vec<Option<u32>> {
    let partitions: Vec<&[u32]> = topics
        .iter()
        .flat_map(|(count, candidates)| std::iter::repeat_n(*candidates, *count as usize))
        .collect();
    let is_candidate = |place: usize, member: &u32| partitions[place].binary_search(member).is_ok();
    let first = partitions.first().copied().unwrap_or_default();
    let is_uniform = topics.iter().all(|(_, candidates)| *candidates == first);
    let order = is_uniform.then(|| first.iter().map(|member| (0, *member)).collect());
    let mut loads = Loads { counts: vec![0; member_count], order };
    let mut owners: Vec<Option<u32>> = current.to_vec();
    for (place, owner) in owners.iter_mut().enumerate() {
        *owner = owner.filter(|member| is_candidate(place, member));
        if let Some(member) = *owner {
            loads.add(member, 1);
        }
    }
    for (place, owner) in owners.iter_mut().enumerate().filter(|(_, owner)| owner.is_none()) {
        *owner = loads.least(partitions[place]);
        if let Some(member) = *owner {
            loads.add(member, 1);
        }
    }
    if loads.order.is_some() {
        level(&mut loads, &mut owners);
        return owners;
    }
    // Terminates: each move lowers the sum of the squares of the loads.
    loop {
        let mut has_moved = false;
        for (place, owner) in owners.iter_mut().enumerate() {
            let (Some(from), Some(to)) = (*owner, loads.least(partitions[place])) else { continue };
            if loads.counts[from as usize] >= loads.counts[to as usize] + 2 {
                *owner = Some(to);
                loads.add(from, -1);
                loads.add(to, 1);
                has_moved = true;
            }
        }
        if !has_moved {
            return owners;
        }
    }
}

/// Moves partitions from the most to the least loaded member until their loads differ by at most
/// one. All members are candidates of all partitions.
fn level(loads: &mut Loads, owners: &mut [Option<u32>]) {
    let mut places: Vec<Vec<usize>> = vec![Vec::new(); loads.counts.len()];
    for (place, owner) in owners.iter().enumerate() {
        if let Some(owner) = owner {
            places[*owner as usize].push(place);
        }
    }
    while let Some(order) = &loads.order
        && let (Some(&(fewest, to)), Some(&(most, from))) = (order.first(), order.last())
        && most >= fewest + 2
        && let Some(place) = places[from as usize].pop()
    {
        owners[place] = Some(to);
        places[to as usize].push(place);
        loads.add(from, -1);
        loads.add(to, 1);
    }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::log::testing::seeded;

    #[test]
    fn patterns_match_whole_names() {
        let matches = |pattern, name| pattern_matches(pattern, name);
        for name in ["", "a", "orders", "orders.eu"] {
            assert!(matches("*", name));
            assert!(matches("**", name));
        }
        assert!(matches("orders*", "orders"));
        assert!(matches("orders*", "orders.eu"));
        assert!(matches("*.eu", "orders.eu"));
        assert!(matches("o*s.*u", "orders.eu"));
        assert!(matches("*a*b*", "xxaxxabxx"));
        assert!(matches("a*ab", "aaab"));
        assert!(!matches("orders", "orders2"));
        assert!(!matches("orders*", "my-orders"));
        assert!(!matches("*.eu", "orders.eu2"));
        assert!(!matches("a*ab", "ab"));
        assert!(!matches("a.c", "abc"));
    }

    #[test]
    fn pattern_of_many_stars_ends_soon() {
        let pattern = format!("{}b", "a*".repeat(100));
        assert!(!pattern_matches(&pattern, &"a".repeat(249)));
    }

    fn loads(members: usize, owners: &[Option<u32>]) -> Vec<usize> {
        let of = |member| owners.iter().filter(|owner| **owner == Some(member)).count();
        (0..).take(members).map(of).collect()
    }

    #[test]
    fn equal_subscriptions_end_balanced_and_move_only_the_surplus() {
        let mut rng = seeded("equal_subscriptions_end_balanced_and_move_only_the_surplus");
        for _ in 0..500 {
            let members = rng.random_range(1..12_usize);
            let count = rng.random_range(0..60_u32);
            let all: Vec<u32> = (0..).take(members).collect();
            let current: Vec<Option<u32>> = (0..count)
                .map(|_| rng.random_bool(0.8).then(|| rng.random_range(0..members as u32)))
                .collect();
            let owners = assign(members, &[(count, &all)], &current);
            let after = loads(members, &owners);
            assert!(after.iter().max().unwrap() - after.iter().min().unwrap() <= 1, "{after:?}");
            // The fewest moves: what each member has above its share, if the largest shares go to
            // the members with the most partitions.
            let mut before = loads(members, &current);
            before.sort_unstable_by(|a, b| b.cmp(a));
            let (least, extra) = (count as usize / members, count as usize % members);
            let share = |place| least + usize::from(place < extra);
            let fewest: usize =
                before.iter().enumerate().map(|(i, load)| load.saturating_sub(share(i))).sum();
            let kept = current.iter().zip(&owners);
            let moved = kept.filter(|(was, is)| was.is_some() && was != is).count();
            assert_eq!(moved, fewest, "{before:?} to {after:?}");
        }
    }

    #[test]
    fn unequal_subscriptions_get_only_their_topics_and_no_move_helps() {
        let mut rng = seeded("unequal_subscriptions_get_only_their_topics_and_no_move_helps");
        for _ in 0..500 {
            let members = rng.random_range(1..6_usize);
            let candidates: Vec<Vec<u32>> = (0..rng.random_range(0..5))
                .map(|_| (0..members as u32).filter(|_| rng.random_bool(0.6)).collect())
                .collect();
            let topics: Vec<(u32, &[u32])> =
                candidates.iter().map(|it| (rng.random_range(0..9), it.as_slice())).collect();
            let count: u32 = topics.iter().map(|(count, _)| count).sum();
            let current: Vec<Option<u32>> = (0..count)
                .map(|_| rng.random_bool(0.5).then(|| rng.random_range(0..members as u32)))
                .collect();
            let owners = assign(members, &topics, &current);
            let loads = loads(members, &owners);
            let of_partition: Vec<&[u32]> =
                topics.iter().flat_map(|(n, it)| vec![*it; *n as usize]).collect();
            for (owner, candidates) in owners.iter().zip(of_partition) {
                match owner {
                    None => assert!(candidates.is_empty()),
                    Some(owner) => {
                        assert!(candidates.contains(owner));
                        let least = candidates.iter().map(|it| loads[*it as usize]).min().unwrap();
                        assert!(loads[*owner as usize] <= least + 1);
                    }
                }
            }
            assert_eq!(assign(members, &topics, &owners), owners, "a second run moves nothing");
        }
    }
}
