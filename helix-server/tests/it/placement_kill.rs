//! Real processes that are killed while replicas move: no acked record is lost or duplicated, and
//! the moves come to their end.

// Lists data directories.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use helix_client::proto::log::v1::{MembershipPhase, PlacementShard};
use helix_client::{Client, Config, FetchOptions, Position, ReadStart};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use tokio::process::Child;

use crate::fleet::{AppendLoad, PARTITIONS, until_long};
use crate::process::{arguments, free_address, kill, seed, start};

const SHARDS: u32 = 2;

/// Moves during which nodes are killed.
const MOVES: usize = 4;

/// Four processes.
struct Processes {
    root: TempDir,
    listen: BTreeMap<u64, SocketAddr>,
    peer: BTreeMap<u64, SocketAddr>,
    running: BTreeMap<u64, Child>,
}

impl Processes {
    fn new() -> Self {
        let addresses = || (1..=4).map(|node| (node, free_address())).collect();
        let root = tempfile::tempdir().unwrap();
        Self { root, listen: addresses(), peer: addresses(), running: BTreeMap::new() }
    }

    fn start(&mut self, node: u64) {
        let directory = self.root.path().join(format!("node-{node}"));
        let mut all = arguments(self.listen[&node], &directory);
        all[0] = format!("--node-id={node}");
        all.push(format!("--shards={SHARDS}"));
        all.push(format!("--peer-addr={}", self.peer[&node]));
        // The last node joins a cluster of the others.
        let peers = self.peer.iter().filter(|(peer, _)| **peer < 4 || node == 4);
        all.extend(peers.map(|(peer, address)| format!("--peer={peer}={address}")));
        self.running.insert(node, start(&all));
    }

    async fn kill(&mut self, node: u64) {
        if let Some(process) = self.running.remove(&node) {
            kill(process).await;
        }
    }

    fn client(&self) -> Client {
        let config = Config {
            request_timeout: Duration::from_secs(120),
            attempt_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(1),
            backoff_max: Duration::from_millis(100),
            seed: Some(1),
            ..Config::new(self.listen.values().map(ToString::to_string))
        };
        Client::new(config).unwrap()
    }

    /// Returns the nodes with files of a shard.
    fn holders(&self, shard_id: u32) -> Vec<u64> {
        let has_log = |node: &u64| {
            let directory = self.root.path().join(format!("node-{node}/shard-{shard_id}"));
            std::fs::read_dir(directory).is_ok_and(|mut files| files.next().is_some())
        };
        self.listen.keys().copied().filter(has_log).collect()
    }
}

async fn shards(client: &Client) -> Option<Vec<PlacementShard>> {
    let found = client.admin().placement().await.ok()?;
    Some(found.shards.into_iter().filter(|it| it.shard_id != 0).collect())
}

/// Waits until each data shard has three replicas and nothing moves.
async fn settled(client: &Client) -> Vec<PlacementShard> {
    until_long("all replicas are placed", async || {
        let found = client.admin().placement().await.ok()?;
        let is_placed = |it: &PlacementShard| {
            it.r#move.is_none() && (it.shard_id == 0 || it.node_ids.len() == 3)
        };
        let is_settled = found.planned.is_empty() && found.shards.iter().all(is_placed);
        is_settled.then(|| found.shards.into_iter().filter(|it| it.shard_id != 0).collect())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moves_end_although_their_nodes_are_killed() {
    let mut rng = StdRng::seed_from_u64(seed(1));
    let mut cluster = Processes::new();
    (1..=4).for_each(|node| cluster.start(node));
    let client = cluster.client();
    let admin = client.admin();
    until_long("there is a placement", async || shards(&client).await).await;
    let peer = cluster.peer[&4].to_string();
    let change = until_long("node 4 can be added", async || {
        admin.add_node(4, &peer, false).await.ok().flatten()
    })
    .await;
    until_long("three replicas are wanted", async || admin.set_replicas(3).await.ok()).await;
    until_long("node 4 is added", async || {
        let seen = admin.membership_change(change.id).await.ok()?;
        (seen.phase() == MembershipPhase::Done).then_some(())
    })
    .await;
    let load = AppendLoad::start(&client);
    for _ in 0..MOVES {
        let rows = settled(&client).await;
        let row = rows.choose(&mut rng).unwrap();
        let (shard_id, from) = (row.shard_id, *row.node_ids.choose(&mut rng).unwrap());
        let to = (1..=4).find(|node| !row.node_ids.contains(node)).unwrap();
        until_long("the move is accepted", async || {
            let asked = admin.move_shard(shard_id, from, to).await.is_ok();
            let found = shards(&client).await?;
            let row = found.into_iter().find(|it| it.shard_id == shard_id)?;
            (asked || row.r#move.is_some() || row.node_ids.contains(&to)).then_some(())
        })
        .await;
        // Its source, its target, or any node; right after one another now and then.
        for _ in 0..rng.random_range(1..=2) {
            let node = match rng.random_range(0..3) {
                0 => from,
                1 => to,
                _ => rng.random_range(1..=4),
            };
            cluster.kill(node).await;
            cluster.start(node);
        }
        settled(&client).await;
    }
    let rows = settled(&client).await;
    for row in rows {
        until_long("files of removed replicas are deleted", async || {
            (cluster.holders(row.shard_id) == row.node_ids).then_some(())
        })
        .await;
    }
    let counts = load.stop().await;
    assert_eq!(counts.len(), PARTITIONS as usize);
    for (partition, count) in (0..).zip(counts) {
        let mut next = 0;
        until_long("all records are read once, in order", async || {
            while next < count {
                let start = ReadStart::new("default", partition, Position::Offset(next));
                let options = FetchOptions::default();
                let found = client.consumer().fetch(&[start], &options).await.ok()?.remove(0);
                if found.records.is_empty() {
                    return None;
                }
                for record in &found.records {
                    let value = record.value.as_deref().unwrap_or_default();
                    assert_eq!(value, next.to_string().as_bytes(), "partition {partition}");
                    next += 1;
                }
            }
            Some(())
        })
        .await;
    }
}
