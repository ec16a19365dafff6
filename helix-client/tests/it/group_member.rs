//! Heartbeats of a member at a coordinator that fails.

use std::time::Duration;

use crate::fake_cluster::FakeCluster;
use crate::{client, in_time, within_deadline};

/// The failed attempt may have taken a third of the session, and a second wait the rest of it.
#[tokio::test]
async fn a_repeated_heartbeat_does_not_wait() {
    let cluster = FakeCluster::start(1, 0.0).await;
    let session = Duration::from_secs(60);
    cluster.fail_heartbeats(2);
    let consumer =
        client(&cluster).consumer_group("g").topics(["t"]).session_timeout(session).join();
    let waits = within_deadline(async || {
        let seen = cluster.heartbeats();
        let joined = seen.iter().skip_while(|(has_joined, _)| !has_joined).take(3);
        let waits: Vec<Duration> = joined.map(|(_, wait)| *wait).collect();
        (waits.len() == 3).then_some(waits)
    })
    .await;
    assert_eq!(waits, [session / 3, Duration::ZERO, Duration::ZERO]);
    in_time(consumer.close()).await.unwrap();
}
