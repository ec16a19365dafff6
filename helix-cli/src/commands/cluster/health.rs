//! `helix cluster health`: merges the issues that the nodes report, with the reporting nodes.
//! Each shard's leader commits an entry that changes nothing, which proves that the shard works.
//! A node that does not answer is an issue too, and so is a node that refuses this caller.

use std::time::{Duration, SystemTime};

use helix_client::proto::log::v1::{HealthIssue, HealthReason};
use helix_proto::error::reason_name;
use helix_proto::shown::one_line;
use prost_types::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::needed::{NeededNodes, list};
use super::snapshot::{ClusterSnapshot, failure, is_refusal};
use crate::args::{GlobalArgs, HealthArgs};
use crate::clock;
use crate::exit::{self, CliError, Exit};
use crate::output::{Output, message, unless_closed};
use crate::stdout_reader;
use crate::style::Style;

/// Poll interval of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The health of a cluster.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct ClusterHealth {
    healthy: bool,
    nodes: Vec<NodeHealth>,
    issues: Vec<Issue>,
    /// Observations that are no problem of the cluster: a removed node in the list of addresses.
    warnings: Vec<String>,
    /// Nodes that must return before a shard can have a leader again.
    #[serde(skip)]
    needed: Option<String>,
}

/// Health as reported by a node.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct NodeHealth {
    node_id: u64,
    endpoint: String,
    /// True if the node reports a healthy cluster. None if it does not answer.
    says_healthy: Option<bool>,
}

/// A health issue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
struct Issue {
    reason: String,
    shard_id: Option<u32>,
    /// Nodes that must return to resolve the issue.
    needed_node_ids: Vec<u64>,
    message: String,
    /// Nodes that report the issue; empty if this program found it.
    reported_by: Vec<u64>,
}

pub(super) async fn run(global: &GlobalArgs, args: &HealthArgs) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    if args.watch {
        return watch(global, args, output).await;
    }
    let health = ClusterHealth::of(&ClusterSnapshot::take_proved(global).await?);
    let shown = health.show(output);
    health.verdict().and(shown)
}

/// Prints the health each time it changes.
async fn watch(global: &GlobalArgs, args: &HealthArgs, output: Output) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut shown: Option<ClusterHealth> = None;
    let mut is_silent = false;
    // The exit code reports how the watch ended, so closed output must not end it.
    let has_end = args.exit_when_healthy || global.timeout.is_some();
    let gone = stdout_reader::gone();
    tokio::pin!(gone);
    loop {
        let outcome =
            ClusterSnapshot::take_proved(global).await.map(|snapshot| ClusterHealth::of(&snapshot));
        let verdict = match outcome {
            Ok(health) => {
                is_silent = false;
                let verdict = health.verdict();
                if !shown.as_ref().is_some_and(|shown| shown.is_same_except_messages(&health)) {
                    let written = health.show_at(output, clock::now());
                    let written = if has_end { unless_closed(written) } else { written };
                    if written.is_err() {
                        return verdict.and(written);
                    }
                    shown = Some(health);
                }
                verdict
            }
            // The cluster may still be starting or restarting.
            Err(error) if exit::of(&error) == Exit::Unavailable => {
                if !is_silent && !global.quiet {
                    message!("no node answers at {}", global.addr.join(","));
                }
                is_silent = true;
                shown = None;
                Err(error)
            }
            Err(error) => return Err(error),
        };
        if args.exit_when_healthy && verdict.is_ok() {
            return Ok(());
        }
        if global.timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
            return verdict;
        }
        tokio::select! {
            () = sleep(WATCH_INTERVAL) => {}
            closed = &mut gone, if !has_end => return verdict.and(Err(closed.into())),
        }
    }
}

