//! Membership changes of ClusterService: add, remove, replace and drain a node, and their progress.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use helix_proto::address;
use helix_proto::log::v1 as wire;
use helix_proto::log::v1::{
    AddNodeRequest, MembershipChange, MembershipChangeKind, MembershipPhase, RemoveNodeRequest,
    ReplaceNodeRequest, SetDrainingRequest, ShardChange, WatchMembershipChangeResponse,
};
use tonic::Status;

use super::wire_shard_id;
use crate::cluster::{ChangePhase, ChangeProgress, NodeRemoval};
use crate::error::{Error, Result};
use crate::log::{ChangeKind, MemberChange};
use crate::node::Node;

/// Interval at which a watch polls the progress of its change.
const CHANGE_POLL_INTERVAL: Duration = Duration::from_millis(300);

pub(super) async fn add(node: &Node, request: AddNodeRequest) -> Result<Option<MembershipChange>> {
    let AddNodeRequest { node_id, peer_endpoint, rack, validate_only } = request;
    check_rack(&rack)?;
    check_endpoint(&peer_endpoint)?;
    node.check_member()?;
    let added = node.cluster().add_node(node_id, peer_endpoint, validate_only).await?;
    Ok(added.as_ref().map(wire_change))
}

pub(super) async fn remove(
    node: &Node,
    request: RemoveNodeRequest,
) -> Result<Option<MembershipChange>> {
    let RemoveNodeRequest { node_id, lost, validate_only, allow_fewer_replicas } = request;
    node.check_member()?;
    let removal = NodeRemoval { node_id, is_lost: lost, allow_fewer_replicas };
    let removed = node.cluster().remove_node(removal, validate_only).await?;
    Ok(removed.as_ref().map(wire_change))
}

pub(super) async fn replace(
    node: &Node,
    request: ReplaceNodeRequest,
) -> Result<Option<MembershipChange>> {
    let ReplaceNodeRequest { lost_node_id, node_id, peer_endpoint, rack, validate_only } = request;
    check_rack(&rack)?;
    // Empty: at the address of the lost node.
    if !peer_endpoint.is_empty() {
        check_endpoint(&peer_endpoint)?;
    }
    node.check_member()?;
    let node_id = if node_id == 0 { lost_node_id } else { node_id };
    let cluster = node.cluster();
    let replaced =
        cluster.replace_node(lost_node_id, node_id, peer_endpoint, validate_only).await?;
    Ok(replaced.as_ref().map(wire_change))
}

pub(super) async fn set_draining(node: &Node, request: SetDrainingRequest) -> Result<()> {
    let SetDrainingRequest { node_id, draining, validate_only } = request;
    node.check_member()?;
    node.cluster().set_draining(node_id, draining, validate_only).await
}

/// Stricter than the check of the cluster's state, which must stay equal in all versions.
fn check_endpoint(endpoint: &str) -> Result<()> {
    let checked = address::check_dialable(endpoint);
    checked.map_err(|what| Error::InvalidArgument { field: "peer_endpoint", what })
}

fn check_rack(rack: &str) -> Result<()> {
    if rack.is_empty() { Ok(()) } else { Err(Error::Unimplemented { what: "a node's rack" }) }
}

/// Streams a change now and at each step of its progress, until it ends.
pub(super) fn watch(
    node: Arc<Node>,
    id: u64,
) -> impl Stream<Item = Result<WatchMembershipChangeResponse, Status>> + Send {
    let watch = ChangeWatch { node, id, sent: None };
    stream::try_unfold(watch, |mut watch| async {
        let change = watch.next().await?;
        Ok(change.map(|change| (WatchMembershipChangeResponse { change: Some(change) }, watch)))
    })
}

struct ChangeWatch {
    node: Arc<Node>,
    id: u64,
    sent: Option<MembershipChange>,
}

