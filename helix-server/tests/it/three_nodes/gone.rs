//! A leader whose process is gone is replaced at the end of its followers' promise; a leader that
//! is only silent is not suspected any earlier than before.

use std::sync::Arc;
use std::time::Duration;

use helix_server::limits::ELECTION_TIMEOUT;
use helix_server::raft::node_of;
use helix_server::shard::Shard;
use tokio::time::Instant;

use crate::support::soon;
use crate::trio::{NODES, Trio, TrioPlan};

/// Shortest wait of openraft's random timer after the promise.
const DRAW_MIN: Duration = Duration::from_millis(300);

/// Attempts to meet a machine that is not too busy.
const ATTEMPTS: usize = 6;

fn shard(trio: &Trio, node: u64) -> Arc<Shard> {
    trio.node(node).running.node().shard(1).expect("it is open")
}

/// Takes the leader of shard 1 away. Returns the time from its last confirmation by a majority
/// until another one is elected; `None` if it was no longer the leader.
///
/// The promise of a follower begins when it confirms the leader, which was after the leader had
/// sent its request. So the time has a lower bound even if the process stalls.
async fn replacement(trio: &mut Trio, take_away: impl FnOnce(&mut Trio, u64)) -> Option<Duration> {
    let old = trio.leaders().await[&1];
    let other = NODES.into_iter().find(|node| *node != old).unwrap();
    let (leader, follower) = (shard(trio, old), shard(trio, other));
    let mut leadership = follower.watch_leadership();
    let began = Instant::now();
    let confirmed_ago = leader.replica().confirmed_ago()?;
    take_away(trio, old);
    let elected = async {
        while follower.replica().leadership().leader.is_none_or(|leader| node_of(leader) == old) {
            assert!(leadership.changed().await, "the replica has stopped");
        }
    };
    soon(elected).await;
    Some(began.elapsed() + confirmed_ago)
}

/// Replaces leaders until the time of one is as expected. None is replaced within the promise.
async fn expect_replacement(
    take_away: fn(&mut Trio, u64),
    is_expected: impl Fn(Duration) -> bool,
    otherwise: &str,
) {
    let mut times = Vec::new();
    for _ in 0..ATTEMPTS {
        let mut trio = Trio::start(TrioPlan::linked().await).await;
        let time = replacement(&mut trio, take_away).await;
        trio.stop_all().await;
        let Some(time) = time else { continue };
        assert!(time >= ELECTION_TIMEOUT, "the promise was broken: {time:?}");
        if is_expected(time) {
            return;
        }
        times.push(time);
    }
    panic!("{otherwise}: {times:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_that_is_gone_is_replaced_at_the_end_of_the_promise() {
    // A busy machine may delay an election, and never hastens one.
    let is_early = |time: Duration| time < ELECTION_TIMEOUT + DRAW_MIN;
    expect_replacement(Trio::remove_links, is_early, "followers wait for the random timer").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_leader_is_replaced_after_the_random_wait() {
    // After a stall one follower may be isolated before it hears from the leader again. It suspects
    // the leader earlier than the other follower, by the length of the stall.
    let is_late = |time: Duration| time >= ELECTION_TIMEOUT + DRAW_MIN;
    let isolate = |trio: &mut Trio, old: u64| trio.isolate(old);
    expect_replacement(isolate, is_late, "a silent leader is suspected early").await;
}