impl ClusterHealth {
    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy
    }

    /// Returns all issues, one line each.
    pub(crate) fn issue_lines(&self) -> Vec<String> {
        let line = |issue: &Issue| format!("{}: {}", issue.reason, issue.message);
        self.issues.iter().map(line).collect()
    }

    /// Returns the issues reported by nodes, one line each.
    pub(crate) fn messages(&self) -> Vec<String> {
        let reported = self.issues.iter().filter(|issue| !issue.reported_by.is_empty());
        reported.map(|issue| format!("{}: {}", issue.reason, issue.message)).collect()
    }

    /// Merges the reports of a snapshot.
    pub(crate) fn of(snapshot: &ClusterSnapshot) -> Self {
        let silent =
            snapshot.nodes.iter().filter_map(|node| Some((node, node.report.as_ref().err()?)));
        let mut issues: Vec<_> = silent
            .map(|(node, error)| {
                let is_down = !node.has_answered();
                let reason = error.reason.filter(|_| !is_down).map(reason_name);
                Issue {
                    reason: reason.map_or_else(|| name(HealthReason::NodeDown), str::to_owned),
                    shard_id: None,
                    needed_node_ids: if is_down { vec![node.node_id] } else { Vec::new() },
                    message: format!("{} {}", node.named(), failure(error)),
                    reported_by: Vec::new(),
                }
            })
            .collect();
        issues.extend(snapshot.silent.iter().map(|(addr, error)| {
            Issue {
                reason: error
                    .reason
                    .filter(|_| is_refusal(error))
                    .map_or_else(|| name(HealthReason::NodeDown), |it| reason_name(it).to_owned()),
                shard_id: None,
                needed_node_ids: Vec::new(),
                message: match is_refusal(error) {
                    true => format!("the node at {addr} {}", failure(error)),
                    false => format!("no node answers at {addr}: {}", error.message),
                },
                reported_by: Vec::new(),
            }
        }));
        for (node_id, report) in snapshot.reports() {
            for issue in &report.health.issues {
                add(&mut issues, node_id, issue);
            }
        }
        for shard in snapshot.shard_routes().into_values().filter(|it| it.replicas.is_empty()) {
            add_forming(&mut issues, shard.shard_id);
        }
        if snapshot.nodes.is_empty() && issues.is_empty() {
            issues.push(Issue {
                reason: name(HealthReason::NoLeader),
                shard_id: Some(0),
                needed_node_ids: Vec::new(),
                message: "no node belongs to the cluster yet; it is still forming".to_owned(),
                reported_by: Vec::new(),
            });
        }
        issues.sort_by(|a, b| (a.shard_id, &a.reason).cmp(&(b.shard_id, &b.reason)));
        let node = |node: &super::snapshot::NodeSnapshot| NodeHealth {
            node_id: node.node_id,
            endpoint: node.endpoint.clone(),
            says_healthy: node.report.as_ref().ok().map(|report| report.health.healthy),
        };
        let nodes: Vec<_> = snapshot.nodes.iter().map(node).collect();
        let needed = NeededNodes::of(snapshot);
        for issue in issues.iter_mut().filter(|it| it.reason == name(HealthReason::NoLeader)) {
            let of_shard = needed.iter().find(|it| Some(it.shard_id) == issue.shard_id);
            issue.needed_node_ids = of_shard.map(|it| it.lost.clone()).unwrap_or_default();
            if let Some(of_shard) = of_shard {
                issue.message += &format!("; {}", of_shard.text());
            }
        }
        let warnings = snapshot.removed.iter().map(|(node_id, addr)| {
            format!(
                "node {node_id} at {addr} was removed from the cluster; stop it, and remove its \
                 address"
            )
        });
        let warnings = warnings.collect();
        let needed = NeededNodes::describe(&needed);
        let healthy = issues.is_empty() && nodes.iter().all(|node| node.says_healthy == Some(true));
        Self { healthy, nodes, issues, warnings, needed }
    }

    /// Compares everything except the messages, which may contain counters.
    fn is_same_except_messages(&self, other: &Self) -> bool {
        let same = |(one, other): (&Issue, &Issue)| {
            Issue { message: String::new(), ..one.clone() }
                == Issue { message: String::new(), ..other.clone() }
        };
        self.nodes == other.nodes
            && self.issues.len() == other.issues.len()
            && self.issues.iter().zip(&other.issues).all(same)
    }

    fn show(&self, output: Output) -> anyhow::Result<()> {
        output.show_as(self, || self.text())
    }

    /// Prints the health with the time.
    fn show_at(&self, output: Output, now: SystemTime) -> anyhow::Result<()> {
        output.show_as(self, || format!("{} {}", time_of_day(now), self.text()))
    }

    fn text(&self) -> String {
        let answering = self.nodes.iter().filter(|node| node.says_healthy.is_some()).count();
        let count = self.nodes.len();
        let style = Style::of_stdout();
        let (good, bad) =
            (style.state("healthy", "healthy"), style.state("NOT healthy", "NOT healthy"));
        let mut text = match (self.healthy, self.issues.len()) {
            (true, _) if count == 1 => format!("{good}: the node answers and has no issues\n"),
            (true, _) => format!("{good}: all {count} nodes answer and have no issues\n"),
            (false, issues) => {
                let plural = if issues == 1 { "" } else { "s" };
                format!("{bad}: {issues} issue{plural}; {answering} of {count} nodes answer\n")
            }
        };
        for issue in &self.issues {
            text += &issue.line();
        }
        for warning in &self.warnings {
            text += &format!("  {:17} {warning}\n", "warning");
        }
        if let Some(needed) = &self.needed {
            text += &format!("{needed}\n");
        }
        text
    }

    /// # Errors
    /// Fails if the cluster is not healthy.
    fn verdict(&self) -> anyhow::Result<()> {
        if self.healthy {
            return Ok(());
        }
        // The result on standard output is the verdict.
        Err(CliError::reported(Exit::Error).into())
    }
}

