//! One group: its members, and for each partition the lag and in words why records arrive or not.
//! Partitions that need attention come first. One call, at the group's coordinator.

use std::time::Duration;

use askama::Template;
use helix_proto::explanation;
use helix_proto::log::v1::{
    DeliveryStatus, DescribeGroupRequest, DescribeGroupResponse, GroupLagHistory, GroupPartition,
    MemberDescription, OffsetChangeKind,
};
use helix_proto::short_names::ShortNames;
use helix_proto::units;
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller;
use super::chart::LoadChart;
use super::groups::state_name;
use super::page::{AdminBody, PageFailure, PageFrame, ROWS_PER_PAGE, duration, html, shown, time};
use super::position;

/// Members and partitions that the call returns: the limit of the API.
const CALL_ROWS_MAX: i32 = 10_000;

/// Time that the chart of the lag covers.
const HISTORY_SPAN: Duration = Duration::from_secs(900);

/// Members that a page shows, and changes of offsets of one partition.
const MEMBERS_MAX: usize = 100;
const HISTORY_MAX: usize = 5;

#[derive(Template)]
#[template(path = "group.html")]
struct GroupPage {
    frame: PageFrame,
    name: String,
    explanation: String,
    state: &'static str,
    coordinator: u64,
    shard_id: u32,
    epoch: u64,
    lag: String,
    /// Lag over time; absent for a caller who may not see it.
    lag_chart: Option<LoadChart>,
    lag_interval: u64,
    /// Partitions that need attention.
    troubled: usize,
    members: Vec<MemberRow>,
    more_members: usize,
    rows: Vec<GroupPartitionRow>,
    partition_count: String,
    previous: String,
    next: String,
    is_whole: bool,
    topics: Vec<String>,
    forms: &'static str,
    history: Vec<HistoryRow>,
}

struct MemberRow {
    id: String,
    explanation: String,
    is_silent: bool,
}

struct GroupPartitionRow {
    topic: String,
    partition: u32,
    owner: String,
    committed: String,
    end: String,
    lag: String,
    has_lag: bool,
    status: String,
    is_troubled: bool,
    explanation: String,
}

struct HistoryRow {
    topic: String,
    partition: u32,
    kind: &'static str,
    by: String,
    from: String,
    to: String,
    at: String,
}

/// Shows the page.
pub(super) async fn show(
    page: &PageRequest,
    name: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let group = describe(page, name).await?;
    let names = ShortNames::of(group.members.iter().map(|member| &*member.member_id));
    let first = page.query.number("first", 0, u32::MAX.into()).map_err(PageFailure::bad)?;
    let count = group.partitions.len();
    let first = usize::try_from(first).unwrap_or(usize::MAX).min(count);
    let size = ROWS_PER_PAGE.unsigned_abs() as usize;
    let link = |first: usize| format!("/console/groups/{name}?first={first}");
    let mut partitions: Vec<&GroupPartition> = group.partitions.iter().collect();
    partitions.sort_by_key(|partition| {
        let at = partition.partition.as_ref();
        let lag = partition.offset.as_ref().and_then(|offset| offset.lag).unwrap_or(0);
        let name = at.map(|at| (at.topic.as_str(), at.partition));
        (!is_troubled(partition.status()), std::cmp::Reverse(lag), name)
    });
    let lags = group.partitions.iter().filter_map(|it| it.offset.as_ref()?.lag);
    let lag = lags.fold(group.uncommitted_lag, u64::saturating_add);
    let mut topics: Vec<String> = group.partitions.iter().map(topic_of).collect();
    topics.dedup();
    topics.sort();
    topics.dedup();
    let interval = group.lag_history.as_ref().and_then(|history| duration(history.interval));
    let interval = interval.unwrap_or_default();
    let on_page = || partitions.iter().skip(first).take(size);
    let more = first.checked_add(size).filter(|next| *next < count);
    let shown_page = GroupPage {
        frame: PageFrame { refresh_seconds: 5, ..page.frame(shown(&group.group), "groups") },
        name: shown(&group.group),
        explanation: shown(&explanation::of_group(&group)),
        state: state_name(group.state()),
        coordinator: group.coordinator_node_id,
        shard_id: group.shard_id,
        epoch: group.group_epoch,
        lag: units::counted(lag, "record"),
        lag_chart: group.lag_history.as_ref().and_then(lag_chart),
        lag_interval: interval.as_secs(),
        troubled: partitions.iter().filter(|it| is_troubled(it.status())).count(),
        members: group
            .members
            .iter()
            .take(MEMBERS_MAX)
            .map(|member| member_row(&group, member, &names))
            .collect(),
        more_members: group.members.len().saturating_sub(MEMBERS_MAX),
        rows: on_page().map(|partition| partition_row(&group, partition, &names)).collect(),
        partition_count: units::counted(count as u64, "partition"),
        previous: if first > 0 { link(first.saturating_sub(size)) } else { String::new() },
        next: more.map(link).unwrap_or_default(),
        is_whole: group.next_page_token.is_empty(),
        topics,
        forms: position::FORMS,
        history: on_page().flat_map(|partition| history_rows(partition)).take(size).collect(),
    };
    html(StatusCode::OK, &shown_page)
}

