//! Nodes that are added, removed and replaced, under load: nothing acknowledged is lost, nothing is
//! there twice, and no append fails at a client that retries.

// A test may lose a folder.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Duration;

use helix_client::{Client, NewTopic, Producer, ProducerOptions};
use helix_proto::log::v1::{
    ErrorReason, HealthReason, MembershipChangeKind, MembershipPhase, ReadSource, Record,
    SubscribeRequest,
};
use helix_server::config::ServerConfig;
use helix_server::node::{LogLimits, Node};
use helix_server::shard::ReadFrom;

use crate::fleet::{Fleet, Load, until_long};
use crate::simulated_trio::Three;
use crate::support::{append_request, earliest, reason, records, soon};
use crate::trio::{NODES, Plan, Trio, health, launch, shard_status, until};

/// Records of before, in a topic of their own with a partition in each shard.
struct Past {
    client: Client,
    count: u64,
}

const PAST_BYTES: usize = 100_000;

impl Past {
    async fn new(client: Client) -> Self {
        client.admin().create_topic(&NewTopic::new("past", 2)).await.unwrap();
        Self { client, count: 0 }
    }

    /// Writes until no node has the beginning of its logs.
    async fn write(&mut self, fleet: &Fleet) {
        let producer = self.client.producer(ProducerOptions::default());
        let enough = self.count + 30;
        until("the logs are purged", async || {
            while self.count < enough {
                self.append(&producer).await;
            }
            self.append(&producer).await;
            for node in fleet.ids() {
                for shard in 1..=2 {
                    if shard_status(fleet.node(node), shard).await.purged_index == 0 {
                        return None;
                    }
                }
            }
            Some(())
        })
        .await;
    }

    async fn append(&mut self, producer: &Producer) {
        let mut value = vec![7; PAST_BYTES];
        value[..8].copy_from_slice(&self.count.to_le_bytes());
        let record = Record { value: Some(value.into()), ..Record::default() };
        for partition in 0..2 {
            let ack = producer.append("past", partition, &[record.clone()][..]).await.unwrap();
            assert_eq!(ack.first_offset, Some(self.count));
        }
        self.count += 1;
    }

    /// Every node that runs has them all, each in its place.
    async fn expect_all(&self, fleet: &Fleet) {
        for id in fleet.ids() {
            let node = fleet.node(id).running.node();
            for partition in 0..2 {
                let mut next = 0;
                let located = until("the node has it all", async || {
                    let located = node.locate("past", partition).ok()?;
                    let marks = located.shard.watermarks(located.partition).ok()?;
                    (marks.high_watermark == self.count).then_some(located)
                })
                .await;
                while next < self.count {
                    let (shard, from) = (&located.shard, ReadFrom::AnyReplica);
                    let read = shard.read(located.partition, next, None, 1 << 20, from).await;
                    for batch in read.unwrap().batches {
                        let is_it = |window: &[u8]| window == next.to_le_bytes();
                        assert_eq!(batch.first_offset, next, "node {id}");
                        assert!(batch.payload.len() > PAST_BYTES, "node {id}, offset {next}");
                        assert!(batch.payload[..64].windows(8).any(is_it), "node {id}: {next}");
                        next += 1;
                    }
                }
            }
        }
    }
}

/// The logs have no beginning any more when nodes come: each gets a snapshot and fetches records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_grows_to_five_and_shrinks_to_three_under_load() {
    let mut fleet = Fleet::with_short_logs(&[1]).await;
    let client = fleet.client();
    let mut past = Past::new(client.clone()).await;
    let load = Load::start(&client);
    for node in 2..=5 {
        past.write(&fleet).await;
        fleet.grow(node).await;
        for shard in 1..=2 {
            let begins = shard_status(fleet.node(node), shard).await.purged_index;
            assert!(begins > 0, "node {node} has got the whole log of shard {shard}");
        }
    }
    assert_eq!(fleet.metadata().await.nodes.len(), 5);
    // The first one leads most, if not all.
    let first = fleet.leader(0).await;
    let mut gone = vec![fleet.shrink(first).await];
    let next = fleet.ids()[1];
    gone.push(fleet.shrink(next).await);
    assert_eq!(fleet.metadata().await.nodes.len(), 3);
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    past.expect_all(&fleet).await;
    for node in gone {
        node.running.shutdown().await;
    }
    fleet.stop_all().await;
}