impl Issue {
    fn line(&self) -> String {
        let Self { reason, message, reported_by, .. } = self;
        let message = one_line(message);
        match reported_by.as_slice() {
            [] => format!("  {reason:17} {message}\n"),
            nodes => format!("  {reason:17} {message} (reported by node {})\n", list(nodes)),
        }
    }
}

/// Adds an issue reported by a node. An issue reported by several nodes is listed once.
fn add(issues: &mut Vec<Issue>, node_id: u64, issue: &HealthIssue) {
    let reason = name(issue.reason());
    let mut needed_node_ids = issue.needed_node_ids.clone();
    needed_node_ids.sort_unstable();
    let same = issues.iter_mut().find(|known| {
        (&known.reason, known.shard_id, &known.needed_node_ids)
            == (&reason, issue.shard_id, &needed_node_ids)
    });
    match same {
        Some(known) => known.reported_by.push(node_id),
        None => issues.push(Issue {
            reason,
            shard_id: issue.shard_id,
            needed_node_ids,
            message: issue.message.clone(),
            reported_by: vec![node_id],
        }),
    }
}

/// Adds the issue of a shard without members, unless a node reports that it has no leader.
fn add_forming(issues: &mut Vec<Issue>, shard_id: u32) {
    let reason = name(HealthReason::NoLeader);
    if !issues.iter().any(|it| it.reason == reason && it.shard_id == Some(shard_id)) {
        issues.push(Issue {
            reason,
            shard_id: Some(shard_id),
            needed_node_ids: Vec::new(),
            message: format!("shard {shard_id} has no members yet; it is still forming"),
            reported_by: Vec::new(),
        });
    }
}

/// Returns a time without its fraction: `2026-01-31T10:00:00Z`.
fn time_of_day(time: SystemTime) -> String {
    let mut time = Timestamp::from(time);
    time.nanos = 0;
    time.to_string()
}

