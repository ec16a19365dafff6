//! Health of the cluster as `helix cluster health` has it: the issues of all nodes, each listed
//! once, and the nodes that do not answer. Pure.

use helix_proto::log::v1::{HealthIssue, HealthReason};

use super::page::shown;

/// A line of the list of issues.
#[derive(Debug, PartialEq)]
pub(super) struct HealthLine {
    pub(super) reason: String,
    pub(super) message: String,
    /// Nodes that report it: "1, 2"; empty if the console found it.
    pub(super) reported_by: String,
}

/// The merged issues of a cluster.
#[derive(Debug, Default)]
pub(super) struct MergedHealth(Vec<(HealthIssue, Vec<u64>)>);

impl MergedHealth {
    /// Adds an issue that a node reports.
    pub(super) fn add(&mut self, node_id: u64, issue: HealthIssue) {
        let mut needed = issue.needed_node_ids.clone();
        needed.sort_unstable();
        let issue = HealthIssue { needed_node_ids: needed, ..issue };
        let is_same = |known: &HealthIssue| {
            (known.reason, known.shard_id, &known.needed_node_ids)
                == (issue.reason, issue.shard_id, &issue.needed_node_ids)
        };
        match self.0.iter_mut().find(|(known, _)| is_same(known)) {
            Some((_, reporters)) => reporters.push(node_id),
            None => self.0.push((issue, vec![node_id])),
        }
    }

    /// Adds a node that gives no report, unless another one reports it.
    pub(super) fn add_silent(&mut self, node_id: u64, why: &str) {
        let is_known = |(issue, _): &(HealthIssue, Vec<u64>)| {
            issue.reason() == HealthReason::NodeDown && issue.needed_node_ids == [node_id]
        };
        if self.0.iter().any(is_known) {
            return;
        }
        let issue = HealthIssue {
            reason: HealthReason::NodeDown.into(),
            message: format!("node {node_id} gives no report: {why}"),
            ..HealthIssue::default()
        };
        self.0.push((issue, Vec::new()));
    }

    /// Returns the lines, those of the cluster first and then by shard.
    pub(super) fn lines(mut self) -> Vec<HealthLine> {
        self.0.sort_by_key(|(issue, _)| (issue.shard_id, issue.reason));
        let line = |(issue, reporters): (HealthIssue, Vec<u64>)| {
            let reporters: Vec<String> = reporters.iter().map(u64::to_string).collect();
            let name = issue.reason().as_str_name();
            HealthLine {
                reason: name.trim_start_matches("HEALTH_REASON_").to_owned(),
                message: shown(&issue.message),
                reported_by: reporters.join(", "),
            }
        };
        self.0.into_iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_issue_of_several_nodes_is_listed_once() {
        let down = |shard_id| HealthIssue {
            reason: HealthReason::NodeDown.into(),
            shard_id,
            needed_node_ids: vec![3],
            message: "node 3\nis down".to_owned(),
        };
        let mut merged = MergedHealth::default();
        merged.add(1, down(Some(2)));
        merged.add(1, down(None));
        merged.add(2, down(None));
        merged.add_silent(3, "no answer");
        merged.add_silent(4, "no answer");
        let lines = merged.lines();
        let reporters: Vec<&str> = lines.iter().map(|line| &*line.reported_by).collect();
        assert_eq!(reporters, ["1, 2", "", "1"]);
        assert_eq!((&*lines[0].reason, &*lines[0].message), ("NODE_DOWN", "node 3\\nis down"));
        assert!(lines[1].message.contains("node 4 gives no report: no answer"));
    }
}
