//! Administers the cluster: trims, transfers leadership, drains nodes, replaces a node that lost
//! its disks, adds and removes nodes. Retries each operation until it succeeds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use helix_checker::HistoryEvent;
use helix_client::{Client, Position};
use helix_proto::log::v1::{ErrorReason, MembershipChange, MembershipPhase, RemoveNodeRequest};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::time::sleep;

use crate::coverage::CoverageMark;
use crate::membership::MachineOrder;
use crate::net::PEER_PORT;
use crate::plan::{FaultKind, SimulationPlan};
use crate::workload::{ClientContext, TOPIC, TOPIC_IS_THERE};

/// Mean pause between two operations.
const ACTION_PAUSE: Duration = Duration::from_secs(2);

/// Pause before a retry.
const RETRY_AFTER: Duration = Duration::from_millis(200);

struct Operator {
    context: ClientContext,
    client: Client,
    rng: StdRng,
    /// Former end offsets of each partition.
    ends: BTreeMap<u32, Vec<u64>>,
}

pub async fn operate(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let (client, rng) = (context.client()?, context.rng(context.id()));
    let mut operator = Operator { client, rng, ends: BTreeMap::new(), context };
    loop {
        let continues = operator.context.pause(ACTION_PAUSE, &mut operator.rng).await;
        // Also after the workload has stopped, because all replicas must become equal.
        if let Some(node) = operator.context.members.lost() {
            operator.replace(node).await?;
        }
        if !continues {
            operator.context.on_end();
            return Ok(());
        }
        operator.random_action().await?;
    }
}

impl Operator {
    fn draws(&mut self, kind: FaultKind, chance: f64) -> bool {
        self.context.plan.kinds.contains(&kind) && self.rng.random_bool(chance)
    }

    async fn random_action(&mut self) -> turmoil::Result {
        if self.context.plan.trims && self.rng.random_bool(0.5) {
            self.trim().await;
        }
        if self.draws(FaultKind::Transfer, 0.5) {
            self.transfer().await?;
        }
        if self.draws(FaultKind::Drain, 0.2) {
            self.drain().await;
        }
        let is_calm = self.context.plan.placement.is_some() && self.context.is_calm();
        let chance = if self.context.plan.placement.is_some() { 0.7 } else { 0.4 };
        if !is_calm && self.draws(FaultKind::Grow, chance) {
            self.grow_or_shrink().await?;
        }
        Ok(())
    }

    /// Trims a partition to one of its former ends, which are batch boundaries.
    ///
    /// A log that starts inside a batch returns the whole batch, which the checker would take for a
    /// gap.
    async fn trim(&mut self) {
        let partition = self.rng.random_range(0..self.context.plan.partitions);
        let admin = self.client.admin();
        let latest = admin.resolve_offsets(TOPIC, &[partition], &Position::Latest).await;
        let Some(resolved) = latest.ok().and_then(|offsets| offsets.into_iter().next()) else {
            return;
        };
        let ends = self.ends.entry(partition).or_default();
        ends.push(resolved.offset);
        let Some(offset) = ends.choose(&mut self.rng).copied() else { return };
        self.context.recorder.add(HistoryEvent::MayTrim { partition, offset });
        if admin.trim(TOPIC, partition, offset).await.is_ok() {
            self.context.recorder.add(HistoryEvent::Trimmed { partition, offset });
            self.context.marks.hit(CoverageMark::Trimmed);
        }
    }

    async fn transfer(&mut self) -> turmoil::Result {
        let shard = u32::try_from(self.rng.random_range(0..=self.context.plan.shards))?;
        let target = self.rng.random_range(0..=self.context.plan.nodes);
        let target = Some(target).filter(|target| *target > 0);
        if self.client.admin().transfer_leader(shard, target).await.is_ok() {
            self.context.marks.hit(CoverageMark::LeadershipTransfer);
        }
        Ok(())
    }

    /// Drains a member, then undrains it.
    async fn drain(&mut self) {
        let members: Vec<u64> = self.context.members.all().into_iter().collect();
        let Some(node) = members.choose(&mut self.rng).copied() else { return };
        if self.client.admin().set_draining(node, true, false).await.is_ok() {
            self.context.marks.hit(CoverageMark::Drained);
        }
        self.context.pause(ACTION_PAUSE, &mut self.rng).await;
        // Retried until it succeeds, also after a failed request, which may have drained the node.
        while self.client.admin().set_draining(node, false, false).await.is_err() {
            sleep(RETRY_AFTER).await;
        }
    }

