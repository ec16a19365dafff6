//! Whoever runs the cluster: trims, moves leaders, drains nodes, replaces the one that lost its
//! disks, and has nodes come and go. Repeats itself until what it began is done.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use helix_checker::Event;
use helix_client::{Client, Position};
use helix_proto::log::v1::{MembershipChange, MembershipPhase};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::time::sleep;

use crate::marks::Mark;
use crate::members::Order;
use crate::net::PEER_PORT;
use crate::plan::{Kind, Plan};
use crate::workload::{Scene, TOPIC, TOPIC_IS_THERE};

/// Mean pause between two things that it does.
const PACE: Duration = Duration::from_secs(2);

/// Pause before something is asked again.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

struct Operator {
    scene: Scene,
    client: Client,
    rng: StdRng,
    /// Ends that each partition once had.
    ends: BTreeMap<u32, Vec<u64>>,
}

pub async fn operate(scene: Scene) -> turmoil::Result {
    scene.turn(TOPIC_IS_THERE).await;
    let (client, rng) = (scene.client()?, scene.rng(scene.id()));
    let mut operator = Operator { client, rng, ends: BTreeMap::new(), scene };
    loop {
        let goes_on = operator.scene.pause(PACE, &mut operator.rng).await;
        // Also after the end: the replicas are to be equal then.
        if let Some(node) = operator.scene.members.lost() {
            operator.replace(node).await?;
        }
        if !goes_on {
            operator.scene.on_end();
            return Ok(());
        }
        operator.something().await?;
    }
}

impl Operator {
    fn wants(&mut self, kind: Kind, chance: f64) -> bool {
        self.scene.plan.kinds.contains(&kind) && self.rng.random_bool(chance)
    }

    async fn something(&mut self) -> turmoil::Result {
        if self.scene.plan.trims && self.rng.random_bool(0.5) {
            self.trim().await;
        }
        if self.wants(Kind::Transfer, 0.5) {
            self.transfer().await?;
        }
        if self.wants(Kind::Drain, 0.2) {
            self.drain().await;
        }
        if self.wants(Kind::Grow, 0.4) {
            self.grow_or_shrink().await?;
        }
        Ok(())
    }

    /// Trims to where a batch ends, which every end of a partition once was: a log that starts amid
    /// a batch gives all of that batch, which the checker would not know from a gap.
    async fn trim(&mut self) {
        let partition = self.rng.random_range(0..self.scene.plan.partitions);
        let admin = self.client.admin();
        let latest = admin.resolve_offsets(TOPIC, &[partition], &Position::Latest).await;
        let Some(resolved) = latest.ok().and_then(|offsets| offsets.into_iter().next()) else {
            return;
        };
        let ends = self.ends.entry(partition).or_default();
        ends.push(resolved.offset);
        let Some(offset) = ends.choose(&mut self.rng).copied() else { return };
        self.scene.recorder.add(Event::MayTrim { partition, offset });
        if admin.trim(TOPIC, partition, offset).await.is_ok() {
            self.scene.recorder.add(Event::Trimmed { partition, offset });
            self.scene.marks.hit(Mark::Trimmed);
        }
    }

    async fn transfer(&mut self) -> turmoil::Result {
        let shard = u32::try_from(self.rng.random_range(0..=self.scene.plan.shards))?;
        let target = self.rng.random_range(0..=self.scene.plan.nodes);
        let target = Some(target).filter(|target| *target > 0);
        if self.client.admin().transfer_leader(shard, target).await.is_ok() {
            self.scene.marks.hit(Mark::LeadershipTransfer);
        }
        Ok(())
    }

    /// Drains a member for a while.
    async fn drain(&mut self) {
        let members: Vec<u64> = self.scene.members.all().into_iter().collect();
        let Some(node) = members.choose(&mut self.rng).copied() else { return };
        if self.client.admin().set_draining(node, true, false).await.is_ok() {
            self.scene.marks.hit(Mark::Drained);
        }
        self.scene.pause(PACE, &mut self.rng).await;
        // It may drain also where no answer came. Until it is taken back: it should lead again.
        while self.client.admin().set_draining(node, false, false).await.is_err() {
            sleep(AGAIN_AFTER).await;
        }
    }

