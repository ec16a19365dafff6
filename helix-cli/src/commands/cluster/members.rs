//! `helix cluster add-node`, `remove-node`, `replace-node`, `drain`, `undrain` and `balance`.
//! The service makes the changes; here they are begun, and watched until they are done.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use helix_client::Admin;
use helix_client::proto::log::v1::{MembershipChange, MembershipPhase};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::{Global, WaitArgs};
use crate::connect::connect;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// How often a change is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);

/// A change that was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asked<'a> {
    Add { node_id: u64, peer_addr: &'a str },
    Remove { node_id: u64, lost: bool },
    Replace { lost_node_id: u64, node_id: u64, peer_addr: &'a str },
}

impl Asked<'_> {
    fn describe(self) -> String {
        match self {
            Self::Add { node_id, .. } => format!("add node {node_id}"),
            Self::Remove { node_id, .. } => format!("remove node {node_id}"),
            Self::Replace { lost_node_id, .. } => format!("replace node {lost_node_id}"),
        }
    }

    async fn begin(self, admin: &Admin, dry: bool) -> anyhow::Result<Option<MembershipChange>> {
        let begun = match self {
            Self::Add { node_id, peer_addr } => admin.add_node(node_id, peer_addr, dry).await,
            Self::Remove { node_id, lost } => admin.remove_node(node_id, lost, dry).await,
            Self::Replace { lost_node_id, node_id, peer_addr } => {
                admin.replace_node(lost_node_id, node_id, peer_addr, dry).await
            }
        };
        begun.with_context(|| self.describe())
    }
}

/// What came of a change.
#[derive(Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Change {
    /// None: it was only checked.
    id: Option<u64>,
    kind: Option<String>,
    node_id: u64,
    lost_node_id: Option<u64>,
    phase: Option<String>,
    entries_remaining: u64,
    blocked_reason: String,
    shards: Vec<ShardRow>,
}

/// How far it is in one shard.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct ShardRow {
    shard_id: u32,
    phase: String,
    entries_remaining: u64,
    blocked_reason: String,
}

/// Shards whose leader was moved.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Moved {
    shard_ids: Vec<u32>,
}

/// A node that drains, or does not any more.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Draining {
    node_id: u64,
    draining: bool,
}

fn short(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_owned()
}

fn phase_name(phase: MembershipPhase) -> String {
    short(phase.as_str_name(), "MEMBERSHIP_PHASE_")
}

impl From<&MembershipChange> for Change {
    fn from(change: &MembershipChange) -> Self {
        let shards = change.shards.iter().map(|shard| ShardRow {
            shard_id: shard.shard_id,
            phase: phase_name(shard.phase()),
            entries_remaining: shard.entries_remaining,
            blocked_reason: shard.blocked_reason.clone(),
        });
        Self {
            id: Some(change.id),
            kind: Some(short(change.kind().as_str_name(), "MEMBERSHIP_CHANGE_KIND_")),
            node_id: change.node_id,
            lost_node_id: Some(change.lost_node_id).filter(|node| *node != 0),
            phase: Some(phase_name(change.phase())),
            entries_remaining: change.entries_remaining,
            blocked_reason: change.blocked_reason.clone(),
            shards: shards.collect(),
        }
    }
}

/// Makes a change, and unless that is not wanted waits for its end.
pub(super) async fn change(
    global: &Global,
    asked: Asked<'_>,
    wait: &WaitArgs,
) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let admin = connect(global).await?.admin();
    let Some(mut change) = asked.begin(&admin, wait.dry_run).await? else {
        let (Asked::Add { node_id, .. }
        | Asked::Remove { node_id, .. }
        | Asked::Replace { node_id, .. }) = asked;
        if !global.quiet {
            eprintln!("nothing is in the way of it; nothing was changed");
        }
        return output.show(&Change { node_id, ..Change::default() });
    };
    let started = Instant::now();
    let shows = !global.quiet && std::io::stderr().is_terminal();
    let mut shown = String::new();
    while !wait.no_wait && !is_over(&change) {
        let line = progress(&change);
        if shows && line != shown {
            eprintln!("{line}");
            shown = line;
        }
        if wait.timeout.is_some_and(|limit| started.elapsed() >= limit) {
            let what = format!("{} is not done after {:?}", asked.describe(), started.elapsed());
            let failure = Failure::new(Exit::Unavailable, what).why(progress(&change));
            let hint = "it goes on; the same command again waits for it\nhelix cluster health";
            return Err(failure.hint(hint).into());
        }
        sleep(LOOK_INTERVAL).await;
        let seen = admin.membership_change(change.id).await;
        change = seen.with_context(|| format!("ask how far it is to {}", asked.describe()))?;
    }
    output.show(&Change::from(&change))?;
    if change.phase() == MembershipPhase::Failed {
        let failure = Failure::new(Exit::Precondition, format!("{}: failed", asked.describe()));
        return Err(failure.why(change.blocked_reason).into());
    }
    Ok(())
}

fn is_over(change: &MembershipChange) -> bool {
    [MembershipPhase::Done, MembershipPhase::Failed].contains(&change.phase())
}

/// A line for people.
fn progress(change: &MembershipChange) -> String {
    let done = |phase: MembershipPhase| phase == MembershipPhase::Done;
    let count = change.shards.iter().filter(|shard| done(shard.phase())).count();
    let phase = phase_name(change.phase()).to_lowercase().replace('_', " ");
    let mut line = format!("{phase}, {count} of {} shards done", change.shards.len());
    if change.entries_remaining > 0 {
        line += &format!(", {} entries to fetch", change.entries_remaining);
    }
    if !change.blocked_reason.is_empty() {
        line += &format!("; waits: {}", change.blocked_reason);
    }
    line
}

pub(super) async fn drain(
    global: &Global,
    node_id: u64,
    draining: bool,
    dry_run: bool,
) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let set = admin.set_draining(node_id, draining, dry_run).await;
    let verb = if draining { "drain" } else { "undrain" };
    set.with_context(|| format!("{verb} node {node_id}"))?;
    if dry_run && !global.quiet {
        eprintln!("nothing is in the way of it; nothing was changed");
    }
    let draining = draining && !dry_run;
    Output { format: global.output }.show(&Draining { node_id, draining })
}

pub(super) async fn balance(global: &Global) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let shard_ids = admin.balance_leaders().await.context("spread the leaders")?;
    Output { format: global.output }.show(&Moved { shard_ids })
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::{MembershipChangeKind, ShardChange};

    use super::*;

    fn shard(shard_id: u32, phase: MembershipPhase) -> ShardChange {
        ShardChange { shard_id, phase: phase.into(), ..ShardChange::default() }
    }

    #[test]
    fn a_line_says_how_far_it_is_and_what_is_in_the_way() {
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
            "catching up, 1 of 2 shards done; waits: shard 1: node 4 cannot be reached"
        );
    }

    #[test]
    fn a_change_is_shown_with_the_names_of_the_api() {
        let change = MembershipChange {
            id: 3,
            phase: MembershipPhase::Done.into(),
            kind: MembershipChangeKind::Replace.into(),
            node_id: 4,
            lost_node_id: 2,
            ..MembershipChange::default()
        };
        let shown = Change::from(&change);
        assert_eq!((shown.id, shown.lost_node_id), (Some(3), Some(2)));
        assert_eq!(
            (shown.kind.as_deref(), shown.phase.as_deref()),
            (Some("REPLACE"), Some("DONE"))
        );
    }
}
