//! Decides whether the committed offset of one partition of a group is possible, after the changes
//! that one client has sent in order. Pure: it gets the client's events in the order in which they
//! happened. Each change but an undo sets another value.
//!
//! Rules:
//!
//! - A read returns the value of the last acknowledged change, or of a change without a known
//!   outcome that may still be applied.
//! - An acknowledged commit ends all earlier commits. Every other acknowledged change ends
//!   everything before it: a copy of it that arrives later has no effect and is not acknowledged,
//!   unless it is a commit that changes nothing.
//! - After a seek or a deletion no commit without an epoch is acknowledged.

use std::collections::BTreeSet;

/// A committed offset with its metadata; `None` if the group has none.
pub type StoredOffset = Option<(u64, String)>;

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupOffsetChange {
    /// Commit without a member, which names its epoch.
    Commit,
    /// Commit without a member and without an epoch.
    CommitWithoutEpoch,
    /// Commit of a member.
    MemberCommit,
    /// Seek.
    Seek,
    /// Undo of a seek.
    Undo,
    /// The offsets of the topic are forgotten.
    Forget,
    /// Deletion of the group.
    Delete,
}

impl GroupOffsetChange {
    fn is_commit(self) -> bool {
        matches!(self, Self::Commit | Self::CommitWithoutEpoch | Self::MemberCommit)
    }

    /// Returns whether an acknowledged change ends earlier ones of every kind.
    fn is_fence(self) -> bool {
        !matches!(self, Self::Commit | Self::CommitWithoutEpoch)
    }
}

/// A change that was sent, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentOffsetChange {
    /// Kind.
    pub kind: GroupOffsetChange,
    /// Number, in the order of the client's decisions.
    number: u64,
    /// Value that it sets; unknown for an undo.
    value: Option<StoredOffset>,
}

/// Checks the committed offset of one partition.
#[derive(Debug, Default)]
pub struct GroupOffsetChecker {
    /// Possible values after the last acknowledged change or read; unknown after an undo.
    current: Option<BTreeSet<StoredOffset>>,
    /// Changes that may still be applied.
    open: Vec<SentOffsetChange>,
    /// The group was sought or deleted.
    is_sought: bool,
    last: u64,
    violations: Vec<String>,
}

impl GroupOffsetChecker {
    /// Returns a checker of a group that does not exist.
    pub fn new() -> Self {
        Self { current: Some(BTreeSet::from([None])), ..Self::default() }
    }

    /// Returns the violations found so far.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Returns whether a seek or a deletion was acknowledged.
    pub fn is_sought(&self) -> bool {
        self.is_sought
    }

    /// Returns a new change to `value`, which may be applied from now on. `None`: the client cannot
    /// know the value.
    pub fn change(
        &mut self,
        kind: GroupOffsetChange,
        value: Option<StoredOffset>,
    ) -> SentOffsetChange {
        self.last += 1;
        let change = SentOffsetChange { kind, number: self.last, value };
        self.open.push(change.clone());
        change
    }

    /// The change was refused, and no copy of it was sent or will be.
    pub fn refused(&mut self, change: &SentOffsetChange) {
        self.open.retain(|open| open.number != change.number);
    }

    /// A copy of a change, or its first one, was acknowledged.
    pub fn acked(&mut self, change: &SentOffsetChange) {
        let SentOffsetChange { kind, number, value } = change;
        if *kind == GroupOffsetChange::CommitWithoutEpoch && self.is_sought {
            let what = format!("{change:?} is acknowledged after a seek or a deletion");
            self.violations.push(what);
        }
        let is_open = self.open.iter().any(|open| open.number == *number);
        if !is_open {
            // Ended: it may only be acknowledged if nothing changes.
            let changes_nothing = match kind {
                GroupOffsetChange::Forget => self.may_be(&None),
                _ if kind.is_commit() => value.as_ref().is_some_and(|value| self.may_be(value)),
                _ => false,
            };
            if !changes_nothing {
                self.violations.push(format!(
                    "{change:?} is acknowledged, although a later change or another copy of it \
                     was acknowledged before; the offset was {:?}",
                    self.possible()
                ));
            }
            return;
        }
        self.is_sought |= kind.is_fence() && *kind != GroupOffsetChange::MemberCommit;
        self.current = value.clone().map(|value| BTreeSet::from([value]));
        self.open.retain(|open| match kind {
            // Applied now, also if it is a copy: a second application would be refused.
            _ if kind.is_fence() && !kind.is_commit() => false,
            GroupOffsetChange::MemberCommit => open.kind == *kind && open.number > *number,
            // The group has no members now.
            _ if open.kind == GroupOffsetChange::MemberCommit => false,
            _ => !open.kind.is_commit() || open.number > *number,
        });
    }