/// Draws the lag of the last 15 minutes. `None` before the first sample.
fn lag_chart(history: &GroupLagHistory) -> Option<LoadChart> {
    let interval = duration(history.interval).filter(|interval| !interval.is_zero())?;
    let samples_max = HISTORY_SPAN.as_secs() / interval.as_secs().max(1);
    let samples_max = usize::try_from(samples_max).unwrap_or(usize::MAX).clamp(2, 1_000);
    let values: Vec<f64> = history.lags.iter().map(|lag| *lag as f64).collect();
    let format = |value: f64| units::counted(value as u64, "record");
    (!values.is_empty()).then(|| LoadChart::of_samples("Lag", &values, samples_max, format))
}

/// Requests the description of a group.
pub(super) async fn describe(
    page: &PageRequest,
    name: &str,
) -> Result<DescribeGroupResponse, PageFailure> {
    let request = DescribeGroupRequest {
        group: name.to_owned(),
        include_history: true,
        page_size: CALL_ROWS_MAX,
        ..DescribeGroupRequest::default()
    };
    let described = page.caller.routed(request, |channel, request| async move {
        caller::groups(channel).describe_group(request).await
    });
    described.await.map_err(|failed| PageFailure::from(failed).back_to("/console/groups", "groups"))
}

fn topic_of(partition: &GroupPartition) -> String {
    partition.partition.as_ref().map_or_else(String::new, |at| shown(&at.topic))
}

/// Returns true for a status in which records do not arrive, though there may be some.
fn is_troubled(status: DeliveryStatus) -> bool {
    !matches!(status, DeliveryStatus::Flowing | DeliveryStatus::NoNewRecords)
}

fn member_row(
    group: &DescribeGroupResponse,
    member: &MemberDescription,
    names: &ShortNames,
) -> MemberRow {
    let timeout = duration(member.session_timeout).unwrap_or_default();
    let silence = duration(member.since_heartbeat);
    MemberRow {
        id: shown(&member.member_id),
        explanation: shown(&explanation::of_member(group, member, names)),
        is_silent: group.gateway.is_empty() && silence.is_none_or(|silence| silence > timeout / 2),
    }
}

fn partition_row(
    group: &DescribeGroupResponse,
    partition: &GroupPartition,
    names: &ShortNames,
) -> GroupPartitionRow {
    let offset = partition.offset.as_ref();
    let committed = offset.and_then(|it| it.committed.as_ref()).map(|it| it.offset);
    let count = |number: Option<u64>| number.map_or_else(String::new, units::count);
    let lag = offset.and_then(|it| it.lag).or(partition.uncommitted_lag);
    let status = partition.status().as_str_name().trim_start_matches("DELIVERY_STATUS_");
    GroupPartitionRow {
        topic: topic_of(partition),
        partition: partition.partition.as_ref().map_or(0, |at| at.partition),
        owner: shown(names.get(&partition.owner)),
        committed: count(committed),
        end: count(offset.and_then(|it| it.high_watermark)),
        lag: count(lag),
        has_lag: lag.unwrap_or(0) > 0,
        status: status.to_lowercase().replace('_', " "),
        is_troubled: is_troubled(partition.status()),
        explanation: shown(&explanation::of_partition(group, partition, names)),
    }
}

/// Returns the last changes of a partition's offset, the newest first; only seeks and what they
/// ended.
fn history_rows(partition: &GroupPartition) -> Vec<HistoryRow> {
    let has_seek = partition.history.iter().any(|it| it.kind() != OffsetChangeKind::Commit);
    let changes = partition.history.iter().rev().filter(|_| has_seek).take(HISTORY_MAX);
    let row = |change: &helix_proto::log::v1::OffsetChange| HistoryRow {
        topic: topic_of(partition),
        partition: partition.partition.as_ref().map_or(0, |at| at.partition),
        kind: match change.kind() {
            OffsetChangeKind::Commit => "commits",
            OffsetChangeKind::Seek => "seek",
            OffsetChangeKind::Undo => "undo",
            OffsetChangeKind::Unspecified => "change",
        },
        by: shown(&change.by),
        from: change.from.map_or_else(String::new, units::count),
        to: units::count(change.to),
        at: time(change.until.as_ref().or(change.since.as_ref())),
    };
    changes.map(row).collect()
}
