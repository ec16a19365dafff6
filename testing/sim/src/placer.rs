//! Moves replicas while the operator adds and removes nodes: cordons nodes, moves replicas of
//! shards, changes the number of replicas, and adds shards. Requests that the cluster refuses are
//! not repeated.

use std::time::Duration;

use helix_client::Client;
use helix_proto::log::v1::GetPlacementResponse;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::time::sleep;

use crate::coverage::CoverageMark;
use crate::plan::PlacementPlan;
use crate::shard_growth::ShardGrowth;
use crate::workload::{ClientContext, TOPIC_IS_THERE};

/// Pause before a retry.
const RETRY_AFTER: Duration = Duration::from_millis(200);

struct Placer {
    context: ClientContext,
    client: Client,
    rng: StdRng,
    plan: PlacementPlan,
    cordoned: Vec<u64>,
    growth: ShardGrowth,
    is_paused: bool,
}

/// Changes the placement until the run calms down, then lets all nodes get replicas again.
pub async fn operate(context: ClientContext, plan: PlacementPlan) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let (client, rng) = (context.client()?, context.rng(context.id()));
    let growth = ShardGrowth::default();
    let mut placer =
        Placer { context, client, rng, plan, cordoned: Vec::new(), growth, is_paused: false };
    placer.set_replicas().await;
    while !placer.context.is_calm() {
        let pause = placer.plan.pause.mul_f64(placer.rng.random_range(0.0..2.0));
        sleep(pause).await;
        placer.random_action().await?;
    }
    placer.resume().await;
    placer.uncordon_all().await;
    placer.context.on_uncordoned();
    placer.growth.check(&placer.context, &placer.client).await?;
    while !placer.context.is_stopped() {
        sleep(RETRY_AFTER).await;
    }
    placer.context.on_end();
    Ok(())
}

impl Placer {
    async fn random_action(&mut self) -> turmoil::Result<()> {
        match self.rng.random_range(0..19) {
            0..5 => self.move_shard().await,
            5..7 => self.cordon().await,
            7..9 => self.uncordon().await,
            9 => self.set_replicas().await,
            10..12 => self.cancel_move().await,
            12 => self.pause().await,
            13..15 => self.add_shards().await,
            15..17 => {
                let Self { growth, context, client, rng, .. } = self;
                growth.create_topic(context, client, rng).await?;
            }
            _ if self.is_paused => self.resume().await,
            _ => self.move_shard().await,
        }
        Ok(())
    }

    fn note(&self, what: &str) {
        self.context.recorder.note(what);
    }

    async fn set_replicas(&mut self) {
        let Some(replicas) = self.plan.replicas.choose(&mut self.rng).copied() else { return };
        self.note(&format!("wanting {replicas} replicas"));
        if let Err(error) = self.client.admin().set_replicas(replicas).await {
            self.note(&format!("cannot set the number of replicas: {error}"));
        }
    }

    async fn add_shards(&mut self) {
        let Some(found) = self.placement().await else { return };
        let Self { growth, context, client, rng, .. } = self;
        growth.add_shards(context, client, &found, rng).await;
    }

    async fn placement(&self) -> Option<GetPlacementResponse> {
        self.client.admin().placement().await.ok()
    }

    /// Moves a replica to a random node, which may be down, cordoned, or about to leave. Most have
    /// no replica of the shard.
    async fn move_shard(&mut self) {
        let Some(found) = self.placement().await else { return };
        let shards: Vec<_> = found.shards.iter().filter(|it| it.shard_id != 0).collect();
        let Some(shard) = shards.choose(&mut self.rng) else { return };
        let any = self.rng.random_bool(0.1);
        let is_other = |node: &u64| any || !shard.node_ids.contains(node);
        let others: Vec<u64> =
            found.nodes.iter().map(|it| it.node_id).filter(|node| is_other(node)).collect();
        let from = shard.node_ids.choose(&mut self.rng).copied();
        let (Some(from), Some(to)) = (from, others.choose(&mut self.rng).copied()) else { return };
        self.note(&format!("moving shard {} from node {from} to {to}", shard.shard_id));
        match self.client.admin().move_shard(shard.shard_id, from, to).await {
            Ok(()) => self.context.marks.hit(CoverageMark::ReplicaMoveAsked),
            Err(error) => self.note(&format!("cannot move a replica: {error}")),
        }
    }

    /// Cancels a random move, planned by the cluster or by an operator.
    async fn cancel_move(&mut self) {
        let Some(found) = self.placement().await else { return };
        let moving: Vec<_> = found.shards.iter().filter(|it| it.r#move.is_some()).collect();
        let Some(shard) = moving.choose(&mut self.rng) else { return };
        self.note(&format!("cancelling the move of shard {}", shard.shard_id));
        // Registered first: a failed request may have been applied.
        self.context.on_move_cancelled(shard.shard_id.into());
        match self.client.admin().cancel_move(shard.shard_id).await {
            Ok(_) => self.context.marks.hit(CoverageMark::MoveCancelled),
            Err(error) => self.note(&format!("cannot cancel a move: {error}")),
        }
    }

    async fn pause(&mut self) {
        self.note("pausing moves");
        self.is_paused = true;
        if self.client.admin().set_moves_paused(true).await.is_ok() {
            self.context.marks.hit(CoverageMark::MovesPaused);
        }
    }

    /// Retries until moves are not paused.
    async fn resume(&mut self) {
        self.note("resuming moves");
        loop {
            let resumed = self.client.admin().set_moves_paused(false).await;
            if resumed.is_ok() && self.placement().await.is_some_and(|found| !found.paused) {
                break;
            }
            sleep(RETRY_AFTER).await;
        }
        self.is_paused = false;
    }

    async fn cordon(&mut self) {
        let members: Vec<u64> = self.context.members.all().into_iter().collect();
        let Some(node) = members.choose(&mut self.rng).copied() else { return };
        self.note(&format!("cordoning node {node}"));
        // Registered first: a failed request may have been applied.
        self.cordoned.push(node);
        if self.client.admin().set_cordoned(node, true).await.is_ok() {
            self.context.marks.hit(CoverageMark::NodeCordoned);
        }
    }

    async fn uncordon(&mut self) {
        let Some(node) = self.cordoned.choose(&mut self.rng).copied() else { return };
        self.note(&format!("uncordoning node {node}"));
        if self.client.admin().set_cordoned(node, false).await.is_ok() {
            self.cordoned.retain(|it| *it != node);
        }
    }

    /// Retries until no node is cordoned.
    async fn uncordon_all(&mut self) {
        loop {
            if let Some(found) = self.placement().await {
                let mut cordoned = found.nodes.iter().filter(|it| it.refusal == "is cordoned");
                let Some(node) = cordoned.next() else { return };
                self.note(&format!("uncordoning node {}", node.node_id));
                if self.client.admin().set_cordoned(node.node_id, false).await.is_ok() {
                    continue;
                }
            }
            sleep(RETRY_AFTER).await;
        }
    }
}