/// Returns the name of a reason without its prefix: `NODE_DOWN`.
fn name(reason: HealthReason) -> String {
    reason.as_str_name().trim_start_matches("HEALTH_REASON_").to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::tests::snapshot;
    use super::*;

    fn down(node_id: u64) -> HealthIssue {
        HealthIssue {
            reason: HealthReason::NodeDown.into(),
            needed_node_ids: vec![node_id],
            message: format!("node {node_id} does not answer its peers"),
            ..HealthIssue::default()
        }
    }

    fn report_issue(snapshot: &mut ClusterSnapshot, node: usize, issue: HealthIssue) {
        let Ok(report) = &mut snapshot.nodes[node].report else { panic!("it answers") };
        report.health.healthy = false;
        report.health.issues.push(issue);
    }

    #[test]
    fn issue_of_several_nodes_is_listed_once() {
        let mut snapshot = snapshot();
        snapshot.nodes.pop();
        assert!(ClusterHealth::of(&snapshot).healthy);
        report_issue(&mut snapshot, 0, down(3));
        report_issue(&mut snapshot, 1, down(3));
        report_issue(&mut snapshot, 1, HealthIssue { shard_id: Some(1), ..down(3) });
        let health = ClusterHealth::of(&snapshot);
        assert!(!health.healthy && health.verdict().is_err());
        let reported: Vec<_> =
            health.issues.iter().map(|issue| (issue.shard_id, issue.reported_by.clone())).collect();
        assert_eq!(reported, [(None, vec![1, 2]), (Some(1), vec![2])]);
        assert!(health.text().contains("(reported by node 1, 2)"), "{}", health.text());
    }

    #[test]
    fn silent_node_is_an_issue_even_if_unreported() {
        let health = ClusterHealth::of(&snapshot());
        assert!(!health.healthy);
        assert_eq!(health.issues.len(), 1);
        assert_eq!(health.issues[0].needed_node_ids, [3]);
        assert!(health.text().contains("NODE_DOWN"), "{}", health.text());
        assert!(health.text().contains("2 of 3 nodes answer"), "{}", health.text());
    }

    #[test]
    fn node_that_refuses_the_caller_is_not_down() {
        let mut snapshot = snapshot();
        snapshot.nodes[2].report = Err(super::super::snapshot::tests::denied());
        let health = ClusterHealth::of(&snapshot);
        assert!(!health.healthy);
        let [issue] = health.issues.as_slice() else { panic!("{:?}", health.issues) };
        assert_eq!((issue.reason.as_str(), &issue.needed_node_ids), ("PERMISSION_DENIED", &vec![]));
        assert!(issue.message.contains("may not describe cluster"), "{issue:?}");
        assert_eq!(health.needed, None);
    }

    #[test]
    fn address_without_answer_is_an_issue() {
        let mut snapshot = snapshot();
        if let Some(down) = snapshot.nodes.pop() {
            snapshot.silent.push(("n9:9092".to_owned(), down.report.unwrap_err()));
        }
        let health = ClusterHealth::of(&snapshot);
        assert!(!health.healthy);
        assert!(health.text().contains("no node answers at n9:9092"), "{}", health.text());
    }

    #[test]
    fn silent_node_reported_by_others_is_one_issue() {
        let mut snapshot = snapshot();
        report_issue(&mut snapshot, 0, down(3));
        let health = ClusterHealth::of(&snapshot);
        assert_eq!(health.issues.len(), 1);
        assert_eq!(health.issues[0].reported_by, [1]);
    }

    #[test]
    fn cluster_that_is_still_forming_is_not_healthy() {
        let mut snapshot = snapshot();
        snapshot.nodes.clear();
        let health = ClusterHealth::of(&snapshot);
        assert!(!health.healthy && health.verdict().is_err(), "{}", health.text());
        assert!(health.text().contains("still forming"), "{}", health.text());
    }

    #[test]
    fn shard_without_members_is_not_healthy() {
        let mut snapshot = snapshot();
        snapshot.nodes.pop();
        assert!(ClusterHealth::of(&snapshot).healthy);
        for node in &mut snapshot.nodes {
            let Ok(report) = &mut node.report else { panic!("it answers") };
            report.metadata.shards[1].replicas.clear();
        }
        let health = ClusterHealth::of(&snapshot);
        assert!(!health.healthy && health.verdict().is_err(), "{}", health.text());
        assert!(health.text().contains("shard 1 has no members yet"), "{}", health.text());
        assert_eq!(health.needed, None);
    }

    #[test]
    fn member_without_an_address_is_not_healthy() {
        let mut snapshot = snapshot();
        snapshot.nodes[2].endpoint.clear();
        let health = ClusterHealth::of(&snapshot);
        assert!(!health.healthy && health.verdict().is_err(), "{}", health.text());
        assert!(health.text().contains("node 3 does not answer"), "{}", health.text());
        assert!(health.text().contains("2 of 3 nodes answer"), "{}", health.text());
    }

    #[test]
    fn removed_node_is_one_warning_and_no_source() {
        let mut snapshot = snapshot();
        snapshot.nodes.pop();
        let removed = HealthIssue { reason: HealthReason::Removed.into(), ..down(1) };
        report_issue(&mut snapshot, 0, removed);
        // Its reports of other nodes are out of date.
        report_issue(&mut snapshot, 0, down(2));
        let health = ClusterHealth::of(&snapshot.without_removed());
        assert!(health.healthy, "{}", health.text());
        assert_eq!(health.warnings.len(), 1, "{:?}", health.warnings);
        assert!(health.warnings[0].contains("node 1 at n1 was removed"), "{:?}", health.warnings);
        let nodes: Vec<_> = health.nodes.iter().map(|node| node.node_id).collect();
        assert_eq!(nodes, [2]);
    }

    #[test]
    fn changed_messages_are_not_a_change() {
        let mut first = snapshot();
        let mut second = snapshot();
        report_issue(&mut first, 0, down(3));
        report_issue(&mut second, 0, HealthIssue { message: "for 2 s".to_owned(), ..down(3) });
        assert!(ClusterHealth::of(&first).is_same_except_messages(&ClusterHealth::of(&second)));
        report_issue(&mut second, 1, down(3));
        assert!(!ClusterHealth::of(&first).is_same_except_messages(&ClusterHealth::of(&second)));
    }
}
