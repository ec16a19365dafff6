//! The election timing of a node. Every duration follows from one setting, the election timeout.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::runtime::TickGrid;
use super::types::{ReplicaId, node_of};
use crate::limits;

/// The election timeout of a node, and the durations that follow from it.
///
/// | duration | part | by default |
/// |---|---|---|
/// | Interval of a leader's heartbeats | 1/5 | 80 ms |
/// | Promise: time in which a follower votes for no other leader | 1 | 400 ms |
/// | Time for which a leader serves reads after a majority confirmed it: the lease | 5/6 | 333 ms |
/// | Silence of the majority after which a leader refuses appends | 7/4 | 700 ms |
/// | Age of an unfinished sync at which a leader transfers leadership | 3/2 | 600 ms |
/// | Time between two ranks of followers whose leader is gone | 1/10 | 40 ms |
/// | Random wait after the promise of followers whose leader is silent | 3/4 to 1 | 300 to 400 ms |
///
/// Only a leader whose process is gone is replaced right after the promise. Pauses of a busy
/// machine are silences, which the longer times bear. The random wait ends at a tick, of which
/// there is one for each heartbeat.
#[derive(Debug, Clone)]
pub struct ElectionTiming {
    timeout: Duration,
    /// Ticks of openraft, the same for all replicas of the node.
    ticks: TickGrid,
    /// Shortest election timeout of this node and of every peer that it has met, in milliseconds.
    shortest_ms: Arc<AtomicU64>,
    /// Longest one of these.
    longest_ms: Arc<AtomicU64>,
}

impl Default for ElectionTiming {
    fn default() -> Self {
        Self::new(limits::ELECTION_TIMEOUT)
    }
}

impl ElectionTiming {
    pub fn new(timeout: Duration) -> Self {
        let timeout = Duration::from_millis(millis(timeout).max(1));
        let known = || Arc::new(AtomicU64::new(millis(timeout)));
        let ticks = TickGrid::new(heartbeat_of(timeout));
        Self { timeout, ticks, shortest_ms: known(), longest_ms: known() }
    }

    /// Returns the election timeout: the time for which a follower keeps its promise.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    pub fn timeout_ms(&self) -> u64 {
        millis(self.timeout)
    }

    pub fn heartbeat_ms(&self) -> u64 {
        millis(heartbeat_of(self.timeout))
    }

    /// Returns the shortest random wait after a promise; the longest one is [`Self::timeout`].
    pub fn wait_min_ms(&self) -> u64 {
        (self.timeout_ms() * 3 / 4).max(self.heartbeat_ms() + 1)
    }

    /// Returns the time for which a leader serves reads after a majority has confirmed it.
    ///
    /// Less than the shortest promise of all peers, so that clocks may differ by a fifth.
    pub fn read_lease(&self) -> Duration {
        Duration::from_millis(self.shortest_ms.load(Ordering::Relaxed)) * 5 / 6
    }

    /// Returns the silence after which followers may replace a leader whose process is gone.
    ///
    /// The leader may be of a release that does not know this node's timeout, so its lease may
    /// follow its own.
    pub fn promise_to_gone(&self) -> Duration {
        Duration::from_millis(self.longest_ms.load(Ordering::Relaxed))
    }

    /// Returns the time without confirmation after which a leader counts as partitioned.
    pub fn partitioned_after(&self) -> Duration {
        self.timeout * 7 / 4
    }

    /// Returns the time without confirmation after which a leader no longer waits for the outcome
    /// of what it has proposed. By then another leader has usually been elected.
    pub fn abandoned_after(&self) -> Duration {
        self.timeout * 21 / 4
    }

    /// Returns the ticks of openraft: a leader sends heartbeats at each of them.
    pub fn ticks(&self) -> TickGrid {
        self.ticks
    }

    /// Returns the interval of a shard's check whether its leader is partitioned.
    pub fn check_interval(&self) -> Duration {
        self.timeout / 4
    }

    /// Returns the time until a shard's next check, which coincides with the checks of the others.
    pub fn until_check(&self) -> Duration {
        self.ticks.with_period(self.check_interval()).until_next()
    }

    /// Returns the age of an unfinished sync at which a leader transfers leadership.
    pub fn stalled_after(&self) -> Duration {
        self.timeout * 3 / 2
    }

    /// Returns the time between two followers of neighbouring ranks.
    pub fn rank_step(&self) -> Duration {
        self.timeout / 10
    }

    /// Returns the delay of the first follower, since promises do not end at the same moment.
    pub fn rank_margin(&self) -> Duration {
        self.timeout / 40
    }

    /// Records the election timeout of a peer; 0 stands for a release that does not tell it.
    /// Returns whether it differs from this node's own.
    pub fn meet(&self, timeout_ms: u64) -> bool {
        let untold = millis(limits::ELECTION_TIMEOUT_UNTOLD);
        let theirs = if timeout_ms == 0 { untold } else { timeout_ms };
        self.shortest_ms.fetch_min(theirs, Ordering::Relaxed);
        self.longest_ms.fetch_max(theirs, Ordering::Relaxed);
        theirs != self.timeout_ms()
    }
}

