//! Decides whether the responses to the members of a consumer group are possible with a correct
//! coordinator. Pure: it gets the members' events in the order in which they happened.
//!
//! Rules:
//!
//! - A partition is read by at most one member at a time.
//! - A member starts at no offset below a commit that was acknowledged before, and every record
//!   from the log start to its start was delivered to some member. So no record is skipped, and
//!   records after an acknowledged commit are not delivered again.
//! - A commit is not acknowledged if another member read the partition when it was sent.
//! - A copy of a commit that arrives after a later one was acknowledged is not acknowledged, unless
//!   it changes nothing.
//! - A committed offset never falls: readers do not go back, and nothing seeks.
//! - A reader of a topic that was created again does not start without an error, if the group has
//!   committed offsets of an earlier one only.

use std::collections::{BTreeMap, BTreeSet};

/// A partition of one incarnation of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupPartitionKey {
    /// Id of the topic.
    pub topic_id: u64,
    /// Number of the partition.
    pub number: u32,
}

/// A commit of one partition that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentCommit {
    /// Partition.
    pub key: GroupPartitionKey,
    /// Offset.
    pub offset: u64,
    /// Number among all commits, in the order in which they were sent.
    number: u64,
    member: u32,
    /// Member that read the partition then, if it was another one.
    other_owner: Option<u32>,
}

/// Start of a reader at the group's offset.
#[derive(Debug, Clone, Copy)]
pub struct GroupStart {
    /// Offset at which it starts.
    pub offset: u64,
    /// First readable offset, as the response has it.
    pub log_start: u64,
    /// The reader chose a fallback, after an error.
    pub is_fallback: bool,
}

/// Counts of a group's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupCounts {
    /// Records that were delivered, including repeated ones.
    pub delivered: u64,
    /// Records that were delivered before.
    pub repeated: u64,
    /// Acknowledged commits of one partition each.
    pub commits: u64,
    /// Partitions that began to be read by another member than before.
    pub moves: u64,
}

/// History of one partition.
#[derive(Debug, Default)]
struct PartitionUse {
    owner: Option<u32>,
    /// Next offset of the owner's reader, once it has started.
    position: Option<u64>,
    last_owner: Option<u32>,
    /// Delivered offsets: ends by starts. Ranges neither overlap nor touch.
    delivered: BTreeMap<u64, u64>,
    /// Highest acknowledged commit.
    acked: Option<u64>,
    /// Number and offset of the acknowledged commit that was sent last.
    last_acked: Option<(u64, u64)>,
    /// Highest log start of a response.
    log_start: u64,
    /// A commit was sent.
    has_commits: bool,
}

/// Checks the history of one group.
#[derive(Debug, Default)]
pub struct GroupChecker {
    partitions: BTreeMap<GroupPartitionKey, PartitionUse>,
    /// Ids of the topics of each name with acknowledged commits.
    committed_topics: BTreeMap<String, BTreeSet<u64>>,
    /// Topics with commits that were sent.
    commit_sent: BTreeSet<u64>,
    /// Commits that were sent.
    sent: u64,
    counts: GroupCounts,
    violations: Vec<String>,
}