    async fn replace(&mut self, node: u64) -> turmoil::Result {
        self.context.recorder.note(&format!("replacing node {node}"));
        let admin = self.client.admin();
        loop {
            match admin.replace_node(node, node, "", false).await {
                Ok(Some(change)) => break self.wait_for_change(change).await?,
                Ok(None) => return Err("a replacement returned no change".into()),
                Err(error) => self.wait(&format!("cannot replace node {node}: {error}")).await,
            }
        }
        self.context.members.on_replaced();
        self.context.marks.hit(CoverageMark::NodeReplaced);
        Ok(())
    }

    /// Adds a spare machine, or removes a member, which becomes a spare one.
    async fn grow_or_shrink(&mut self) -> turmoil::Result {
        let members = self.context.members.all();
        let spare = (1..=self.context.plan.machines()).find(|node| !members.contains(node));
        // Clusters with a placement grow and shrink at any size, large ones from half of it on.
        let is_grown = 2 * members.len() as u64 > self.context.plan.machines();
        let may_shrink = self.context.plan.placement.is_some() && members.len() > 3 && is_grown;
        let shrinks = may_shrink && self.rng.random_bool(0.4);
        match spare.filter(|_| !shrinks) {
            Some(node) => self.add(node, members).await,
            None => self.remove(members).await,
        }
    }

    async fn add(&mut self, node: u64, members: BTreeSet<u64>) -> turmoil::Result {
        let next = members.iter().copied().chain([node]).collect();
        // Disk loss and membership changes exclude each other.
        if self.context.members.lost().is_some() {
            return Ok(());
        }
        self.context.members.begin(next);
        self.context.members.order(MachineOrder::Start(node));
        self.context.recorder.note(&format!("adding node {node}"));
        let admin = self.client.admin();
        let address = format!("{}:{PEER_PORT}", SimulationPlan::host(node));
        loop {
            match admin.add_node(node, &address, false).await {
                Ok(Some(change)) => break self.wait_for_change(change).await?,
                Ok(None) => return Err("an addition returned no change".into()),
                Err(error) => self.wait(&format!("cannot add node {node}: {error}")).await,
            }
        }
        self.context.members.finish();
        self.context.marks.hit(CoverageMark::NodeAdded);
        Ok(())
    }

    async fn remove(&mut self, members: BTreeSet<u64>) -> turmoil::Result {
        let all: Vec<u64> = members.iter().copied().collect();
        let Some(node) = all.choose(&mut self.rng).copied() else { return Ok(()) };
        if self.context.members.lost().is_some() {
            return Ok(());
        }
        self.context.members.begin(members.into_iter().filter(|member| *member != node).collect());
        self.context.recorder.note(&format!("removing node {node}"));
        let admin = self.client.admin();
        let mut request = RemoveNodeRequest { node_id: node, ..RemoveNodeRequest::default() };
        loop {
            match admin.remove_node_with(request).await {
                Err(error) if error.reason == Some(ErrorReason::NotEnoughNodes) => {
                    // The others cannot take its replicas now, and may never.
                    request.allow_fewer_replicas = true;
                    self.context.marks.hit(CoverageMark::RemovalRefused);
                    self.wait(&format!("cannot remove node {node}: {error}")).await;
                }
                Ok(Some(change)) => break self.wait_for_change(change).await?,
                Ok(None) => return Err("a removal returned no change".into()),
                Err(error) => self.wait(&format!("cannot remove node {node}: {error}")).await,
            }
        }
        self.context.members.finish();
        self.context.members.order(MachineOrder::Retire(node));
        self.context.marks.hit(CoverageMark::NodeRemoved);
        Ok(())
    }

    async fn wait(&self, why: &str) {
        self.context.recorder.note(why);
        sleep(RETRY_AFTER).await;
    }

    /// Waits until a membership change is done.
    async fn wait_for_change(&self, change: MembershipChange) -> turmoil::Result {
        let admin = self.client.admin();
        loop {
            match admin.membership_change(change.id).await {
                Ok(seen) if seen.phase() == MembershipPhase::Done => return Ok(()),
                Ok(seen) if seen.phase() == MembershipPhase::Failed => {
                    return Err(format!("a membership change failed: {seen:?}").into());
                }
                Ok(seen) if !seen.blocked_reason.is_empty() => {
                    self.wait(&format!("membership change is blocked: {}", seen.blocked_reason))
                        .await;
                }
                Ok(_) | Err(_) => sleep(RETRY_AFTER).await,
            }
        }
    }
}