/// Returns the interval of heartbeats, in whole milliseconds.
fn heartbeat_of(timeout: Duration) -> Duration {
    Duration::from_millis((millis(timeout) / 5).max(1))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Place of a follower in the order in which the followers of a lost leader ask for votes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElectionRank {
    place: u32,
    /// Places in one round; each follower has one of its own.
    places: u32,
}

impl ElectionRank {
    /// Ranks `own` among the voters other than `leader`: in the order in which they are preferred
    /// as leaders of the shard, and behind all others if it is not `fit`.
    ///
    /// Followers that agree on the voters have different ranks, fit or not.
    /// `None` if `own` is not one of them.
    pub fn of(
        shard_id: u64,
        voters: &BTreeSet<ReplicaId>,
        leader: ReplicaId,
        own: ReplicaId,
        is_fit: bool,
    ) -> Option<Self> {
        let count = voters.len();
        // The preferred leader of shard s is the s-th voter; shard 0 has none.
        let first = usize::try_from(shard_id).ok()?.saturating_sub(1) % count.max(1);
        let turns = voters.iter().cycle().skip(first).take(count);
        let followers = || turns.clone().filter(|id| node_of(**id) != node_of(leader));
        let place = followers().position(|id| *id == own)?;
        let all = followers().count();
        let place = if is_fit { place } else { all + place };
        Some(Self { place: u32::try_from(place).ok()?, places: u32::try_from(2 * all).ok()? })
    }

    /// Returns the time from the end of the promise to this follower's request of a round.
    pub fn due(self, round: u32, timing: &ElectionTiming) -> Duration {
        timing.rank_margin() + timing.rank_step() * (self.place + round * self.places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    fn voters(nodes: &[u64]) -> BTreeSet<ReplicaId> {
        nodes.iter().map(|node| replica_id(*node, 1)).collect()
    }

    fn place(shard: u64, nodes: &[u64], leader: u64, own: u64, is_fit: bool) -> Option<u32> {
        let (leader, own) = (replica_id(leader, 1), replica_id(own, 1));
        ElectionRank::of(shard, &voters(nodes), leader, own, is_fit).map(|rank| rank.place)
    }

    #[test]
    fn followers_rank_by_their_preferred_place() {
        assert_eq!(place(1, &[1, 2, 3], 1, 2, true), Some(0));
        assert_eq!(place(1, &[1, 2, 3], 1, 3, true), Some(1));
        assert_eq!(place(3, &[1, 2, 3], 2, 3, true), Some(0), "the preferred leader is first");
        assert_eq!(place(3, &[1, 2, 3], 3, 1, true), Some(0), "the next one is first without it");
        assert_eq!(place(0, &[4, 7, 9], 7, 4, true), Some(0));
        assert_eq!(place(0, &[4, 7, 9], 7, 9, true), Some(1));
        assert_eq!(place(1, &[1, 2], 1, 3, true), None, "a learner has no rank");
        assert_eq!(place(1, &[1, 2], 1, 1, true), None, "the leader has no rank");
        assert_eq!(place(1, &[], 1, 1, true), None);
    }

    /// Followers with any claims of fitness never ask for votes at the same time.
    #[test]
    fn no_two_followers_have_the_same_rank() {
        for count in 2..=5 {
            let nodes: Vec<u64> = (1..=count).collect();
            for (shard, leader) in (0..8).flat_map(|shard| (1..=count).map(move |it| (shard, it))) {
                for fitness in 0..1_u32 << count {
                    let is_fit = |node: u64| fitness >> (node - 1) & 1 == 1;
                    let others = nodes.iter().filter(|node| **node != leader);
                    let places: Vec<(bool, u32)> = others
                        .map(|own| {
                            (
                                is_fit(*own),
                                place(shard, &nodes, leader, *own, is_fit(*own)).unwrap(),
                            )
                        })
                        .collect();
                    let distinct: BTreeSet<u32> = places.iter().map(|(_, place)| *place).collect();
                    assert_eq!(distinct.len(), places.len(), "{shard} {leader} {fitness:b}");
                    let worst_fit = places.iter().filter(|it| it.0).map(|it| it.1).max();
                    let best_unfit = places.iter().filter(|it| !it.0).map(|it| it.1).min();
                    if let (Some(worst_fit), Some(best_unfit)) = (worst_fit, best_unfit) {
                        assert!(worst_fit < best_unfit, "fit followers come first");
                    }
                    assert!(*distinct.last().unwrap() < 2 * u32::try_from(count - 1).unwrap());
                }
            }
        }
    }

    #[test]
    fn rounds_do_not_overlap() {
        let timing = ElectionTiming::default();
        let rank = |own, fit| {
            ElectionRank::of(1, &voters(&[1, 2, 3]), replica_id(1, 1), replica_id(own, 1), fit)
        };
        let (first, last) = (rank(2, true).unwrap(), rank(3, false).unwrap());
        assert_eq!(first.due(0, &timing), Duration::from_millis(10));
        assert_eq!(last.due(0, &timing), Duration::from_millis(10 + 3 * 40));
        assert_eq!(first.due(1, &timing) - last.due(0, &timing), timing.rank_step());
    }

    #[test]
    fn lease_expires_before_another_leader_can_be_elected() {
        for timeout_ms in [150, 300, 600, 3_000] {
            let timing = ElectionTiming::new(Duration::from_millis(timeout_ms));
            assert!(
                timing.read_lease() * 6 / 5 <= timing.timeout(),
                "clocks may differ by a fifth"
            );
            assert!(timing.heartbeat_ms() * 4 <= millis(timing.read_lease()));
            assert!(timing.heartbeat_ms() < timing.wait_min_ms());
            assert!(timing.wait_min_ms() < timing.timeout_ms());
        }
    }

    #[test]
    fn a_peer_with_a_shorter_promise_shortens_the_lease() {
        let timing = ElectionTiming::default();
        let lease_of = |timeout| Duration::from_millis(timeout) * 5 / 6;
        assert_eq!(timing.read_lease(), lease_of(400));
        assert!(!timing.meet(400));
        assert_eq!(timing.promise_to_gone(), Duration::from_millis(400));
        assert!(timing.meet(0), "older releases have 600 ms");
        assert_eq!(timing.promise_to_gone(), Duration::from_millis(600));
        assert_eq!(timing.read_lease(), lease_of(400));
        assert!(timing.meet(300));
        assert_eq!(timing.read_lease(), lease_of(300));
        assert!(!timing.meet(400));
        assert_eq!(timing.read_lease(), lease_of(300), "it may still be a voter");
    }
}