/// Clients that were told of one node, which is removed while they do nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_idles_while_its_node_is_removed_finds_the_others() {
    let mut fleet = Fleet::of(&[1]).await;
    // One has asked while there was no other node, and one has asked nothing at all.
    let (known, fresh) = (fleet.client(), fleet.client());
    let append = async |client: &Client, text: &str| {
        let producer = client.producer(ProducerOptions::default());
        soon(producer.append("default", 0, &records(&[text])[..])).await.unwrap()
    };
    append(&known, "first").await;
    fleet.grow(2).await;
    fleet.grow(3).await;
    let removed = fleet.shrink(1).await;
    until("the removed node says so", async || {
        let issues = health(&removed).await.issues;
        issues.iter().any(|issue| issue.reason() == HealthReason::Removed).then_some(())
    })
    .await;
    for client in [known, fresh] {
        append(&client, "again").await;
        let topics = soon(client.admin().topics("")).await.unwrap();
        assert_eq!(topics.len(), 1);
    }
    removed.running.shutdown().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_node_notices_refuses_and_disturbs_nobody() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let term = |fleet: &Fleet, node: u64| {
        let shards = fleet.node(node).running.node().shards();
        shards.iter().map(|shard| shard.status().term).collect::<Vec<_>>()
    };
    let leader = fleet.leader(1).await;
    let follow = SubscribeRequest {
        partitions: vec![earliest(0)],
        source: ReadSource::AnyReplica.into(),
        ..SubscribeRequest::default()
    };
    let following = fleet.node(leader).consume().subscribe(follow).await;
    let mut following = following.unwrap().into_inner();
    let removed = fleet.shrink(leader).await;
    let stays = fleet.ids()[0];
    let terms = term(&fleet, stays);
    until("the removed node says so", async || {
        let issues = health(&removed).await.issues;
        issues.iter().any(|issue| issue.reason() == HealthReason::Removed).then_some(())
    })
    .await;
    let refused = removed.produce().append(append_request(&["x"])).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::NotLeader);
    assert!(refused.message().contains("was removed from this cluster"), "{refused:?}");
    assert_eq!(term(&fleet, stays), terms, "nobody has called an election");
    let turned_away = soon(async {
        loop {
            if let Err(status) = following.message().await {
                return status;
            }
        }
    });
    assert_eq!(reason(&turned_away.await), ErrorReason::NoLeader, "nothing comes there any more");
    removed.running.shutdown().await;
    // Its data is of no use any more.
    let others = fleet.ids();
    let admin = fleet.admin();
    let start = fleet.launch(leader, &others);
    let refused = until("it says that it has data", async || {
        let added = admin.add_node(leader, &fleet.peer(leader), true).await;
        added.err().filter(|error| error.to_string().contains("empty data directory"))
    })
    .await;
    assert_eq!(refused.reason, Some(ErrorReason::MembershipChangeRefused));
    start.await.unwrap().running.shutdown().await;
    std::fs::remove_dir_all(fleet.folder(leader)).unwrap();
    fleet.grow(leader).await;
    fleet.stop_all().await;
}

/// It hears of its removal through shard 0 only, and goes on to lead what it leads until then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_shard_0s_leader_does_not_reach_is_removed_once_it_does() {
    let mut trio = Trio::start(Plan::linked().await).await;
    let first = trio.leaders().await[&0];
    let leaving = first % 3 + 1;
    trio.transfer(1, leaving).await;
    trio.part(first, leaving, true);
    let admin = trio.client().admin();
    let change = until_long("it is taken for lost", async || {
        admin.remove_node(leaving, true, false).await.ok().flatten()
    })
    .await;
    // As far as the change gets without it.
    until("shard 0 waits for the others", async || {
        let change = admin.membership_change(change.id).await.ok()?;
        let row = change.shards.iter().find(|row| row.shard_id == 0)?;
        row.blocked_reason.contains("the other shards go first").then_some(())
    })
    .await;
    trio.part(first, leaving, false);
    until_long("the change is done", async || {
        let change = admin.membership_change(change.id).await.ok()?;
        (change.phase() == MembershipPhase::Done).then_some(())
    })
    .await;
    trio.stop_all().await;
}

