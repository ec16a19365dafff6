//! `helix cluster add-node`, `remove-node`, `replace-node`, `drain`, `undrain` and `balance`.
//! Starts changes in the service and waits until they are done.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use helix_client::Admin;
use helix_client::proto::log::v1::{MembershipChange, MembershipPhase, RemoveNodeRequest};
use helix_proto::shown;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::needed::NeededNodes;
use super::snapshot::{ClusterSnapshot, failure};
use crate::args::{GlobalArgs, WaitArgs};
use crate::connect::{connect, connect_for_checks};
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};

/// Poll interval while waiting for a change.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// A requested change of the cluster's nodes.
#[derive(Debug, Clone, Copy)]
pub(super) enum RequestedChange<'a> {
    Add { node_id: u64, peer_addr: &'a str },
    Remove { node_id: u64, lost: bool, fewer_replicas: bool },
    Replace { lost_node_id: u64, node_id: u64, peer_addr: &'a str },
}

impl RequestedChange<'_> {
    /// Returns the node that is added, removed or takes the place of another one.
    fn node_id(self) -> u64 {
        match self {
            Self::Add { node_id, .. }
            | Self::Remove { node_id, .. }
            | Self::Replace { node_id, .. } => node_id,
        }
    }

    fn describe(self) -> String {
        match self {
            Self::Add { node_id, .. } => format!("add node {node_id}"),
            Self::Remove { node_id, .. } => format!("remove node {node_id}"),
            Self::Replace { lost_node_id, .. } => format!("replace node {lost_node_id}"),
        }
    }

    async fn start(self, admin: &Admin, dry_run: bool) -> anyhow::Result<Option<MembershipChange>> {
        let started = match self {
            Self::Add { node_id, peer_addr } => admin.add_node(node_id, peer_addr, dry_run).await,
            Self::Remove { node_id, lost, fewer_replicas } => {
                let (validate_only, allow_fewer_replicas) = (dry_run, fewer_replicas);
                let request =
                    RemoveNodeRequest { node_id, lost, validate_only, allow_fewer_replicas };
                admin.remove_node_with(request).await
            }
            Self::Replace { lost_node_id, node_id, peer_addr } => {
                admin.replace_node(lost_node_id, node_id, peer_addr, dry_run).await
            }
        };
        started.with_context(|| self.describe())
    }
}

/// Status of a change of the cluster's nodes.
#[derive(Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct ChangeStatus {
    /// None for a dry run.
    id: Option<u64>,
    kind: Option<String>,
    node_id: u64,
    lost_node_id: Option<u64>,
    phase: Option<String>,
    entries_remaining: u64,
    blocked_reason: String,
    /// Of a dry run: each thing that prevents the change, or needs a confirmation.
    obstacles: Vec<String>,
    shards: Vec<ShardChangeRow>,
}

/// Status of a change in one shard.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct ShardChangeRow {
    shard_id: u32,
    phase: String,
    entries_remaining: u64,
    blocked_reason: String,
}

/// Shards whose leadership was transferred.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct BalancedShards {
    shard_ids: Vec<u32>,
}

/// Drain state of a node.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct DrainingNode {
    node_id: u64,
    draining: bool,
}

fn without_prefix(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_owned()
}

fn phase_name(phase: MembershipPhase) -> String {
    without_prefix(phase.as_str_name(), "MEMBERSHIP_PHASE_")
}

impl From<&MembershipChange> for ChangeStatus {
    fn from(change: &MembershipChange) -> Self {
        let shards = change.shards.iter().map(|shard| ShardChangeRow {
            shard_id: shard.shard_id,
            phase: phase_name(shard.phase()),
            entries_remaining: shard.entries_remaining,
            blocked_reason: shard.blocked_reason.clone(),
        });
        Self {
            id: Some(change.id),
            kind: Some(without_prefix(change.kind().as_str_name(), "MEMBERSHIP_CHANGE_KIND_")),
            node_id: change.node_id,
            lost_node_id: Some(change.lost_node_id).filter(|node| *node != 0),
            phase: Some(phase_name(change.phase())),
            entries_remaining: change.entries_remaining,
            blocked_reason: change.blocked_reason.clone(),
            obstacles: Vec::new(),
            shards: shards.collect(),
        }
    }
}

