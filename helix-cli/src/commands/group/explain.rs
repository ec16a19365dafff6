//! `helix group explain`: one sentence for each member and partition, from the reason codes.

use std::fmt::Write;

use helix_client::proto::log::v1 as proto;
use helix_proto::explanation::{of_group, of_member, of_partition};
use helix_proto::short_names::ShortNames;
use helix_proto::shown::one_line;
use schemars::JsonSchema;
use serde::Serialize;

use super::rows::{state_name, status_name};

/// Explains why records of a group do not arrive, or reports that they do.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupExplanation {
    group: String,
    state: &'static str,
    explanation: String,
    members: Vec<ExplainedMember>,
    partitions: Vec<ExplainedPartition>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ExplainedMember {
    member_id: String,
    explanation: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ExplainedPartition {
    topic: String,
    partition: u32,
    status: &'static str,
    explanation: String,
}

impl GroupExplanation {
    pub(crate) fn new(group: &proto::DescribeGroupResponse, names: &ShortNames) -> Self {
        let members = group.members.iter().map(|member| ExplainedMember {
            member_id: member.member_id.clone(),
            explanation: of_member(group, member, names),
        });
        let partitions = group.partitions.iter().map(|partition| {
            let at = partition.partition.clone().unwrap_or_default();
            ExplainedPartition {
                topic: at.topic,
                partition: at.partition,
                status: status_name(partition.status()),
                explanation: of_partition(group, partition, names),
            }
        });
        Self {
            state: state_name(group.state()),
            explanation: of_group(group),
            members: members.collect(),
            partitions: partitions.collect(),
            group: group.group.clone(),
        }
    }

    /// Returns the sentences, one a line, whatever names clients have.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{} {}\n", self.group, one_line(&self.explanation));
        // Writing to a string cannot fail.
        for ExplainedMember { explanation, .. } in &self.members {
            let _ = writeln!(text, "{}", one_line(explanation));
        }
        for ExplainedPartition { topic, partition, explanation, .. } in &self.partitions {
            let _ = writeln!(text, "{topic}/{partition} {}", one_line(explanation));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clients_forge_no_line() {
        let rogue = proto::MemberDescription {
            member_id: "m-1".to_owned(),
            client_name: "x\x1b[2J\r\norders/0 is read by no member".to_owned(),
            ..proto::MemberDescription::default()
        };
        let group = proto::DescribeGroupResponse {
            group: "billing".to_owned(),
            members: vec![rogue],
            ..proto::DescribeGroupResponse::default()
        };
        let explained = GroupExplanation::new(&group, &ShortNames::default());
        let (text, lines) = (explained.text(), 1 + explained.members.len());
        assert_eq!(text.lines().count(), lines + explained.partitions.len(), "{text}");
        assert!(text.contains("x\\u{1b}[2J\\r\\norders/0"), "{text}");
    }
}
