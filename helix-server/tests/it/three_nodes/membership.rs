//! Adding, removing and replacing nodes under load: no acked record is lost or duplicated, and no
//! append fails at a client that retries.

// Tests delete data directories.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::Duration;

use helix_client::{Client, Config, NewTopic, Producer, ProducerOptions};
use helix_proto::log::v1::{
    DeleteTopicRequest, ErrorReason, FetchRequest, GetMetadataRequest, GetNodeStatusRequest,
    GetTopicRequest, HealthReason, ListGroupsRequest, ListTopicsRequest, MembershipChangeKind,
    MembershipPhase, ReadSource, Record, SubscribeRequest, WatchMetadataRequest,
};
use helix_server::config::ServerConfig;
use helix_server::log::{ClusterCommand, ProducerOwner};
use helix_server::node::{LogLimits, Node};
use helix_server::shard::ReadFrom;

use crate::fleet::{AppendLoad, Fleet, until_long};
use crate::simulated_trio::SimulatedTrio;
use crate::support::{TestServer, append_request, earliest, reason, records, soon};
use crate::trio::{NODES, Trio, TrioPlan, health, launch, shard_status, until};

/// Older records in a separate topic with a partition in each shard.
struct OldRecords {
    client: Client,
    count: u64,
}

const OLD_RECORD_BYTES: usize = 100_000;

impl OldRecords {
    async fn new(client: Client) -> Self {
        client.admin().create_topic(&NewTopic::new("past", 2)).await.unwrap();
        Self { client, count: 0 }
    }

    /// Writes until every node has purged the start of its logs.
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
        let mut value = vec![7; OLD_RECORD_BYTES];
        value[..8].copy_from_slice(&self.count.to_le_bytes());
        let record = Record { value: Some(value.into()), ..Record::default() };
        for partition in 0..2 {
            let ack = producer.append("past", partition, &[record.clone()][..]).await.unwrap();
            assert_eq!(ack.first_offset, Some(self.count));
        }
        self.count += 1;
    }

    /// Expects all records at their offsets on every running node.
    async fn expect_all(&self, fleet: &Fleet) {
        for id in fleet.ids() {
            let node = fleet.node(id).running.node();
            for partition in 0..2 {
                let mut next = 0;
                let located = until("the node has all records", async || {
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
                        assert!(batch.payload.len() > OLD_RECORD_BYTES, "node {id}, offset {next}");
                        assert!(batch.payload[..64].windows(8).any(is_it), "node {id}: {next}");
                        next += 1;
                    }
                }
            }
        }
    }
}

/// The logs are purged when nodes are added: each gets a snapshot and fetches records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_grows_to_five_and_shrinks_to_three_under_load() {
    let mut fleet = Fleet::with_short_logs(&[1]).await;
    let client = fleet.client();
    let mut old = OldRecords::new(client.clone()).await;
    let load = AppendLoad::start(&client);
    for node in 2..=5 {
        old.write(&fleet).await;
        fleet.grow(node).await;
        for shard in 1..=2 {
            let begins = shard_status(fleet.node(node), shard).await.purged_index;
            assert!(begins > 0, "node {node} got the whole log of shard {shard}");
        }
    }
    assert_eq!(fleet.metadata().await.nodes.len(), 5);
    // The first node leads most shards, if not all.
    let first = fleet.leader(0).await;
    let mut gone = vec![fleet.shrink(first).await];
    let next = fleet.ids()[1];
    gone.push(fleet.shrink(next).await);
    assert_eq!(fleet.metadata().await.nodes.len(), 3);
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    old.expect_all(&fleet).await;
    for node in gone {
        node.running.shutdown().await;
    }
    fleet.stop_all().await;
}

