//! One topic: its settings, one page of its partitions, and the groups that read it. Two calls.

use askama::Template;
use helix_proto::log::v1::{GetTopicRequest, ListGroupsRequest, PartitionInfo, Topic};
use helix_proto::units;
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller;
use super::form::encode;
use super::groups::{ListedGroupRow, group_row};
use super::page::{AdminBody, PageFailure, PageFrame, ROWS_PER_PAGE, html, shown};
use super::settings_form::{self, SettingField};
use super::topics::records;

#[derive(Template)]
#[template(path = "topic.html")]
struct TopicPage {
    frame: PageFrame,
    name: String,
    topic_id: u64,
    partition_count: String,
    replication_factor: u32,
    records: String,
    settings: Vec<SettingField>,
    rows: Vec<PartitionRow>,
    previous: String,
    next: String,
    groups: Vec<ListedGroupRow>,
    /// Page of further groups; empty if there are none.
    more_groups: String,
}

struct PartitionRow {
    partition: u32,
    shard_id: u32,
    /// 0 without a leader.
    leader: u64,
    replicas: String,
    start: String,
    end: String,
    records: String,
    live: String,
    held: String,
    note: String,
}

/// Requests a topic.
pub(super) async fn get(page: &PageRequest, name: &str) -> Result<Topic, PageFailure> {
    let request = page.caller.request(GetTopicRequest { name: name.to_owned() });
    let found = caller::topics(page.caller.local()).get_topic(request).await;
    let found =
        found.map_err(|status| PageFailure::from(status).back_to("/console/topics", "topics"));
    Ok(found?.into_inner().topic.unwrap_or_default())
}

/// Shows the page.
pub(super) async fn show(
    page: &PageRequest,
    name: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let topic = get(page, name).await?;
    let request = page.caller.request(ListGroupsRequest {
        topic: name.to_owned(),
        page_size: ROWS_PER_PAGE,
        page_token: page.query.get("groups").to_owned(),
        ..ListGroupsRequest::default()
    });
    let groups = caller::groups(page.caller.local()).list_groups(request).await?.into_inner();
    let more_groups = match groups.next_page_token.as_str() {
        "" => String::new(),
        token => format!("/console/topics/{name}?groups={}#groups", encode(token)),
    };
    let count = topic.partitions.len();
    let first = page.query.number("first", 0, u32::MAX.into()).map_err(PageFailure::bad)?;
    let size = ROWS_PER_PAGE.unsigned_abs() as usize;
    let first = usize::try_from(first).unwrap_or(usize::MAX).min(count);
    let link = |first: usize| format!("/console/topics/{name}?first={first}");
    let more = first.checked_add(size).filter(|next| *next < count);
    let shown_page = TopicPage {
        frame: page.frame(shown(&topic.name), "topics"),
        name: shown(&topic.name),
        topic_id: topic.topic_id,
        partition_count: units::counted(count as u64, "partition"),
        replication_factor: topic.replication_factor,
        records: records(&topic),
        settings: settings_form::fields(topic.config.as_ref()),
        rows: topic.partitions.iter().skip(first).take(size).map(partition_row).collect(),
        previous: if first > 0 { link(first.saturating_sub(size)) } else { String::new() },
        next: more.map(link).unwrap_or_default(),
        groups: groups.groups.iter().map(group_row).collect(),
        more_groups,
    };
    html(StatusCode::OK, &shown_page)
}

fn partition_row(partition: &PartitionInfo) -> PartitionRow {
    let replicas: Vec<String> = partition.replicas.iter().map(u64::to_string).collect();
    let marks = partition.watermarks;
    let bytes = |bytes: Option<u64>| bytes.map_or_else(String::new, units::bytes);
    let mut notes = Vec::new();
    if partition.is_uncleanable {
        notes.push("cannot be compacted by key; see the health of the cluster".to_owned());
    }
    if let Some(token) = &partition.fencing_token {
        notes.push(format!("fencing token {}", shown(token)));
    }
    PartitionRow {
        partition: partition.partition,
        shard_id: partition.shard_id,
        leader: partition.leader.as_ref().map_or(0, |leader| leader.node_id),
        replicas: replicas.join(", "),
        start: marks.map_or_else(String::new, |it| units::count(it.log_start_offset)),
        end: marks.map_or_else(String::new, |it| units::count(it.high_watermark)),
        records: marks.map_or_else(String::new, |it| {
            units::count(it.high_watermark.saturating_sub(it.log_start_offset))
        }),
        live: bytes(partition.live_bytes),
        held: bytes(partition.held_bytes),
        note: notes.join("; "),
    }
}