impl GroupChecker {
    /// Returns the violations found so far.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> GroupCounts {
        self.counts
    }

    /// Records a violation that the caller has found.
    pub fn found(&mut self, what: String) {
        self.violations.push(what);
    }

    /// A member begins to read a partition, or continues at a position.
    pub fn claim(&mut self, member: u32, key: GroupPartitionKey, position: Option<u64>) {
        let place = self.partitions.entry(key).or_default();
        if let Some(owner) = place.owner.filter(|owner| *owner != member) {
            self.violations.push(format!("{key:?} is read by member {owner} and by {member}"));
        }
        if place.last_owner.is_some_and(|last| last != member) {
            self.counts.moves += 1;
        }
        (place.owner, place.last_owner) = (Some(member), Some(member));
        place.position = position;
    }

    /// A member no longer reads a partition.
    pub fn give_up(&mut self, member: u32, key: GroupPartitionKey) {
        if let Some(place) = self.partitions.get_mut(&key)
            && place.owner == Some(member)
        {
            place.owner = None;
        }
    }

    /// A member no longer reads any partition: its session is over.
    pub fn give_up_all(&mut self, member: u32) {
        for place in self.partitions.values_mut().filter(|place| place.owner == Some(member)) {
            place.owner = None;
        }
    }

    /// Returns whether a member reads a partition and has passed all records that were delivered
    /// before.
    pub fn is_read(&self, key: GroupPartitionKey) -> bool {
        let Some(place) = self.partitions.get(&key).filter(|it| it.owner.is_some()) else {
            return false;
        };
        let end = place.delivered.last_key_value().map_or(0, |(_, end)| *end);
        place.position.is_some_and(|position| position >= end)
    }

    /// Returns the offset below which no reader may start from now on.
    pub fn floor(&self, key: GroupPartitionKey) -> Option<u64> {
        self.partitions.get(&key).and_then(|place| place.acked)
    }

    /// A reader starts at the group's offset. `floor` is that of the moment before the request.
    pub fn start(
        &mut self,
        topic: &str,
        key: GroupPartitionKey,
        floor: Option<u64>,
        start: GroupStart,
    ) {
        let GroupStart { offset, log_start, is_fallback } = start;
        let log_start = self.starts(key, log_start);
        self.partitions.entry(key).or_default().position = Some(offset);
        if is_fallback {
            return;
        }
        if let Some(floor) = floor.filter(|floor| offset < *floor) {
            self.violations.push(format!(
                "{key:?} starts at {offset}, although a commit of {floor} was acknowledged"
            ));
        }
        let missing = self.first_undelivered(key, log_start);
        if missing < offset {
            self.violations.push(format!(
                "{key:?} starts at {offset} and skips {missing}; the log starts at {log_start}"
            ));
        }
        let is_earlier = |id: &u64| *id != key.topic_id;
        if !self.commit_sent.contains(&key.topic_id)
            && self.committed_topics.get(topic).is_some_and(|ids| ids.iter().any(is_earlier))
        {
            self.violations.push(format!(
                "{key:?} of {topic} starts at {offset} without an error, although the group's \
                 commits are of an earlier topic"
            ));
        }
    }

    /// A response says that the log starts here. Returns the highest one of all responses.
    pub fn starts(&mut self, key: GroupPartitionKey, log_start: u64) -> u64 {
        let place = self.partitions.entry(key).or_default();
        place.log_start = place.log_start.max(log_start);
        place.log_start
    }

    /// A response says that the group's offset is out of range, and that the log starts here.
    pub fn out_of_range(&mut self, key: GroupPartitionKey, floor: Option<u64>, log_start: u64) {
        self.starts(key, log_start);
        // A commit without a response may have been stored.
        let was_sent = self.partitions.get(&key).is_some_and(|place| place.has_commits);
        if !was_sent || floor.is_some_and(|floor| floor >= log_start) {
            self.violations.push(format!(
                "{key:?}: the committed offset is called out of range; {floor:?} was acknowledged \
                 and the log starts at {log_start}"
            ));
        }
    }

    /// Returns the floors of all partitions that have one.
    pub fn floors(&self) -> BTreeMap<GroupPartitionKey, u64> {
        let floors = self.partitions.iter().map(|(key, place)| (*key, place.acked));
        floors.filter_map(|(key, floor)| Some((key, floor?))).collect()
    }

    /// Returns the first offset from `from` on that was not delivered.
    pub fn first_undelivered(&self, key: GroupPartitionKey, from: u64) -> u64 {
        let Some(place) = self.partitions.get(&key) else { return from };
        let before = place.delivered.range(..=from).next_back();
        before.map_or(from, |(_, end)| from.max(*end))
    }

    /// The owner's reader has reached the end of the partition.
    pub fn caught_up(&mut self, key: GroupPartitionKey) {
        let place = self.partitions.entry(key).or_default();
        let end = place.delivered.last_key_value().map_or(0, |(_, end)| *end);
        place.position = place.position.max(Some(end));
    }

    /// A member got the records from `first` to before `end`.
    pub fn deliver(&mut self, member: u32, key: GroupPartitionKey, first: u64, end: u64) {
        if first >= end {
            return;
        }
        let place = self.partitions.entry(key).or_default();
        if place.owner != Some(member) {
            let what = format!("{key:?} is delivered to member {member}, which does not read it");
            self.violations.push(what);
        }
        let (mut start, mut stop, mut known) = (first, end, 0);
        let touching: Vec<(u64, u64)> = place
            .delivered
            .range(..=end)
            .rev()
            .take_while(|(_, stop)| **stop >= first)
            .map(|(start, stop)| (*start, *stop))
            .collect();
        for (begin, until) in touching {
            known += until.min(end).saturating_sub(begin.max(first));
            place.delivered.remove(&begin);
            (start, stop) = (start.min(begin), stop.max(until));
        }
        place.delivered.insert(start, stop);
        place.position = Some(end);
        self.counts.delivered += end - first;
        self.counts.repeated += known;
    }

    /// A member sends a commit.
    pub fn send_commit(&mut self, member: u32, key: GroupPartitionKey, offset: u64) -> SentCommit {
        let place = self.partitions.entry(key).or_default();
        place.has_commits = true;
        self.commit_sent.insert(key.topic_id);
        self.sent += 1;
        let other_owner = place.owner.filter(|owner| *owner != member);
        SentCommit { key, offset, number: self.sent, member, other_owner }
    }

    /// A copy of a commit that was sent before is sent.
    pub fn send_copy(&mut self, commit: SentCommit) -> SentCommit {
        let owner = self.partitions.get(&commit.key).and_then(|place| place.owner);
        SentCommit { other_owner: owner.filter(|owner| *owner != commit.member), ..commit }
    }

    /// A commit was acknowledged.
    pub fn commit_acked(&mut self, topic: &str, commit: SentCommit) {
        let SentCommit { key, offset, number, member, other_owner } = commit;
        self.counts.commits += 1;
        if let Some(other) = other_owner {
            self.violations.push(format!(
                "{key:?}: the commit of {offset} by member {member} is acknowledged, although \
                 {other} read the partition before it was sent"
            ));
        }
        let place = self.partitions.entry(key).or_default();
        if let Some((_, later)) =
            place.last_acked.filter(|last| last.0 > number && last.1 != offset)
        {
            self.violations.push(format!(
                "{key:?}: the commit of {offset} by member {member} is acknowledged after a later \
                 one of {later}"
            ));
        }
        place.last_acked = place.last_acked.max(Some((number, offset)));
        place.acked = place.acked.max(Some(offset));
        self.committed_topics.entry(topic.to_owned()).or_default().insert(key.topic_id);
    }

    /// A replica's committed offset fell.
    pub fn offset_fell(&mut self, key: GroupPartitionKey, from: u64, to: Option<u64>) {
        self.violations.push(format!("{key:?}: the committed offset fell from {from} to {to:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: GroupPartitionKey = GroupPartitionKey { topic_id: 7, number: 1 };

    fn at(offset: u64) -> GroupStart {
        GroupStart { offset, log_start: 0, is_fallback: false }
    }

    /// Member 1 reads 0..10 and commits 10, then member 2 takes over.
    fn handed_over() -> GroupChecker {
        let mut group = GroupChecker::default();
        group.claim(1, KEY, None);
        group.start("t", KEY, None, at(0));
        group.deliver(1, KEY, 0, 4);
        group.deliver(1, KEY, 4, 10);
        let commit = group.send_commit(1, KEY, 10);
        group.commit_acked("t", commit);
        group.give_up(1, KEY);
        group.claim(2, KEY, None);
        assert!(group.violations().is_empty());
        group
    }

    fn is_found(group: &GroupChecker, text: &str) -> bool {
        group.violations().len() == 1 && group.violations()[0].contains(text)
    }

    #[test]
    fn start_at_the_commit_is_correct() {
        let mut group = handed_over();
        assert_eq!(group.floor(KEY), Some(10));
        group.start("t", KEY, Some(10), at(10));
        assert!(group.is_read(KEY));
        group.deliver(2, KEY, 10, 12);
        assert!(group.violations().is_empty());
        let counts = GroupCounts { delivered: 12, repeated: 0, commits: 1, moves: 1 };
        assert_eq!(group.counts(), counts);
    }

    #[test]
    fn start_below_a_commit_or_beyond_the_delivered_records_is_found() {
        let mut group = handed_over();
        group.start("t", KEY, Some(10), at(9));
        assert!(is_found(&group, "starts at 9, although a commit of 10"));
        let mut group = handed_over();
        group.start("t", KEY, Some(10), at(11));
        assert!(is_found(&group, "skips 10"));
        // Retention removed them.
        let mut group = handed_over();
        group.start("t", KEY, Some(10), GroupStart { log_start: 11, ..at(11) });
        assert!(group.violations().is_empty());
        group.start("t", KEY, Some(10), GroupStart { is_fallback: true, ..at(0) });
        assert!(group.violations().is_empty());
    }

    #[test]
    fn two_readers_and_a_commit_of_a_former_one_are_found() {
        let mut group = handed_over();
        group.claim(3, KEY, None);
        assert!(is_found(&group, "read by member 2 and by 3"));
        let mut group = handed_over();
        let commit = group.send_commit(1, KEY, 10);
        group.commit_acked("t", commit);
        assert!(is_found(&group, "although 2 read the partition"));
        let mut group = handed_over();
        group.deliver(1, KEY, 10, 11);
        assert!(is_found(&group, "which does not read it"));
    }

    #[test]
    fn late_copy_of_a_commit_must_have_no_effect() {
        let mut group = GroupChecker::default();
        group.claim(1, KEY, None);
        group.deliver(1, KEY, 0, 10);
        // No response.
        let late = group.send_commit(1, KEY, 5);
        let same = group.send_commit(1, KEY, 10);
        let commit = group.send_commit(1, KEY, 10);
        group.commit_acked("t", commit);
        assert_eq!(group.floor(KEY), Some(10));
        let copy = group.send_copy(same);
        group.commit_acked("t", copy);
        assert!(group.violations().is_empty());
        let copy = group.send_copy(late);
        group.commit_acked("t", copy);
        assert!(is_found(
            &group,
            "commit of 5 by member 1 is acknowledged after a later one of 10"
        ));
    }

    #[test]
    fn copy_of_a_former_reader_and_a_fallen_offset_are_found() {
        let mut group = handed_over();
        let commit = group.send_commit(2, KEY, 12);
        group.give_up(2, KEY);
        group.claim(3, KEY, None);
        let copy = group.send_copy(commit);
        group.commit_acked("t", copy);
        assert!(is_found(&group, "although 3 read the partition"));
        let mut group = handed_over();
        group.send_commit(2, KEY, 5);
        group.offset_fell(KEY, 10, Some(5));
        assert!(is_found(&group, "fell from 10 to Some(5)"));
    }

    #[test]
    fn silent_start_in_a_topic_created_again_is_found() {
        let mut group = handed_over();
        let again = GroupPartitionKey { topic_id: 8, number: 1 };
        group.start("other", again, None, at(0));
        assert!(group.violations().is_empty());
        group.start("t", again, None, at(0));
        assert!(is_found(&group, "of an earlier topic"));
    }

    #[test]
    fn out_of_range_is_correct_only_below_the_log_start() {
        let mut group = handed_over();
        group.out_of_range(KEY, Some(10), 11);
        assert!(group.violations().is_empty());
        group.out_of_range(KEY, Some(10), 10);
        assert!(is_found(&group, "called out of range"));
        // Its outcome is unknown.
        let mut group = GroupChecker::default();
        group.send_commit(1, KEY, 5);
        group.out_of_range(KEY, None, 6);
        assert!(group.violations().is_empty());
        group.out_of_range(GroupPartitionKey { number: 2, ..KEY }, None, 6);
        assert!(is_found(&group, "called out of range"));
    }

    #[test]
    fn delivered_ranges_join() {
        let mut group = GroupChecker::default();
        group.claim(1, KEY, None);
        for (first, end) in [(5, 7), (0, 2), (2, 4), (3, 6), (9, 10)] {
            group.deliver(1, KEY, first, end);
        }
        assert_eq!((group.first_undelivered(KEY, 0), group.first_undelivered(KEY, 7)), (7, 7));
        assert_eq!(group.first_undelivered(KEY, 9), 10);
        assert_eq!(group.counts().repeated, 2);
    }
}