    /// A member has left: its commits are no longer accepted, but may have been applied before.
    pub fn member_left(&mut self) {
        let is_of_member =
            |open: &mut SentOffsetChange| open.kind == GroupOffsetChange::MemberCommit;
        for ended in self.open.extract_if(.., is_of_member) {
            if let (Some(current), Some(value)) = (&mut self.current, ended.value) {
                current.insert(value);
            }
        }
    }

    /// A read that began after the last acknowledgement returned this value.
    pub fn read(&mut self, value: StoredOffset) {
        if !self.may_be(&value) {
            let possible = self.possible();
            self.violations.push(format!("the offset is {value:?} instead of {possible:?}"));
        }
        self.current = Some(BTreeSet::from([value]));
    }

    fn may_be(&self, value: &StoredOffset) -> bool {
        let has_undo = self.open.iter().any(|open| open.value.is_none());
        self.current.is_none() || has_undo || self.possible().contains(value)
    }

    /// Returns the values that a read may return, as far as they are known.
    fn possible(&self) -> BTreeSet<&StoredOffset> {
        let open = self.open.iter().filter_map(|open| open.value.as_ref());
        self.current.iter().flatten().chain(open).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u64) -> StoredOffset {
        Some((offset, format!("m{offset}")))
    }

    /// Commits 40, which is held back, and acknowledges another change.
    fn held(
        kind: GroupOffsetChange,
        value: Option<StoredOffset>,
    ) -> (GroupOffsetChecker, SentOffsetChange) {
        let mut group = GroupOffsetChecker::new();
        let first = group.change(GroupOffsetChange::Commit, Some(at(3)));
        group.acked(&first);
        let late = group.change(GroupOffsetChange::Commit, Some(at(40)));
        let next = group.change(kind, value);
        group.acked(&next);
        assert!(group.violations().is_empty());
        (group, late)
    }

    #[test]
    fn late_commit_after_any_acknowledged_change_is_found() {
        let cases = [
            (GroupOffsetChange::Commit, Some(at(5))),
            (GroupOffsetChange::MemberCommit, Some(at(5))),
            (GroupOffsetChange::Seek, Some(at(5))),
            (GroupOffsetChange::Undo, None),
            (GroupOffsetChange::Forget, Some(None)),
            (GroupOffsetChange::Delete, Some(None)),
        ];
        for (kind, value) in cases {
            let (mut group, _) = held(kind, value.clone());
            let after = value.clone().unwrap_or(at(3));
            group.read(after.clone());
            assert!(group.violations().is_empty(), "{kind:?}");
            group.read(at(40));
            assert_eq!(group.violations().len(), 1, "{kind:?}: its effect");
            let (mut group, late) = held(kind, value);
            group.read(after);
            group.acked(&late);
            assert_eq!(group.violations().len(), 1, "{kind:?}: its acknowledgement");
        }
    }

    #[test]
    fn late_seek_and_deletion_are_found() {
        for kind in [GroupOffsetChange::Seek, GroupOffsetChange::Delete] {
            let mut group = GroupOffsetChecker::new();
            let late = group.change(kind, Some(None));
            let seek = group.change(GroupOffsetChange::Seek, Some(at(5)));
            group.acked(&seek);
            let commit = group.change(GroupOffsetChange::Commit, Some(at(7)));
            group.acked(&commit);
            group.read(at(7));
            assert!(group.violations().is_empty());
            group.acked(&late);
            assert_eq!(group.violations().len(), 1);
        }
    }

    #[test]
    fn outcome_that_is_unknown_may_appear_until_it_is_ended() {
        let mut group = GroupOffsetChecker::new();
        let seek = group.change(GroupOffsetChange::Seek, Some(at(5)));
        let commit = group.change(GroupOffsetChange::Commit, Some(at(7)));
        group.acked(&commit);
        // It is not ordered after the seek, of which the client knew nothing.
        group.read(at(7));
        group.read(at(5));
        group.acked(&seek);
        assert!(group.violations().is_empty() && group.is_sought());
        let other = group.change(GroupOffsetChange::Seek, Some(at(9)));
        group.refused(&other);
        group.read(at(9));
        assert_eq!(group.violations().len(), 1);
    }

    #[test]
    fn repeated_commit_may_change_nothing() {
        let mut group = GroupOffsetChecker::new();
        let commit = group.change(GroupOffsetChange::Commit, Some(at(5)));
        group.acked(&commit);
        group.acked(&commit);
        assert!(group.violations().is_empty());
        let delete = group.change(GroupOffsetChange::Delete, Some(None));
        group.acked(&delete);
        let plain = group.change(GroupOffsetChange::CommitWithoutEpoch, Some(at(8)));
        group.acked(&plain);
        assert_eq!(group.violations().len(), 1);
    }

    #[test]
    fn commits_of_a_member_end_when_it_leaves() {
        let mut group = GroupOffsetChecker::new();
        let late = group.change(GroupOffsetChange::MemberCommit, Some(at(5)));
        group.read(at(5));
        group.read(None);
        group.member_left();
        group.acked(&late);
        assert_eq!(group.violations().len(), 1);
    }
}
