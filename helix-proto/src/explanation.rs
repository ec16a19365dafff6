//! Sentences that explain a consumer group: why records of a partition do not arrive, or that they
//! do. The command line and the console show the same ones. They quote names that clients chose, so
//! a program escapes them as it shows them. Pure.

use std::time::Duration;

use crate::log::v1 as proto;
use crate::log::v1::{CommitStatus, DeliveryStatus, GroupState};
use crate::short_names::ShortNames;
use crate::{time, units};

/// Heartbeats that a member may miss before it counts as silent, as a part of its session timeout.
const SILENT_PART: u32 = 2;

/// Words for a member that the coordinator does not know yet.
const UNHEARD: &str = "has not been heard since the coordinator changed";

/// Returns what the state of a group means, as the end of a sentence that begins with its name.
pub fn of_group(group: &proto::DescribeGroupResponse) -> String {
    let (members, partitions) = (group.members.len(), group.partitions.len());
    let progress = match group.state() {
        GroupState::Empty => "has no members, so nothing reads its partitions".to_owned(),
        GroupState::Assigning => "has changed, and its assignment is being computed".to_owned(),
        GroupState::Reconciling => "has partitions that move from one member to another".to_owned(),
        GroupState::Stable => "has every partition where the assignment puts it".to_owned(),
        GroupState::Unspecified => "is in a state that this program does not know".to_owned(),
    };
    let gateway = match group.gateway.as_str() {
        "" => String::new(),
        gateway => format!("; the gateway {gateway} assigns its partitions"),
    };
    let (members, partitions) = (counted(members, "member"), counted(partitions, "partition"));
    format!("{progress} ({members} and {partitions}){gateway}")
}

/// Returns a sentence about a member of a group.
pub fn of_member(
    group: &proto::DescribeGroupResponse,
    member: &proto::MemberDescription,
    names: &ShortNames,
) -> String {
    let name = member_name(member, names);
    if !group.gateway.is_empty() {
        let reads = counted(member.owned.len(), "partition");
        return format!("{name} reads {reads}, as the gateway reports");
    }
    let timeout = known(member.session_timeout).unwrap_or_default();
    let Some(silence) = known(member.since_heartbeat) else {
        return format!("{name} {UNHEARD}; it is removed after {}", units::duration(timeout));
    };
    if silence > timeout / SILENT_PART {
        return format!("{name} is silent for {}", removal(silence, timeout));
    }
    let owned: Vec<_> = member.owned.iter().collect();
    let to_release = owned.iter().filter(|it| !member.target.contains(it)).count();
    let to_get = member.target.iter().filter(|it| !owned.contains(it)).count();
    let reads = counted(owned.len() - to_release, "partition");
    let heard = format!("its last heartbeat was {} ago", units::measured(silence));
    match (to_release, to_get) {
        (0, 0) if owned.is_empty() && group.state() == GroupState::Assigning => {
            format!("{name} waits for an assignment; {heard}")
        }
        (0, 0) if owned.is_empty() => {
            format!("{name} has no partitions: its topics have none left for it; {heard}")
        }
        (0, 0) => format!("{name} reads {reads}; {heard}"),
        (0, _) => format!("{name} reads {reads} and waits for {to_get} more; {heard}"),
        (_, 0) => format!("{name} reads {reads} and has to release {to_release}; {heard}"),
        _ => format!(
            "{name} reads {reads}, has to release {to_release} and waits for {to_get}; {heard}"
        ),
    }
}

/// Returns why records of a partition arrive or not, as the end of a sentence that begins with the
/// partition.
pub fn of_partition(
    group: &proto::DescribeGroupResponse,
    partition: &proto::GroupPartition,
    names: &ShortNames,
) -> String {
    let owner = names.get(&partition.owner);
    let offset = partition.offset.as_ref();
    let lag = offset.and_then(|it| it.lag);
    let behind = match lag {
        Some(lag) => format!("{} behind the end", counted(lag, "record")),
        None => "an unknown number of records behind the end".to_owned(),
    };
    let lost = offset.and_then(|it| it.lost).unwrap_or(0);
    match partition.status() {
        DeliveryStatus::Flowing if offset.is_none() => {
            format!("is read by {owner}, which has committed no offset yet")
        }
        DeliveryStatus::Flowing => format!("is read by {owner}, whose commit is {behind}"),
        DeliveryStatus::NoNewRecords if offset.is_none() => {
            format!("has no records for {owner} to read")
        }
        DeliveryStatus::NoNewRecords => {
            format!("has no new records: {owner} has committed all of them")
        }
        DeliveryStatus::Unassigned => {
            let lag = if lag == Some(0) { String::new() } else { format!(", {behind}") };
            let lag = if offset.is_some() { lag } else { String::new() };
            let lost = match lost {
                0 => String::new(),
                lost => format!(", {} deleted before it was read", counted(lost, "offset")),
            };
            let forget = match (offset.is_some_and(|it| it.unsubscribed), &partition.partition) {
                (true, Some(at)) => {
                    format!("; forget its offsets: helix group forget {} {}", group.group, at.topic)
                }
                _ => String::new(),
            };
            format!("is read by no member{lag}{lost}: {}{forget}", partition.detail)
        }
        DeliveryStatus::WaitingForRelease => {
            let (target, holder) =
                (names.get(&partition.target), names.get(&partition.waiting_for));
            let silence = silence_of(group, &partition.waiting_for);
            format!("goes to {target} once {holder} has released it{silence}")
        }
        DeliveryStatus::OwnerSilent => match member_of(group, &partition.owner) {
            Some((silence, timeout)) => {
                format!("belongs to {owner}, which is silent for {}", removal(silence, timeout))
            }
            None => format!("belongs to {owner}, which {UNHEARD}"),
        },
        DeliveryStatus::Paused => format!("is paused by the application at {owner}, {behind}"),
        DeliveryStatus::OffsetOutOfRange => out_of_range(group, offset),
        DeliveryStatus::Throttled => {
            format!("is delayed by the quota of {owner}, {behind}; see helix quota list")
        }
        DeliveryStatus::NoLeader => {
            "has no leader: a majority of its replicas is down, or an election runs".to_owned()
        }
        DeliveryStatus::TopicDeleted => {
            "has no records: its topic was deleted, and its offsets are forgotten soon".to_owned()
        }
        DeliveryStatus::TopicRecreated => recreated(group, partition),
        DeliveryStatus::Unspecified => {
            format!("has a status that this program does not know: {}", partition.detail)
        }
    }
}

