//! `helix cluster health`: every node's view of what is wrong, merged, with who says so.
//! A node that does not answer is a finding of our own.

use std::time::Duration;

use helix_client::proto::log::v1::{HealthIssue, HealthReason};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::view::View;
use crate::args::{Global, HealthArgs};
use crate::exit::{self, Exit, Failure};
use crate::output::Output;

/// How often the nodes are asked while they are watched.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// The health of a cluster.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Health {
    healthy: bool,
    nodes: Vec<NodeHealth>,
    issues: Vec<Issue>,
}

/// What a node says of the cluster.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct NodeHealth {
    node_id: u64,
    endpoint: String,
    /// Whether it says that all is well. None: it does not answer.
    says_healthy: Option<bool>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
struct Issue {
    reason: String,
    shard_id: Option<u32>,
    /// Nodes that must come back for it to end.
    needed_node_ids: Vec<u64>,
    message: String,
    /// Nodes that say so. None of them: it was found from here.
    reported_by: Vec<u64>,
}

pub(super) async fn run(global: &Global, args: &HealthArgs) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    if args.watch {
        return watch(global, args, output).await;
    }
    let health = Health::of(&View::ask(global).await?);
    health.show(output)?;
    health.verdict()
}

/// Shows the health each time it changes.
async fn watch(global: &Global, args: &HealthArgs, output: Output) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut shown: Option<Health> = None;
    let mut is_silent = false;
    loop {
        let outcome = View::ask(global).await.map(|view| Health::of(&view));
        let verdict = match outcome {
            Ok(health) => {
                is_silent = false;
                let verdict = health.verdict();
                if !shown.as_ref().is_some_and(|shown| shown.says_the_same(&health)) {
                    health.show(output)?;
                    shown = Some(health);
                }
                verdict
            }
            // It may yet come, or come back.
            Err(error) if exit::of(&error) == Exit::Unavailable => {
                if !is_silent && !global.quiet {
                    eprintln!("no node answers at {}", global.addr.join(","));
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
        if args.timeout.is_some_and(|timeout| started.elapsed() >= timeout) {
            return verdict;
        }
        sleep(WATCH_INTERVAL).await;
    }
}

impl Health {
    /// What nodes say is wrong, a line each.
    pub(crate) fn messages(&self) -> Vec<String> {
        let said = self.issues.iter().filter(|issue| !issue.reported_by.is_empty());
        said.map(|issue| format!("{}: {}", issue.reason, issue.message)).collect()
    }

    pub(crate) fn of(view: &View) -> Self {
        let silent = view.nodes.iter().filter_map(|node| Some((node, node.answer.as_ref().err()?)));
        let mut issues: Vec<_> = silent
            .map(|(node, error)| Issue {
                reason: name(HealthReason::NodeDown),
                shard_id: None,
                needed_node_ids: vec![node.node_id],
                message: format!(
                    "node {} at {} does not answer: {}",
                    node.node_id, node.endpoint, error.message
                ),
                reported_by: Vec::new(),
            })
            .collect();
        issues.extend(view.silent.iter().map(|(addr, error)| Issue {
            reason: name(HealthReason::NodeDown),
            shard_id: None,
            needed_node_ids: Vec::new(),
            message: format!("nobody answers at {addr}: {}", error.message),
            reported_by: Vec::new(),
        }));
        for (node_id, answer) in view.answers() {
            for issue in &answer.health.issues {
                add(&mut issues, node_id, issue);
            }
        }
        issues.sort_by(|a, b| (a.shard_id, &a.reason).cmp(&(b.shard_id, &b.reason)));
        let node = |node: &super::view::Asked| NodeHealth {
            node_id: node.node_id,
            endpoint: node.endpoint.clone(),
            says_healthy: node.answer.as_ref().ok().map(|answer| answer.health.healthy),
        };
        let nodes: Vec<_> = view.nodes.iter().map(node).collect();
        let healthy = issues.is_empty() && nodes.iter().all(|node| node.says_healthy == Some(true));
        Self { healthy, nodes, issues }
    }

    /// Apart from the texts, which may count on.
    fn says_the_same(&self, other: &Self) -> bool {
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

    fn text(&self) -> String {
        let answer = self.nodes.iter().filter(|node| node.says_healthy.is_some()).count();
        let count = self.nodes.len();
        let mut text = match (self.healthy, self.issues.len()) {
            (true, _) if count == 1 => "healthy: the node answers and has no issues\n".to_owned(),
            (true, _) => format!("healthy: all {count} nodes answer and have no issues\n"),
            (false, issues) => {
                let plural = if issues == 1 { "" } else { "s" };
                format!("NOT healthy: {issues} issue{plural}; {answer} of {count} nodes answer\n")
            }
        };
        for issue in &self.issues {
            text += &issue.line();
        }
        text
    }

    /// # Errors
    /// Something is wrong.
    fn verdict(&self) -> anyhow::Result<()> {
        if self.healthy {
            return Ok(());
        }
        let failure = Failure::new(Exit::Error, "the cluster is not healthy");
        let mut needed: Vec<u64> =
            self.issues.iter().flat_map(|issue| &issue.needed_node_ids).copied().collect();
        needed.sort_unstable();
        needed.dedup();
        let failure = match needed.as_slice() {
            [] => failure,
            needed => failure.why(format!("these nodes are needed: {}", list(needed))),
        };
        Err(failure.hint("helix cluster nodes\nhelix cluster shards").into())
    }
}

impl Issue {
    fn line(&self) -> String {
        let Self { reason, message, reported_by, .. } = self;
        match reported_by.as_slice() {
            [] => format!("  {reason:17} {message}\n"),
            nodes => format!("  {reason:17} {message} (says node {})\n", list(nodes)),
        }
    }
}

/// Adds what a node says. The same issue, said by several, is one issue.
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

/// `NODE_DOWN`.
fn name(reason: HealthReason) -> String {
    reason.as_str_name().trim_start_matches("HEALTH_REASON_").to_owned()
}

fn list(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::view::tests::view;
    use super::*;

    fn down(node_id: u64) -> HealthIssue {
        HealthIssue {
            reason: HealthReason::NodeDown.into(),
            needed_node_ids: vec![node_id],
            message: format!("node {node_id} does not answer its peers"),
            ..HealthIssue::default()
        }
    }

    fn says(view: &mut View, node: usize, issue: HealthIssue) {
        let Ok(answer) = &mut view.nodes[node].answer else { panic!("it answers") };
        answer.health.healthy = false;
        answer.health.issues.push(issue);
    }

    #[test]
    fn what_several_nodes_say_is_one_issue() {
        let mut view = view();
        view.nodes.pop();
        assert!(Health::of(&view).healthy);
        says(&mut view, 0, down(3));
        says(&mut view, 1, down(3));
        says(&mut view, 1, HealthIssue { shard_id: Some(1), ..down(3) });
        let health = Health::of(&view);
        assert!(!health.healthy && health.verdict().is_err());
        let said: Vec<_> =
            health.issues.iter().map(|issue| (issue.shard_id, issue.reported_by.clone())).collect();
        assert_eq!(said, [(None, vec![1, 2]), (Some(1), vec![2])]);
        assert!(health.text().contains("(says node 1, 2)"), "{}", health.text());
    }

    #[test]
    fn a_node_that_is_silent_is_an_issue_though_nobody_says_so() {
        let health = Health::of(&view());
        assert!(!health.healthy);
        assert_eq!(health.issues.len(), 1);
        assert_eq!(health.issues[0].needed_node_ids, [3]);
        assert!(health.text().contains("NODE_DOWN"), "{}", health.text());
        assert!(health.text().contains("2 of 3 nodes answer"), "{}", health.text());
    }

    #[test]
    fn an_address_where_nobody_answers_is_an_issue() {
        let mut view = view();
        if let Some(down) = view.nodes.pop() {
            view.silent.push(("n9:9092".to_owned(), down.answer.unwrap_err()));
        }
        let health = Health::of(&view);
        assert!(!health.healthy);
        assert!(health.text().contains("nobody answers at n9:9092"), "{}", health.text());
    }

    #[test]
    fn a_node_that_is_silent_to_all_is_one_issue() {
        let mut view = view();
        says(&mut view, 0, down(3));
        let health = Health::of(&view);
        assert_eq!(health.issues.len(), 1);
        assert_eq!(health.issues[0].reported_by, [1]);
    }

    #[test]
    fn texts_that_count_on_are_no_news() {
        let mut first = view();
        let mut second = view();
        says(&mut first, 0, down(3));
        says(&mut second, 0, HealthIssue { message: "for 2 s".to_owned(), ..down(3) });
        assert!(Health::of(&first).says_the_same(&Health::of(&second)));
        says(&mut second, 1, down(3));
        assert!(!Health::of(&first).says_the_same(&Health::of(&second)));
    }
}
