//! Rules about the log and the vote of one replica.

use helix_wal::{LogId, LogState, ReadMode, Wal};

use crate::observation::StoredVote;

/// Reason why a synced entry was not found.
pub(super) enum MissingEntry {
    Gone(String),
    Unreadable(String),
}

impl MissingEntry {
    pub(super) fn into_text(self) -> String {
        let (Self::Gone(text) | Self::Unreadable(text)) = self;
        text
    }
}

/// Checks that the last synced entry is in the recovered log or was purged.
pub(super) fn check_kept(wal: &Wal, state: &LogState, stable: LogId) -> Result<(), MissingEntry> {
    if state.purged.is_some_and(|purged| purged.index >= stable.index) {
        return Ok(());
    }
    match wal.log_id(stable.index, ReadMode::Blocking) {
        Ok(Some(Some(found))) if found == stable => Ok(()),
        // Replaced in a later term after the last check, which is on disk too.
        Ok(Some(Some(found))) if found.term > stable.term => Ok(()),
        Ok(found) => Err(MissingEntry::Gone(format!(
            "{stable:?} was synced, but is {found:?} after a restart"
        ))),
        Err(error) => {
            let text = format!("{stable:?} was synced, but after a restart: {error}");
            Err(MissingEntry::Unreadable(text))
        }
    }
}

/// Returns whether a vote goes back in terms, or changes within a term.
///
/// A replica that voted for one node and learns that another one was elected stores that as a vote
/// too, which is allowed.
pub(super) fn violates_vote_rules(before: StoredVote, now: StoredVote) -> bool {
    let changes = now.1 != before.1 && (before.2 || !now.2);
    now.0 < before.0 || now.0 == before.0 && changes
}

/// Parses a stored vote.
pub(super) fn read_vote(bytes: &[u8]) -> Option<StoredVote> {
    let (term, rest) = bytes.split_first_chunk()?;
    let (node, rest) = rest.split_first_chunk()?;
    Some((u64::from_le_bytes(*term), u64::from_le_bytes(*node), rest == [1]))
}

/// Returns the last index of a lost log, which ended with `lost`, that is committed.
///
/// Entries of a later term than `lost` were never in that log.
pub(super) fn committed_prefix(lost: Option<LogId>, commits: &[(u64, Wal)]) -> u64 {
    let Some(lost) = lost else { return 0 };
    let most = commits.iter().map(|(committed, _)| *committed).max().unwrap_or(0);
    let term_of = |index: u64| {
        let known = commits.iter().filter(|(committed, _)| *committed >= index);
        known.filter_map(|(_, wal)| wal.log_id(index, ReadMode::Blocking).ok()??).next()
    };
    let is_later = |index: u64| term_of(index).is_some_and(|id| id.term > lost.term);
    let mut required = lost.index.min(most);
    while required > 0 && is_later(required) {
        required -= 1;
    }
    required
}