fn out_of_range(
    group: &proto::DescribeGroupResponse,
    offset: Option<&proto::OffsetAndLag>,
) -> String {
    let Some(found) = offset else {
        return "has a committed offset that cannot be read".to_owned();
    };
    let at = found.committed.as_ref().map_or(0, |committed| committed.offset);
    let why = match found.status() {
        CommitStatus::BelowLogStart => {
            let start = found.log_start_offset.unwrap_or_default();
            let lost = counted(found.lost.unwrap_or_default(), "offset");
            format!(
                "was deleted up to {start}, beyond the committed offset {at}: {lost} deleted \
                 before it was read"
            )
        }
        _ => format!(
            "ends at {}, before the committed offset {at}",
            found.high_watermark.unwrap_or_default()
        ),
    };
    format!("{why}; see helix group reset {} --unreadable", group.group)
}

fn recreated(group: &proto::DescribeGroupResponse, partition: &proto::GroupPartition) -> String {
    let topic = partition.partition.as_ref().map_or("", |it| &*it.topic);
    format!(
        "is of a topic that was created again, and the group's offsets belong to the earlier one; \
         stop the members and set offsets: helix group seek {} {topic} --to earliest",
        group.group
    )
}

/// Returns the times since a member's last heartbeat and until its removal.
fn removal(silence: Duration, timeout: Duration) -> String {
    let silent = units::measured(silence);
    match timeout.checked_sub(silence) {
        Some(left) => format!("{silent} and is removed in {}", units::measured(left)),
        None => format!("{silent}, longer than its session timeout, and is being removed"),
    }
}

/// Returns the silence and the session timeout of a member that has been heard.
fn member_of(group: &proto::DescribeGroupResponse, id: &str) -> Option<(Duration, Duration)> {
    let member = group.members.iter().find(|member| member.member_id == id)?;
    Some((known(member.since_heartbeat)?, known(member.session_timeout)?))
}

fn silence_of(group: &proto::DescribeGroupResponse, id: &str) -> String {
    match member_of(group, id) {
        Some((silence, timeout)) if silence > timeout / SILENT_PART => {
            format!(", but that member is silent for {}", removal(silence, timeout))
        }
        Some(_) | None => String::new(),
    }
}

/// Returns the printed name of a member, with its texts for people.
fn member_name(member: &proto::MemberDescription, names: &ShortNames) -> String {
    let texts = [member.static_name.as_str(), member.client_name.as_str()];
    let texts: Vec<_> = texts.into_iter().filter(|text| !text.is_empty()).collect();
    let id = names.get(&member.member_id);
    if texts.is_empty() { id.to_owned() } else { format!("{id} ({})", texts.join(", ")) }
}

fn counted(count: impl TryInto<u64>, what: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    let ending = if count == 1 { "" } else { "s" };
    format!("{} {what}{ending}", units::count(count))
}

/// Returns a duration of the wire, if it is a valid one.
fn known(wire: Option<prost_types::Duration>) -> Option<Duration> {
    wire.and_then(|wire| time::duration(wire).ok())
}

#[cfg(test)]
mod tests {
    use proto::{CommittedOffset, GroupPartition, MemberDescription, OffsetAndLag, TopicPartition};

    use super::*;

    fn seconds(seconds: i64) -> Option<prost_types::Duration> {
        Some(prost_types::Duration { seconds, nanos: 0 })
    }

    fn at(partition: u32) -> TopicPartition {
        TopicPartition { topic: "orders".to_owned(), partition, topic_id: 1 }
    }

