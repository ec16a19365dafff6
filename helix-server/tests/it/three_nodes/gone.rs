//! A leader whose process is gone is replaced at the end of its followers' promise; a leader that
//! is only silent is not suspected any earlier than before.

use std::time::Duration;

use helix_server::limits::ELECTION_TIMEOUT;
use helix_server::raft::node_of;
use tokio::time::Instant;

use crate::support::soon;
use crate::trio::{NODES, Trio, TrioPlan};

/// A follower may have last heard from the leader this long ago: a heartbeat and its tick.
const HEARD_AGO_MAX: Duration = Duration::from_millis(140);

/// Shortest wait of openraft's random timer after the promise.
const DRAW_MIN: Duration = Duration::from_millis(300);

/// Takes the leader of shard 1 away, and returns the time until another one is elected.
async fn replacement(trio: &mut Trio, take_away: impl FnOnce(&mut Trio, u64)) -> Duration {
    let old = trio.leaders().await[&1];
    let other = NODES.into_iter().find(|node| *node != old).unwrap();
    let shard = trio.node(other).running.node().shards().into_iter().find(|it| it.id() == 1);
    let shard = shard.unwrap();
    let mut leadership = shard.watch_leadership();
    let began = Instant::now();
    take_away(trio, old);
    let elected = async {
        while shard.replica().leadership().leader.is_none_or(|leader| node_of(leader) == old) {
            assert!(leadership.changed().await, "the replica has stopped");
        }
    };
    soon(elected).await;
    began.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_that_is_gone_is_replaced_at_the_end_of_the_promise() {
    // A busy machine may delay an election, and never hastens one.
    let mut times = Vec::new();
    for _ in 0..6 {
        let mut trio = Trio::start(TrioPlan::linked().await).await;
        let time = replacement(&mut trio, Trio::remove_links).await;
        trio.stop_all().await;
        assert!(time >= ELECTION_TIMEOUT - HEARD_AGO_MAX, "the promise was broken: {time:?}");
        times.push(time);
        if time < ELECTION_TIMEOUT + DRAW_MIN - HEARD_AGO_MAX {
            return;
        }
    }
    panic!("followers wait for the random timer: {times:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_leader_is_replaced_after_the_random_wait() {
    let mut trio = Trio::start(TrioPlan::linked().await).await;
    let time = replacement(&mut trio, |trio, old| trio.isolate(old)).await;
    assert!(time >= ELECTION_TIMEOUT + DRAW_MIN - HEARD_AGO_MAX, "{time:?}");
    trio.stop_all().await;
}