    async fn replace(&mut self, node: u64) -> turmoil::Result {
        self.scene.recorder.note(&format!("node {node} is to be replaced"));
        let admin = self.client.admin();
        loop {
            match admin.replace_node(node, node, "", false).await {
                Ok(Some(change)) => break self.watch(change).await?,
                Ok(None) => return Err("a replacement that was only checked".into()),
                Err(error) => self.wait(&format!("node {node} is not replaced: {error}")).await,
            }
        }
        self.scene.members.on_replaced();
        self.scene.marks.hit(Mark::NodeReplaced);
        Ok(())
    }

    /// Has the machine that is left over join, or a member leave, which is the one left over then.
    async fn grow_or_shrink(&mut self) -> turmoil::Result {
        let members = self.scene.members.all();
        let spare = (1..=self.scene.plan.machines()).find(|node| !members.contains(node));
        match spare {
            Some(node) => self.add(node, members).await,
            None => self.remove(members).await,
        }
    }

    async fn add(&mut self, node: u64, members: BTreeSet<u64>) -> turmoil::Result {
        let next = members.iter().copied().chain([node]).collect();
        // A change is no time for losing disks, and the other way around.
        if self.scene.members.lost().is_some() {
            return Ok(());
        }
        self.scene.members.begin(next);
        self.scene.members.order(Order::Start(node));
        self.scene.recorder.note(&format!("node {node} is to join"));
        let admin = self.client.admin();
        let address = format!("{}:{PEER_PORT}", Plan::host(node));
        loop {
            match admin.add_node(node, &address, false).await {
                Ok(Some(change)) => break self.watch(change).await?,
                Ok(None) => return Err("an addition that was only checked".into()),
                Err(error) => self.wait(&format!("node {node} does not join: {error}")).await,
            }
        }
        self.scene.members.finish();
        self.scene.marks.hit(Mark::NodeAdded);
        Ok(())
    }

    async fn remove(&mut self, members: BTreeSet<u64>) -> turmoil::Result {
        let all: Vec<u64> = members.iter().copied().collect();
        let Some(node) = all.choose(&mut self.rng).copied() else { return Ok(()) };
        if self.scene.members.lost().is_some() {
            return Ok(());
        }
        self.scene.members.begin(members.into_iter().filter(|member| *member != node).collect());
        self.scene.recorder.note(&format!("node {node} is to leave"));
        let admin = self.client.admin();
        loop {
            match admin.remove_node(node, false, false).await {
                Ok(Some(change)) => break self.watch(change).await?,
                Ok(None) => return Err("a removal that was only checked".into()),
                Err(error) => self.wait(&format!("node {node} does not leave: {error}")).await,
            }
        }
        self.scene.members.finish();
        self.scene.members.order(Order::Retire(node));
        self.scene.marks.hit(Mark::NodeRemoved);
        Ok(())
    }

    async fn wait(&self, why: &str) {
        self.scene.recorder.note(why);
        sleep(AGAIN_AFTER).await;
    }

    /// Waits until a change is done.
    async fn watch(&self, change: MembershipChange) -> turmoil::Result {
        let admin = self.client.admin();
        loop {
            match admin.membership_change(change.id).await {
                Ok(seen) if seen.phase() == MembershipPhase::Done => return Ok(()),
                Ok(seen) if seen.phase() == MembershipPhase::Failed => {
                    return Err(format!("a change was given up: {seen:?}").into());
                }
                Ok(seen) if !seen.blocked_reason.is_empty() => {
                    self.wait(&format!("a change waits: {}", seen.blocked_reason)).await;
                }
                Ok(_) | Err(_) => sleep(AGAIN_AFTER).await,
            }
        }
    }
}