/// Starts a change and, unless `wait` says otherwise, waits until it is done.
pub(super) async fn change(
    global: &GlobalArgs,
    requested: RequestedChange<'_>,
    wait: &WaitArgs,
) -> anyhow::Result<()> {
    if wait.dry_run {
        let snapshot = ClusterSnapshot::take(global).await?;
        return dry_run(global, &snapshot, requested, Vec::new(), Ok(())).await;
    }
    let output = Output { format: global.output };
    let admin = connect(global).await?.admin();
    let started = requested.start(&admin, false).await?;
    let mut change = started.context("the response lacks the change")?;
    let started = Instant::now();
    let is_shown = !global.quiet && std::io::stderr().is_terminal();
    let mut shown = String::new();
    while !wait.no_wait && !is_over(&change) {
        let line = progress(&change);
        if is_shown && line != shown {
            message!("{line}");
            shown = line;
        }
        if global.timeout.is_some_and(|limit| started.elapsed() >= limit) {
            let what = format!("{}: not done after {:?}", requested.describe(), started.elapsed());
            let failure = CliError::new(Exit::Unavailable, what).why(progress(&change));
            let hint = "run the command again to continue waiting\nhelix cluster health";
            return Err(failure.hint(hint).into());
        }
        sleep(POLL_INTERVAL).await;
        let status = admin.membership_change(change.id).await;
        change = status.with_context(|| format!("get the status of: {}", requested.describe()))?;
    }
    let status = ChangeStatus::from(&change);
    let verdict = if change.phase() == MembershipPhase::Failed {
        let failure =
            CliError::new(Exit::Precondition, format!("{}: failed", requested.describe()));
        let hint = "remove the cause and run the command again\nhelix cluster health";
        Err(failure.why(change.blocked_reason).hint(hint).into())
    } else {
        Ok(())
    };
    output.show_with_verdict(&status, verdict)
}

/// Checks a change and reports everything that is in the way, after the given obstacles.
///
/// # Errors
/// Fails if the service would refuse the change, or with the given verdict.
pub(super) async fn dry_run(
    global: &GlobalArgs,
    snapshot: &ClusterSnapshot,
    requested: RequestedChange<'_>,
    mut obstacles: Vec<String>,
    verdict: anyhow::Result<()>,
) -> anyhow::Result<()> {
    let admin = connect_for_checks(global).await?.admin();
    let checked = requested.start(&admin, true).await;
    if let Err(error) = &checked {
        obstacles.insert(0, error.root_cause().to_string());
    }
    let node_id = requested.node_id();
    obstacles.extend(in_the_way(snapshot, node_id));
    for node in snapshot.nodes.iter().filter(|node| node.node_id != node_id) {
        if let Err(error) = &node.report {
            obstacles.push(format!("node {} {}", node.node_id, failure(error)));
        }
    }
    if !global.quiet {
        match obstacles.len() {
            0 => message!("all checks passed; nothing was changed"),
            1 => message!("1 thing is in the way; nothing was changed"),
            count => message!("{count} things are in the way; nothing was changed"),
        }
    }
    let status = ChangeStatus { node_id, obstacles, ..ChangeStatus::default() };
    let output = Output { format: global.output };
    let shown = output.show_as(&status, || {
        let lines = status.obstacles.iter().map(|obstacle| shown::one_line(obstacle));
        lines.map(|line| format!("{line}\n")).collect()
    });
    checked.map(|_| ()).and(verdict).and(shown)
}

/// Returns what the nodes report that delays any change: shards without a majority, and another
/// node that is leaving.
fn in_the_way(snapshot: &ClusterSnapshot, node_id: u64) -> Vec<String> {
    let needed = NeededNodes::describe(&NeededNodes::of(snapshot)).unwrap_or_default();
    let nodes = snapshot.metadata().map(|it| it.nodes.as_slice()).unwrap_or_default();
    let leaving = nodes.iter().filter(|node| node.leaving && node.node_id != node_id);
    let leaving = leaving.map(|node| format!("node {} is being removed", node.node_id));
    needed.lines().map(str::to_owned).chain(leaving).collect()
}

