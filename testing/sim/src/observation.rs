//! What has been seen of a replica so far, which the next look at it is held against.

use std::collections::BTreeMap;

use helix_wal::{Aside, LogId, Wal};

/// A vote: term, whom it is for, and whether that one is known to have been elected.
pub(crate) type Vote = (u64, u64, bool);

/// What is known of a replica.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Whether the last tick saw it running.
    pub(crate) is_up: bool,
    /// The log that the last tick saw. Where it was closed since, what it synced after that look
    /// and before its end is only known from here.
    pub(crate) wal: Option<Wal>,
    /// On stable storage for sure.
    pub(crate) stable: Option<LogId>,
    /// What was on disks that were emptied since, or in a log that was put aside. The cluster can
    /// lose one member: what only that one had beside another counts for it until it is replaced,
    /// or has all of it again.
    pub(crate) lost: Option<LogId>,
    /// Its log takes the place of a damaged one, and may lack something of that.
    pub(crate) in_repair: bool,
    /// How often its node's disks had been emptied.
    pub(crate) wipes: u64,
    pub(crate) vote: Option<Vote>,
    pub(crate) purged: Option<LogId>,
    /// Up to where committed entries have been compared in this life.
    pub(crate) compared: u64,
    pub(crate) committed: u64,
    pub(crate) leads_in: Option<u64>,
    /// Log start and high watermark by partition, in this life.
    pub(crate) partitions: BTreeMap<u64, (u64, u64)>,
    /// How often the shard was closed and opened again while its node went on.
    pub(crate) restarts: u64,
}

impl Seen {
    /// What the log of the last look has synced since, which another one may follow meanwhile.
    pub(crate) fn catch_up(&mut self) {
        let Some(wal) = &self.wal else { return };
        let state = wal.state();
        self.stable = state.synced.min(state.last);
    }

    /// It runs no more, as far as has been seen.
    pub(crate) fn end(&mut self) {
        self.catch_up();
        (self.is_up, self.wal) = (false, None);
    }

    /// Another log takes the place of the one that was looked at until now.
    pub(crate) fn begin_anew(&mut self, aside: &Aside) {
        *self = Self {
            in_repair: true,
            lost: self.stable.max(self.lost),
            // It goes on where it was known.
            vote: self.vote.filter(|_| aside.vote.is_some()),
            wipes: self.wipes,
            restarts: self.restarts,
            ..Self::default()
        };
    }
}