/// Clients configured with one node, which is removed while they are idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_client_finds_the_remaining_nodes() {
    let mut fleet = Fleet::of(&[1]).await;
    // One client sent a request before other nodes joined; the other never sent one.
    let (known, fresh) = (fleet.client(), fleet.client());
    let append = async |client: &Client, text: &str| {
        let producer = client.producer(ProducerOptions::default());
        soon(producer.append("default", 0, &records(&[text])[..])).await.unwrap()
    };
    append(&known, "first").await;
    fleet.grow(2).await;
    fleet.grow(3).await;
    let removed = fleet.shrink(1).await;
    until("the removed node reports it", async || {
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

/// Expects that a removed node answers nothing from its old copy of the cluster's state.
async fn expect_no_old_data(removed: &TestServer) {
    let name = || "default".to_owned();
    let (mut topics, mut cluster, mut groups) =
        (removed.topics(), removed.cluster(), crate::groups::groups(removed));
    let mut refusals = vec![
        topics.list_topics(ListTopicsRequest::default()).await.err(),
        topics.get_topic(GetTopicRequest { name: name() }).await.err(),
        topics.delete_topic(DeleteTopicRequest { name: name(), topic_id: 0 }).await.err(),
        cluster.get_metadata(GetMetadataRequest::default()).await.err(),
        cluster.watch_metadata(WatchMetadataRequest::default()).await.err(),
        groups.list_groups(ListGroupsRequest::default()).await.err(),
    ];
    let read = FetchRequest {
        partitions: vec![earliest(0)],
        source: ReadSource::AnyReplica.into(),
        ..FetchRequest::default()
    };
    refusals.push(removed.consume().fetch(read).await.err());
    for (at, refused) in refusals.into_iter().enumerate() {
        let refused = refused.unwrap_or_else(|| panic!("call {at} was answered"));
        assert_eq!(reason(&refused), ErrorReason::NotLeader, "call {at}: {refused:?}");
        let explains = refused.message().contains("was removed from this cluster");
        assert!(explains, "call {at}: {refused:?}");
    }
    cluster.get_node_status(GetNodeStatusRequest::default()).await.unwrap();
    // A client that is to stay at this node does not retry without effect.
    let mut config = Config::new([removed.running.local_addr().to_string()]);
    config.request_timeout = Duration::from_secs(3600);
    config.leave_removed_nodes = false;
    let refused = soon(Client::connect(config)).await.unwrap_err();
    assert!(refused.is(ErrorReason::NotLeader), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_node_refuses_requests_and_calls_no_election() {
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
    // Otherwise leadership may be balanced meanwhile, which begins terms too.
    let admin = fleet.admin();
    until("leadership is balanced", async || {
        admin.balance_leaders().await.ok()?.is_empty().then_some(())
    })
    .await;
    let terms = term(&fleet, stays);
    until("the removed node reports it", async || {
        let issues = health(&removed).await.issues;
        issues.iter().any(|issue| issue.reason() == HealthReason::Removed).then_some(())
    })
    .await;
    let refused = removed.produce().append(append_request(&["x"])).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::NotLeader);
    assert!(refused.message().contains("was removed from this cluster"), "{refused:?}");
    expect_no_old_data(&removed).await;
    assert_eq!(term(&fleet, stays), terms, "no node has called an election");
    let redirected = soon(async {
        loop {
            if let Err(status) = following.message().await {
                return status;
            }
        }
    });
    let redirected = reason(&redirected.await);
    let is_end = matches!(redirected, ErrorReason::NoLeader | ErrorReason::NotLeader);
    assert!(is_end, "no further records arrive there: {redirected:?}");
    removed.running.shutdown().await;
    // Its data can no longer be used.
    let others = fleet.ids();
    let admin = fleet.admin();
    let start = fleet.launch(leader, &others);
    let refused = until("it reports that it has data", async || {
        let added = admin.add_node(leader, &fleet.peer(leader), true).await;
        added.err().filter(|error| error.to_string().contains("empty data directory"))
    })
    .await;
    assert_eq!(refused.reason, Some(ErrorReason::MembershipChangeRefused));
    start.await.unwrap().running.shutdown().await;
    std::fs::remove_dir_all(fleet.data_dir(leader)).unwrap();
    fleet.grow(leader).await;
    fleet.stop_all().await;
}

/// The leader learns of its removal through shard 0 only, and leads its shards until then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_leader_is_removed_once_reachable() {
    let mut trio = Trio::start(TrioPlan::linked().await.steady()).await;
    let first = trio.leaders().await[&0];
    let leaving = first % 3 + 1;
    trio.transfer(1, leaving).await;
    trio.cut_between(first, leaving, true);
    let admin = trio.client().admin();
    let change = until_long("it counts as lost", async || {
        admin.remove_node(leaving, true, false).await.ok().flatten()
    })
    .await;
    // The change proceeds as far as it can without the node.
    until("shard 0 waits for the others", async || {
        let change = admin.membership_change(change.id).await.ok()?;
        let row = change.shards.iter().find(|row| row.shard_id == 0)?;
        row.blocked_reason.contains("the other shards go first").then_some(())
    })
    .await;
    trio.cut_between(first, leaving, false);
    until_long("the change is done", async || {
        let change = admin.membership_change(change.id).await.ok()?;
        (change.phase() == MembershipPhase::Done).then_some(())
    })
    .await;
    trio.stop_all().await;
}

/// Its disk is full, so it misses the entry of shard 0 that adds a node. It leads a shard in which
/// that node votes.
#[tokio::test]
async fn leader_behind_on_shard_0_removes_no_new_member() {
    let limits =
        LogLimits { checkpoint_bytes: 64 << 20, catch_up_bytes: 64 << 20, ..LogLimits::DEFAULT };
    let mut three = SimulatedTrio::start(limits).await;
    three.append(0).await;
    let is_free = |id: &u64| !three.nodes[id].cluster().is_leader();
    let behind = NODES.into_iter().find(is_free).unwrap();
    // The member list starts with the first command about members.
    three.first().await.cluster().set_draining(behind, false, false).await.unwrap();
    until("it knows the members", async || {
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
            // Ignored: leadership may be changing. Long names fill the segment with fewer rounds.
            let name = format!("{count:0>200}");
            let first = three.first().await;
            let _ = first.cluster().init_producer(&name, ProducerOwner::ANONYMOUS).await;
        }
        let stopped = three.nodes[&behind].stopped();
        stopped.iter().any(|(shard, _)| *shard == 0).then_some(())
    })
    .await;
    three.grow(4).await;
    three.transfer(behind).await;
    // Several rounds of its replica reconciliation.
    let taken_out = tokio::time::timeout(Duration::from_secs(3), async {
        until("a member is removed", async || {
            let replicas = three.shard(behind).replicas();
            (!replicas.contains(&4)).then_some(())
        })
        .await;
    });
    assert!(taken_out.await.is_err(), "by a leader that did not know it");
    disk.set_free_bytes(None);
    until("all nodes are healthy", async || {
        let is_well = |node: &Arc<Node>| node.unready().is_empty() && node.stopped().is_empty();
        three.nodes.values().all(is_well).then_some(())
    })
    .await;
    three.append(1).await;
    three.expect_equal(2).await;
    three.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wiped_node_is_replaced_under_a_new_generation() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = AppendLoad::start(&fleet.client());
    fleet.stop(3).await;
    std::fs::remove_dir_all(fleet.data_dir(3)).unwrap();
    let start = fleet.launch(3, &[1, 2, 3]);
    let node = fleet.node(1).running.node().clone();
    until("its peer port refuses votes", async || {
        let peers = node.peers();
        let why = peers.iter().find(|peer| peer.node_id == 3)?.last_error.clone()?;
        why.contains("is in no cluster yet").then_some(())
    })
    .await;
    let admin = fleet.admin();
    // A dry run has the same response and changes nothing.
    assert_eq!(admin.replace_node(3, 3, "", true).await.unwrap(), None);
    let change = admin.replace_node(3, 3, "", false).await.unwrap().unwrap();
    assert_eq!((change.kind(), change.lost_node_id), (MembershipChangeKind::Replace, 3));
    let again = admin.replace_node(3, 0, "", false).await.unwrap().unwrap();
    assert_eq!(again.id, change.id);
    fleet.arrived(3, start).await;
    fleet.done(change.id).await;
    fleet.settle().await;
    // A new generation votes in every shard now.
    for shard in fleet.node(1).running.node().shards() {
        let voters = shard.replica().voters();
        assert_eq!(voters[..2], [1 << 32 | 1, 2 << 32 | 1]);
        assert_eq!(voters[2] >> 32, 3);
        assert!(voters[2] & u64::from(u32::MAX) > 2, "not that of its replica of shard 0");
    }
    let nothing = admin.replace_node(3, 3, "", false).await.unwrap().unwrap();
    assert_eq!((nothing.id, nothing.phase()), (change.id, MembershipPhase::Done));
    // The same request to the node itself, with an address that it cannot dial.
    let own = fleet.node(3).running.node().clone();
    let nothing = own.cluster().replace_node(3, 3, "127.0.0.1:1".to_owned(), false).await;
    assert_eq!(nothing.unwrap().map(|it| it.id), Some(change.id));
    let refused = admin.replace_node(2, 2, "", false).await.unwrap_err();
    assert!(refused.to_string().contains("there is nothing to replace"), "{refused}");
    let counts = load.stop().await;
    fleet.expect_all(&counts).await;
    fleet.stop_all().await;
}

/// A node knows members added later only from the log of shard 0.
///
/// A node that lost that log takes no part before it has found the leader and every member that it
/// may have voted for, so other nodes must tell it their addresses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_without_the_cluster_log_finds_members_added_later() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    fleet.grow(4).await;
    fleet.stop(3).await;
    until("node 4 leads shard 0", async || {
        // Ignored: retried until the node is the leader.
        let _ = fleet.admin().transfer_leader(0, Some(4)).await;
        (fleet.leader(0).await == 4).then_some(())
    })
    .await;
    let state = fleet.data_dir(3).join("shard-0").join("state");
    let mut bytes = std::fs::read(&state).unwrap();
    bytes[30] ^= 1;
    std::fs::write(&state, bytes).unwrap();
    fleet.start_nodes(&[3], &[1, 2, 3]).await;
    fleet.settle().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_node_is_replaced_or_removed() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = AppendLoad::start(&fleet.client());
    let lost = fleet.leader(1).await;
    fleet.stop(lost).await;
    let others = fleet.ids();
    let start = fleet.launch(4, &others);
    let (admin, peer) = (fleet.admin(), fleet.peer(4));
    let change = until_long("the node can be added", async || {
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
        until("the node counts as down", async || admin.remove_node(lost, false, true).await.err())
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
async fn rejects_changes_that_cannot_complete() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let admin = fleet.admin();
    let peer = fleet.peer(4);
    let refused = admin.add_node(4, &peer, false).await.unwrap_err();
    assert!(refused.to_string().contains("cannot be reached"), "{refused}");
    let refused = admin.add_node(4, &fleet.peer(2), false).await.unwrap_err();
    assert!(refused.to_string().contains("this is node 2, not node 4"), "{refused}");
    let refused = admin.add_node(4, "nowhere", false).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::InvalidArgument));
    // A node that formed a cluster of its own is not empty.
    let alone = Fleet::new();
    let own = launch(ServerConfig { node_id: 4, ..alone.config(4, &[]) }).await.unwrap();
    let refused = admin.add_node(4, &alone.peer(4), false).await.unwrap_err();
    assert!(refused.to_string().contains("belongs to cluster"), "{refused}");
    own.running.shutdown().await;
    // With one node down, a second cannot be removed.
    fleet.stop(3).await;
    let refused =
        until("the node counts as down", async || admin.remove_node(2, false, true).await.err())
            .await;
    assert_eq!(refused.reason, Some(ErrorReason::NotEnoughNodes));
    assert!(refused.to_string().contains("it would leave 1 of 2 voters reachable"), "{refused}");
    let progress = admin.membership_change(0).await.unwrap_err();
    assert_eq!(progress.reason, Some(ErrorReason::InvalidArgument), "no change was started");
    fleet.start_nodes(&[3], &[1, 2, 3]).await;
    fleet.settle().await;
    fleet.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_concurrent_changes_is_made() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = AppendLoad::start(&fleet.client());
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
async fn membership_change_continues_after_its_leader_stops() {
    let mut fleet = Fleet::of(&[1, 2, 3]).await;
    let load = AppendLoad::start(&fleet.client());
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
    // The same for the removal, whether or not the new node is the leader.
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
async fn unfinished_addition_can_be_cancelled() {
    let fleet = Fleet::of(&[1, 2, 3]).await;
    let start = fleet.launch(4, &[1, 2, 3]);
    let (admin, peer) = (fleet.admin(), fleet.peer(4));
    let change = until_long("the node can be added", async || {
        admin.add_node(4, &peer, false).await.ok().flatten()
    })
    .await;
    // The node stops before or just after the change is done: it can be removed as lost.
    start.abort();
    let removal = until_long("it can be removed", async || {
        admin.remove_node(4, true, false).await.ok().flatten()
    })
    .await;
    fleet.done(removal.id).await;
    let first = fleet.done(change.id).await;
    let ends = [MembershipPhase::Failed, MembershipPhase::Done];
    assert!(ends.contains(&first.phase()), "{first:?}");
    until_long("the others vote as before", async || {
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

/// As a node that is removed and added again: it still applies its earlier registration when it
/// registers, and the removal of that one follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_registers_again_that_only_finds_its_earlier_registration() {
    let mut trio = Trio::start(TrioPlan::linked().await).await;
    let registered = |node: &TestServer| {
        let nodes = node.running.node().nodes();
        nodes.into_iter().find(|it| it.node_id == 3)
    };
    let before = registered(trio.node(1)).unwrap();
    trio.isolate(3);
    let later = ClusterCommand::RegisterNode {
        node_id: 3,
        endpoint: "gone.example:1".to_owned(),
        version: before.version.clone(),
        peer_addr: before.peer_addr.clone(),
    };
    trio.node(1).running.node().cluster().command(later).await.unwrap();
    let isolated = trio.node(3).running.node();
    assert_eq!(registered(trio.node(3)).as_ref(), Some(&before), "it knows no later one");
    isolated.announce(before.endpoint.clone()).await.unwrap();
    until("the isolated node has lost the leader", async || {
        isolated.cluster().leader_hint().is_none().then_some(())
    })
    .await;
    trio.heal(3);
    until("every node knows the address", async || {
        trio.nodes().all(|(_, node)| registered(node).as_ref() == Some(&before)).then_some(())
    })
    .await;
    trio.stop_all().await;
}
