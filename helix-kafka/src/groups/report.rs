//! Reports members of Kafka groups to the cluster, which shows them and refuses native members.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use helix_client::Error;
use helix_client::proto::log::v1::{
    ErrorReason, GatewayMember, GroupState, ReportGatewayMembersRequest, TopicPartition,
};
use tokio::time::{Instant, sleep_until};

use super::{GroupRegistry, KafkaGroup, RebalanceState};
use crate::state::GatewayState;
use crate::upstream::Upstream;

/// Interval of reports, and the time for which the cluster keeps one.
const INTERVAL: Duration = Duration::from_secs(2);
const VALID_FOR: Duration = Duration::from_secs(10);

/// Reports at once.
const REPORTS_AT_ONCE: usize = 16;

/// Limits of the cluster for a report.
const TEXT_BYTES_MAX: usize = 128;
const PARTITIONS_MAX: usize = 10_000;

/// Type of protocol of groups whose assignments name partitions.
const CONSUMER: &str = "consumer";

/// Returns true if the nodes do not know reports: a release before them.
pub(crate) fn is_unknown_call(error: &Error) -> bool {
    error.code == tonic::Code::Unimplemented
}

/// Returns a report about a group, or about one whose first member joins.
pub(crate) fn report_of(
    name: &str,
    gateway: String,
    group: Option<&KafkaGroup>,
) -> ReportGatewayMembersRequest {
    let state = match group.map_or(RebalanceState::Empty, |group| group.state) {
        RebalanceState::Empty | RebalanceState::Joining => GroupState::Assigning,
        RebalanceState::Syncing => GroupState::Reconciling,
        RebalanceState::Stable => GroupState::Stable,
    };
    let mut partitions_left = PARTITIONS_MAX;
    let mut ids = BTreeSet::new();
    let mut members = Vec::new();
    for (id, member) in group.into_iter().flat_map(|group| &group.members) {
        let member_id = cut(id);
        if !ids.insert(member_id.clone()) {
            continue;
        }
        let is_consumer = group.is_some_and(|group| group.protocol_type == CONSUMER);
        let assignment = if is_consumer { &member.assignment[..] } else { &[] };
        let partitions: Vec<_> =
            assigned_partitions(assignment).into_iter().take(partitions_left).collect();
        partitions_left -= partitions.len();
        members.push(GatewayMember {
            member_id,
            static_name: cut(member.instance_id.as_deref().unwrap_or_default()),
            client_name: cut(&format!("{} {}", member.client_id, member.client_host)),
            partitions: partitions
                .into_iter()
                .map(|(topic, partition)| TopicPartition { topic, partition, topic_id: 0 })
                .collect(),
        });
    }
    ReportGatewayMembersRequest {
        group: name.to_owned(),
        gateway,
        state: state.into(),
        members,
        valid_for: Some(prost_types::Duration {
            seconds: i64::try_from(VALID_FOR.as_secs()).unwrap_or(i64::MAX),
            nanos: 0,
        }),
    }
}

/// Returns this gateway's name in reports.
pub(crate) fn gateway_name(state: &GatewayState) -> String {
    cut(&state.brokers.own().address.to_string())
}

/// Returns the beginning of a text that the cluster takes.
fn cut(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Returns the partitions that an assignment of Kafka's consumers names; none from other bytes.
fn assigned_partitions(assignment: &[u8]) -> BTreeSet<(String, u32)> {
    let mut partitions = BTreeSet::new();
    // Every element takes bytes, so the loops end with them.
    let mut read = || -> Option<()> {
        let mut bytes = assignment;
        let _version = take(&mut bytes, 2)?;
        for _ in 0..take_number(&mut bytes)? {
            let length = take(&mut bytes, 2)?;
            let length = u16::from_be_bytes([length[0], length[1]]);
            let topic = std::str::from_utf8(take(&mut bytes, length.into())?).ok()?;
            for _ in 0..take_number(&mut bytes)? {
                partitions.insert((topic.to_owned(), take_number(&mut bytes)?));
            }
        }
        Some(())
    };
    match read() {
        Some(()) => partitions,
        None => BTreeSet::new(),
    }
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

fn take_number(bytes: &mut &[u8]) -> Option<u32> {
    let number = i32::from_be_bytes(take(bytes, 4)?.try_into().ok()?);
    u32::try_from(number).ok()
}

impl GroupRegistry {
    /// Reports all groups with members, and the ends of others, until it is dropped.
    pub(crate) async fn watch_reports(&self, state: &GatewayState) {
        let gateway = &gateway_name(state);
        let mut next = Instant::now() + INTERVAL;
        loop {
            let is_due = tokio::select! {
                () = sleep_until(next) => true,
                () = self.ended_notify.notified() => false,
            };
            let ended = self.take_ended().into_iter().map(|(group, upstream)| async move {
                let end = ReportGatewayMembersRequest {
                    group: group.clone(),
                    gateway: gateway.clone(),
                    ..ReportGatewayMembersRequest::default()
                };
                // Otherwise the report ends with its time.
                if let Err(error) = upstream.client().admin().report_gateway_members(end).await {
                    tracing::debug!(group, %error, "end of a group not reported");
                }
            });
            stream::iter(ended).buffer_unordered(REPORTS_AT_ONCE).collect::<Vec<_>>().await;
            if is_due {
                let reports = self
                    .reports(gateway)
                    .into_iter()
                    .map(|(report, upstream)| self.send_report(report, upstream));
                stream::iter(reports).buffer_unordered(REPORTS_AT_ONCE).collect::<Vec<_>>().await;
                next = Instant::now() + INTERVAL;
            }
        }
    }

    async fn send_report(&self, report: ReportGatewayMembersRequest, upstream: Arc<Upstream>) {
        let group = report.group.clone();
        match upstream.client().admin().report_gateway_members(report).await {
            Ok(()) => {}
            Err(error) if error.is(ErrorReason::GroupNotEmpty) => {
                tracing::warn!(group, %error, "native members have joined, members join again");
                self.restart(&group);
            }
            Err(error) => tracing::debug!(group, %error, "members of a group not reported"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_name_partitions_and_other_bytes_none() {
        let assignment =
            b"\0\x01\0\0\0\x02\0\x01a\0\0\0\x02\0\0\0\x03\0\0\0\x01\0\x01b\0\0\0\0\xff\xff\xff\xff";
        let named = assigned_partitions(assignment);
        assert_eq!(
            named.into_iter().collect::<Vec<_>>(),
            [("a".to_owned(), 1), ("a".to_owned(), 3)]
        );
        for bytes in [
            &b""[..],
            b"\0\0",
            b"\0\0\x7f\xff\xff\xff",
            b"\0\0\0\0\0\x01\xff\xffa",
            b"\0\0\0\0\0\x01\0\x01a\x7f\xff\xff\xff\0\0\0\x01",
            b"\0\0\0\0\0\x01\0\x01a\0\0\0\x01\xff\xff\xff\xff",
        ] {
            assert!(assigned_partitions(bytes).is_empty(), "{bytes:?}");
        }
    }

    #[test]
    fn long_names_are_cut_at_a_character() {
        assert_eq!(cut("short"), "short");
        assert_eq!(cut(&"é".repeat(100)).len(), 128);
        assert_eq!(cut(&format!("x{}", "é".repeat(100))).len(), 127);
    }
}