    fn member(id: &str, silence: i64) -> MemberDescription {
        MemberDescription {
            member_id: id.to_owned(),
            session_timeout: seconds(30),
            since_heartbeat: seconds(silence),
            owned: vec![at(0)],
            target: vec![at(0)],
            ..MemberDescription::default()
        }
    }

    fn offset(offset: u64, status: CommitStatus) -> Option<OffsetAndLag> {
        let committed = CommittedOffset { offset, ..CommittedOffset::default() };
        Some(OffsetAndLag {
            committed: Some(committed),
            log_start_offset: Some(20),
            high_watermark: Some(40),
            lag: Some(40_u64.saturating_sub(offset)),
            status: status.into(),
            ..OffsetAndLag::default()
        })
    }

    fn group(members: Vec<MemberDescription>) -> proto::DescribeGroupResponse {
        proto::DescribeGroupResponse {
            group: "billing".to_owned(),
            members,
            ..proto::DescribeGroupResponse::default()
        }
    }

    #[test]
    fn every_status_has_a_sentence() {
        let unheard = MemberDescription { since_heartbeat: None, ..member("m3", 0) };
        let group = group(vec![member("m1", 20), member("m2", 1), unheard]);
        let partition = |status: DeliveryStatus, owner: &str, offset: Option<OffsetAndLag>| {
            let partition = GroupPartition {
                partition: Some(at(0)),
                owner: owner.to_owned(),
                target: "m2".to_owned(),
                waiting_for: "m1".to_owned(),
                detail: "none subscribes".to_owned(),
                offset,
                status: status.into(),
                ..GroupPartition::default()
            };
            of_partition(&group, &partition, &ShortNames::default())
        };
        use DeliveryStatus as S;
        let valid = || offset(39, CommitStatus::Valid);
        for (status, owner, offset, words) in [
            (S::Flowing, "m2", None, "m2, which has committed no offset yet"),
            (S::Flowing, "m2", valid(), "m2, whose commit is 1 record behind the end"),
            (S::NoNewRecords, "m2", offset(40, CommitStatus::Valid), "m2 has committed all"),
            (S::NoNewRecords, "m2", None, "has no records for m2 to read"),
            (S::Unassigned, "", valid(), "no member, 1 record behind the end: none subscribes"),
            (S::Unassigned, "", None, "no member: none subscribes"),
            (S::WaitingForRelease, "m1", None, "m2 once m1 has released it, but that member is"),
            (S::OwnerSilent, "m1", None, "silent for 20.00 s and is removed in 10.00 s"),
            (S::OwnerSilent, "m3", None, "m3, which has not been heard since the coordinator"),
            (S::Paused, "m2", offset(20, CommitStatus::Valid), "at m2, 20 records behind"),
            (S::OffsetOutOfRange, "m2", offset(7, CommitStatus::BelowLogStart), "up to 20, beyond"),
            (
                S::OffsetOutOfRange,
                "m2",
                offset(41, CommitStatus::AboveHighWatermark),
                "ends at 40, before the committed offset 41; see helix group reset billing",
            ),
            (S::Throttled, "m2", offset(20, CommitStatus::Valid), "quota of m2, 20 records behind"),
            (S::NoLeader, "m2", None, "no leader"),
            (S::TopicDeleted, "", None, "topic was deleted"),
            (S::TopicRecreated, "m2", None, "helix group seek billing orders --to earliest"),
            (S::Unspecified, "", None, "does not know: none subscribes"),
        ] {
            let sentence = partition(status, owner, offset);
            assert!(sentence.contains(words), "{status:?}: {sentence}");
        }
    }

    #[test]
    fn sentences_of_members_say_what_they_wait_for() {
        let of_group = |gateway: &str, member| {
            let mut group =
                proto::DescribeGroupResponse { gateway: gateway.to_owned(), ..group(vec![]) };
            group.set_state(GroupState::Stable);
            of_member(&group, &member, &ShortNames::default())
        };
        let of = |member| of_group("", member);
        let named = MemberDescription {
            static_name: "worker-1".to_owned(),
            client_name: "app".to_owned(),
            ..member("m1", 2)
        };
        let expected = "m1 (worker-1, app) reads 1 partition; its last heartbeat was 2.00 s ago";
        assert_eq!(of(named), expected);
        let waiting = MemberDescription { target: vec![at(0), at(1)], ..member("m1", 1) };
        assert!(of(waiting).contains("reads 1 partition and waits for 1 more"));
        let moving = MemberDescription { target: vec![at(1)], ..member("m1", 1) };
        assert!(of(moving).contains("reads 0 partitions, has to release 1 and waits for 1"));
        let unheard = MemberDescription { since_heartbeat: None, ..member("m1", 1) };
        assert!(of(unheard).contains("not been heard since the coordinator changed"));
        assert!(of(member("m1", 16)).contains("is removed in 14.00 s"));
        assert!(of(member("m1", 31)).contains("is being removed"));
        let reported = of_group("k1:9292", member("m1", 0));
        assert_eq!(reported, "m1 reads 1 partition, as the gateway reports");
    }
}