/// Its disk has no room for the cluster's log, so that it has not heard of a node that came. It
/// leads a shard in which that one votes.
#[tokio::test]
async fn a_leader_that_is_behind_with_shard_0_takes_out_nobody_who_has_come_since() {
    let limits = LogLimits { checkpoint_bytes: 64 << 20, catch_up_bytes: 64 << 20 };
    let mut three = Three::start(limits).await;
    three.append(0).await;
    let is_free = |id: &u64| !three.nodes[id].cluster().is_leader();
    let behind = NODES.into_iter().find(is_free).unwrap();
    // The list of the members begins with the first command that is about them.
    three.first().await.cluster().set_draining(behind, false, false).await.unwrap();
    until("it knows the list", async || {
        let cluster = three.nodes[&behind].cluster();
        cluster.machine().read(|state| state.members().is_known()).then_some(())
    })
    .await;
    let disk = three.disks.of(behind, 0);
    disk.set_free_bytes(Some(0));
    let mut count = 0;
    until("its replica of shard 0 stops", async || {
        for _ in 0..50 {
            count += 1;
            // Ignored: who leads may just change.
            let _ = three.first().await.cluster().init_producer(&format!("p{count}")).await;
        }
        let stopped = three.nodes[&behind].stopped();
        stopped.iter().any(|(shard, _)| *shard == 0).then_some(())
    })
    .await;
    three.grow(4).await;
    until("it leads the data shard", async || {
        let leader = three.leader().await;
        if leader != behind {
            // Ignored: looked at again, and repeated.
            let _ = three.shard(leader).transfer(Some(behind)).await;
        }
        three.shard(behind).is_leader().then_some(())
    })
    .await;
    // Some rounds of its looking after its replicas.
    let taken_out = tokio::time::timeout(Duration::from_secs(3), async {
        until("somebody is taken out", async || {
            let replicas = three.shard(behind).replicas();
            (!replicas.contains(&4)).then_some(())
        })
        .await;
    });
    assert!(taken_out.await.is_err(), "by a leader that had not heard of it");
    disk.set_free_bytes(None);
    until("all is well", async || {
        let is_well = |node: &Arc<Node>| node.unready().is_empty() && node.stopped().is_empty();
        three.nodes.values().all(is_well).then_some(())
    })
    .await;
    three.append(1).await;
    three.expect_equal(2).await;
    three.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wiped_node_is_replaced_by_itself_and_never_votes_as_it_was() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = Load::start(&fleet.client());
    fleet.stop(3).await;
    std::fs::remove_dir_all(fleet.folder(3)).unwrap();
    let start = fleet.launch(3, &[1, 2, 3]);
    let node = fleet.node(1).running.node().clone();
    until("its peer port takes no question of a vote", async || {
        let peers = node.peers();
        let why = peers.iter().find(|peer| peer.node_id == 3)?.last_error.clone()?;
        why.contains("is in no cluster yet").then_some(())
    })
    .await;
    let admin = fleet.admin();
    // The answer to a dry run is the same, and changes nothing.
    assert_eq!(admin.replace_node(3, 3, "", true).await.unwrap(), None);
    let change = admin.replace_node(3, 3, "", false).await.unwrap().unwrap();
    assert_eq!((change.kind(), change.lost_node_id), (MembershipChangeKind::Replace, 3));
    let again = admin.replace_node(3, 0, "", false).await.unwrap().unwrap();
    assert_eq!(again.id, change.id);
    fleet.arrived(3, start).await;
    fleet.done(change.id).await;
    fleet.settle().await;
    // Another generation votes now, in every shard.
    for shard in fleet.node(1).running.node().shards() {
        let voters = shard.replica().voters();
        assert_eq!(voters, [1 << 32 | 1, 2 << 32 | 1, 3 << 32 | 2]);
    }
    let nothing = admin.replace_node(3, 3, "", false).await.unwrap().unwrap();
    assert_eq!((nothing.id, nothing.phase()), (change.id, MembershipPhase::Done));
    // Also asked of itself, from where its own address may lead nowhere.
    let own = fleet.node(3).running.node().clone();
    let nothing = own.cluster().replace_node(3, 3, "127.0.0.1:1".to_owned(), false).await;
    assert_eq!(nothing.unwrap().map(|it| it.id), Some(change.id));
    let refused = admin.replace_node(2, 2, "", false).await.unwrap_err();
    assert!(refused.to_string().contains("there is nothing to replace"), "{refused}");
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    fleet.stop_all().await;
}