fn is_over(change: &MembershipChange) -> bool {
    [MembershipPhase::Done, MembershipPhase::Failed].contains(&change.phase())
}

/// Returns a progress line for people.
fn progress(change: &MembershipChange) -> String {
    let done = |phase: MembershipPhase| phase == MembershipPhase::Done;
    let count = change.shards.iter().filter(|shard| done(shard.phase())).count();
    let phase = phase_name(change.phase()).to_lowercase().replace('_', " ");
    let mut line = format!("{phase}, {count} of {} shards done", change.shards.len());
    if change.entries_remaining > 0 {
        line += &format!(", {} entries to fetch", change.entries_remaining);
    }
    if !change.blocked_reason.is_empty() {
        line += &format!("; waiting: {}", change.blocked_reason);
    }
    line
}

pub(super) async fn drain(
    global: &GlobalArgs,
    node_id: u64,
    draining: bool,
    dry_run: bool,
) -> anyhow::Result<()> {
    let client = if dry_run { connect_for_checks(global).await } else { connect(global).await };
    let admin = client?.admin();
    let set = admin.set_draining(node_id, draining, dry_run).await;
    let verb = if draining { "drain" } else { "undrain" };
    set.with_context(|| format!("{verb} node {node_id}"))?;
    if dry_run && !global.quiet {
        message!("all checks passed; nothing was changed");
    }
    let draining = draining && !dry_run;
    Output { format: global.output }.show(&DrainingNode { node_id, draining })
}

pub(super) async fn balance(global: &GlobalArgs) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let shard_ids = admin.balance_leaders().await.context("rebalance the leaders")?;
    Output { format: global.output }.show(&BalancedShards { shard_ids })
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::{MembershipChangeKind, ShardChange};

    use super::super::snapshot::tests::snapshot;
    use super::*;

    fn shard(shard_id: u32, phase: MembershipPhase) -> ShardChange {
        ShardChange { shard_id, phase: phase.into(), ..ShardChange::default() }
    }

    #[test]
    fn progress_shows_phase_shards_and_blocked_reason() {
        let mut change = MembershipChange {
            phase: MembershipPhase::CatchingUp.into(),
            shards: vec![shard(0, MembershipPhase::Done), shard(1, MembershipPhase::CatchingUp)],
            entries_remaining: 7,
            ..MembershipChange::default()
        };
        assert_eq!(progress(&change), "catching up, 1 of 2 shards done, 7 entries to fetch");
        change.entries_remaining = 0;
        change.blocked_reason = "shard 1: node 4 cannot be reached".to_owned();
        assert_eq!(
            progress(&change),
            "catching up, 1 of 2 shards done; waiting: shard 1: node 4 cannot be reached"
        );
    }

    #[test]
    fn dry_run_names_shards_without_majority_and_nodes_that_leave() {
        let mut snapshot = snapshot();
        assert!(in_the_way(&snapshot, 4).is_empty(), "node 3 alone takes no majority away");
        if let Ok(two) = &mut snapshot.nodes[1].report {
            two.metadata.nodes[2].leaving = true;
            two.metadata.shards[1].replicas = vec![2, 3, 4];
        }
        let found = in_the_way(&snapshot, 4);
        let expected =
            ["shard 1 has no majority; either of 3, 4 is needed", "node 3 is being removed"];
        assert_eq!(found, expected);
    }

    #[test]
    fn change_status_uses_api_names() {
        let change = MembershipChange {
            id: 3,
            phase: MembershipPhase::Done.into(),
            kind: MembershipChangeKind::Replace.into(),
            node_id: 4,
            lost_node_id: 2,
            ..MembershipChange::default()
        };
        let shown = ChangeStatus::from(&change);
        assert_eq!((shown.id, shown.lost_node_id), (Some(3), Some(2)));
        assert_eq!(
            (shown.kind.as_deref(), shown.phase.as_deref()),
            (Some("REPLACE"), Some("DONE"))
        );
    }
}