impl ChangeWatch {
    async fn next(&mut self) -> Result<Option<MembershipChange>, Status> {
        let is_over = |change: &MembershipChange| {
            [MembershipPhase::Done, MembershipPhase::Failed].contains(&change.phase())
        };
        if self.sent.as_ref().is_some_and(is_over) {
            return Ok(None);
        }
        let draining = self.node.shutdown_token().clone();
        loop {
            self.node.check_member()?;
            let progress = tokio::select! {
                progress = self.node.cluster().change_progress(self.id) => progress?,
                () = draining.cancelled() => return Err(Error::Draining.into()),
            };
            // Stays with this change if another one starts.
            self.id = progress.change.id;
            let change = wire_progress(progress);
            if self.sent.as_ref() != Some(&change) {
                self.sent = Some(change.clone());
                return Ok(Some(change));
            }
            tokio::time::sleep(CHANGE_POLL_INTERVAL).await;
        }
    }
}

fn wire_change(change: &MemberChange) -> MembershipChange {
    let kind = match change.kind {
        ChangeKind::Add => MembershipChangeKind::Add,
        ChangeKind::Remove => MembershipChangeKind::Remove,
        ChangeKind::Replace => MembershipChangeKind::Replace,
    };
    let phase = if change.done { ChangePhase::Done } else { ChangePhase::Pending };
    MembershipChange {
        id: change.id,
        phase: wire_phase(phase).into(),
        kind: kind.into(),
        node_id: change.node_id,
        lost_node_id: change.lost_node_id,
        ..MembershipChange::default()
    }
}

fn wire_progress(progress: ChangeProgress) -> MembershipChange {
    let ChangeProgress { change, phase, blocked, shards } = progress;
    MembershipChange {
        phase: wire_phase(phase).into(),
        blocked_reason: blocked,
        entries_remaining: shards.iter().map(|it| it.entries).fold(0, u64::saturating_add),
        shards: shards
            .into_iter()
            .map(|shard| ShardChange {
                shard_id: wire_shard_id(shard.shard_id),
                phase: wire_phase(shard.phase).into(),
                entries_remaining: shard.entries,
                blocked_reason: shard.blocked.what,
            })
            .collect(),
        ..wire_change(&change)
    }
}

fn wire_phase(phase: ChangePhase) -> MembershipPhase {
    match phase {
        ChangePhase::Pending => MembershipPhase::Pending,
        ChangePhase::CatchingUp => MembershipPhase::CatchingUp,
        ChangePhase::ChangingVoters => MembershipPhase::ChangingVoters,
        ChangePhase::Done => MembershipPhase::Done,
        ChangePhase::Failed => MembershipPhase::Failed,
    }
}

/// Returns a health issue for each node that is draining or leaving.
pub(super) fn issues(node: &Node) -> Vec<wire::HealthIssue> {
    let members = node.cluster().machine().read(|state| state.members().clone());
    let away = members.iter().filter(|member| member.draining || member.leaving);
    let mut issues: Vec<_> = away
        .map(|member| wire::HealthIssue {
            reason: wire::HealthReason::Draining.into(),
            needed_node_ids: vec![member.node_id],
            message: if member.leaving {
                format!("node {} is being removed", member.node_id)
            } else {
                format!("node {} is draining: its leaderships move away", member.node_id)
            },
            ..wire::HealthIssue::default()
        })
        .collect();
    let placement = members.placement().filter(|placement| placement.is_paused());
    issues.extend(placement.map(|placement| {
        let moves = placement.moves().count();
        wire::HealthIssue {
            reason: wire::HealthReason::MovesPaused.into(),
            message: format!(
                "moves of replicas are paused, {moves} of them in progress; `helix cluster \
                 resume-moves` resumes them"
            ),
            ..wire::HealthIssue::default()
        }
    }));
    issues.extend(node.removed().map(|what| wire::HealthIssue {
        reason: wire::HealthReason::Removed.into(),
        needed_node_ids: vec![node.info().node_id],
        message: what.to_owned(),
        ..wire::HealthIssue::default()
    }));
    issues
}