/// Beside what it was configured with a node knows of the others by the cluster's own log. One that
/// has lost that, and takes part in nothing before it has found the leader, and everybody whom it
/// may have voted for, has to be told of those who came later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_lost_the_clusters_log_finds_members_that_it_was_not_configured_with() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    fleet.grow(4).await;
    fleet.stop(3).await;
    until("node 4 leads shard 0", async || {
        // Ignored: it is asked for until it is so.
        let _ = fleet.admin().transfer_leader(0, Some(4)).await;
        (fleet.leader(0).await == 4).then_some(())
    })
    .await;
    let state = fleet.folder(3).join("shard-0").join("state");
    let mut bytes = std::fs::read(&state).unwrap();
    bytes[30] ^= 1;
    std::fs::write(&state, bytes).unwrap();
    fleet.start_nodes(&[3], &[1, 2, 3]).await;
    fleet.settle().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_is_replaced_by_another_one_or_removed() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = Load::start(&fleet.client());
    let lost = fleet.leader(1).await;
    fleet.stop(lost).await;
    let others = fleet.ids();
    let start = fleet.launch(4, &others);
    let (admin, peer) = (fleet.admin(), fleet.peer(4));
    let change = until_long("it can be taken in", async || {
        admin.replace_node(lost, 4, &peer, false).await.ok().flatten()
    })
    .await;
    fleet.arrived(4, start).await;
    fleet.done(change.id).await;
    fleet.settle().await;
    let lost = fleet.leader(1).await;
    fleet.stop(lost).await;
    let admin = fleet.admin();
    let refused =
        until("its absence is noticed", async || admin.remove_node(lost, false, true).await.err())
            .await;
    assert!(refused.to_string().contains("say that it is lost"), "{refused}");
    let change = admin.remove_node(lost, true, false).await.unwrap().unwrap();
    fleet.done(change.id).await;
    fleet.settle().await;
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_cannot_end_well_is_not_begun() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let admin = fleet.admin();
    let peer = fleet.peer(4);
    let refused = admin.add_node(4, &peer, false).await.unwrap_err();
    assert!(refused.to_string().contains("cannot be reached"), "{refused}");
    let refused = admin.add_node(4, &fleet.peer(2), false).await.unwrap_err();
    assert!(refused.to_string().contains("this is node 2, not node 4"), "{refused}");
    let refused = admin.add_node(4, "nowhere", false).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::InvalidArgument));
    // A cluster of its own is not empty.
    let alone = Fleet::new();
    let own = launch(ServerConfig { node_id: 4, ..alone.config(4, &[]) }).await.unwrap();
    let refused = admin.add_node(4, &alone.peer(4), false).await.unwrap_err();
    assert!(refused.to_string().contains("belongs to cluster"), "{refused}");
    own.running.shutdown().await;
    // One is down: a second one cannot go.
    fleet.stop(3).await;
    let refused =
        until("its absence is noticed", async || admin.remove_node(2, false, true).await.err())
            .await;
    assert_eq!(refused.reason, Some(ErrorReason::NotEnoughNodes));
    assert!(refused.to_string().contains("it would leave 1 of 2 voters reachable"), "{refused}");
    let progress = admin.membership_change(0).await.unwrap_err();
    assert_eq!(progress.reason, Some(ErrorReason::InvalidArgument), "nothing was begun");
    fleet.start_nodes(&[3], &[1, 2, 3]).await;
    fleet.settle().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_changes_at_once_one_is_made() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = Load::start(&fleet.client());
    let mut starts = Vec::new();
    for node in [4, 5] {
        starts.push((node, fleet.launch(node, &[1, 2, 3])));
        let (admin, peer) = (fleet.admin(), fleet.peer(node));
        until("the node waits", async || admin.add_node(node, &peer, true).await.ok()).await;
    }
    let (one, other) = (fleet.admin(), fleet.admin());
    let (peer_4, peer_5) = (fleet.peer(4), fleet.peer(5));
    let (four, five) =
        tokio::join!(one.add_node(4, &peer_4, false), other.add_node(5, &peer_5, false));
    let (change, refused, winner) = match (four, five) {
        (Ok(change), Err(refused)) => (change.unwrap(), refused, 4),
        (Err(refused), Ok(change)) => (change.unwrap(), refused, 5),
        both => panic!("{both:?}"),
    };
    assert_eq!(refused.reason, Some(ErrorReason::MembershipChangeInProgress));
    assert!(refused.to_string().contains(&format!("node {winner} is being added")), "{refused}");
    for (node, start) in starts {
        if node == winner {
            fleet.arrived(node, start).await;
        } else {
            start.abort();
        }
    }
    fleet.done(change.id).await;
    fleet.settle().await;
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_goes_on_when_its_leader_stops() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = Load::start(&fleet.client());
    let start = fleet.launch(4, &[1, 2, 3]);
    let (admin, peer) = (fleet.admin(), fleet.peer(4));
    let change = until_long("the node can be added", async || {
        admin.add_node(4, &peer, false).await.ok().flatten()
    })
    .await;
    let driver = fleet.leader(0).await;
    fleet.stop(driver).await;
    fleet.arrived(4, start).await;
    fleet.done(change.id).await;
    fleet.start_nodes(&[driver], &[1, 2, 3]).await;
    fleet.settle().await;
    // And so for the way back, with the new one at the wheel or not.
    let change = fleet.admin().remove_node(4, false, false).await.unwrap().unwrap();
    let driver = fleet.leader(0).await;
    fleet.stop(driver).await;
    fleet.done(change.id).await;
    if driver != 4 {
        fleet.stop(4).await;
        fleet.start_nodes(&[driver], &[1, 2, 3]).await;
    }
    fleet.settle().await;
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_addition_that_does_not_come_off_can_be_given_up() {
    let fleet = Fleet::of(&[1, 2, 3]).await;
    let start = fleet.launch(4, &[1, 2, 3]);
    let (admin, peer) = (fleet.admin(), fleet.peer(4));
    let change = until_long("the node can be added", async || {
        admin.add_node(4, &peer, false).await.ok().flatten()
    })
    .await;
    // It goes before it is done, or has just come: either way it can be removed as lost.
    start.abort();
    let removal = until_long("it can be removed", async || {
        admin.remove_node(4, true, false).await.ok().flatten()
    })
    .await;
    fleet.done(removal.id).await;
    let first = fleet.done(change.id).await;
    let ends = [MembershipPhase::Failed, MembershipPhase::Done];
    assert!(ends.contains(&first.phase()), "{first:?}");
    until_long("the others are as before", async || {
        let metadata = fleet.metadata().await;
        let is_as_before = |it: &helix_proto::log::v1::ShardRoute| {
            it.replicas == [1, 2, 3] && it.learners.is_empty()
        };
        metadata.shards.iter().all(is_as_before).then_some(())
    })
    .await;
    fleet.settle().await;
    fleet.stop_all().await;
}
