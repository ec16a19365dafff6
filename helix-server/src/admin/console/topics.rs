//! The list of topics: one page of the names with a prefix, and the form for a new topic. One call.

use askama::Template;
use helix_proto::log::v1::{ListTopicsRequest, Topic};
use helix_proto::units;
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller;
use super::form::encode;
use super::page::{AdminBody, PageFailure, PageFrame, ROWS_PER_PAGE, duration, html, shown};

#[derive(Template)]
#[template(path = "topics.html")]
struct TopicsPage {
    frame: PageFrame,
    prefix: String,
    rows: Vec<TopicRow>,
    /// Link to the next page; empty on the last one.
    next: String,
    is_first: bool,
}

struct TopicRow {
    name: String,
    partitions: String,
    records: String,
    live: String,
    held: String,
    retention: String,
    cleanup: &'static str,
    /// Partitions without a leader.
    leaderless: usize,
}

/// Shows the page.
pub(super) async fn show(page: &PageRequest) -> Result<Response<AdminBody>, PageFailure> {
    let prefix = page.query.get("prefix");
    let after = page.query.get("after");
    let request = page.caller.request(ListTopicsRequest {
        prefix: prefix.to_owned(),
        page_size: ROWS_PER_PAGE,
        page_token: after.to_owned(),
    });
    let found = caller::topics(page.caller.local()).list_topics(request).await?.into_inner();
    let next = match found.next_page_token.as_str() {
        "" => String::new(),
        token => format!("/console/topics?prefix={}&after={}", encode(prefix), encode(token)),
    };
    let shown_page = TopicsPage {
        frame: page.frame("Topics", "topics"),
        prefix: prefix.to_owned(),
        rows: found.topics.iter().map(topic_row).collect(),
        next,
        is_first: after.is_empty(),
    };
    html(StatusCode::OK, &shown_page)
}

fn topic_row(topic: &Topic) -> TopicRow {
    let config = topic.config.unwrap_or_default();
    TopicRow {
        name: shown(&topic.name),
        partitions: units::count(topic.partitions.len() as u64),
        records: records(topic),
        live: sum(topic, |partition| partition.live_bytes),
        held: sum(topic, |partition| partition.held_bytes),
        retention: retention(&config),
        cleanup: cleanup_name(config.cleanup),
        leaderless: topic.partitions.iter().filter(|it| it.leader.is_none()).count(),
    }
}

/// Returns the offsets that can be read, as the number of records: more after compaction by key.
pub(super) fn records(topic: &Topic) -> String {
    let marks = topic.partitions.iter().filter_map(|partition| partition.watermarks);
    let records = marks.map(|it| it.high_watermark.saturating_sub(it.log_start_offset)).sum();
    let is_whole = topic.partitions.iter().all(|partition| partition.watermarks.is_some());
    at_least(units::count(records), is_whole)
}

fn sum(topic: &Topic, of: impl Fn(&helix_proto::log::v1::PartitionInfo) -> Option<u64>) -> String {
    let known: u64 = topic.partitions.iter().filter_map(&of).sum();
    at_least(units::bytes(known), topic.partitions.iter().all(|it| of(it).is_some()))
}

/// Marks a sum that lacks partitions whose values this node does not know.
fn at_least(text: String, is_whole: bool) -> String {
    if is_whole { text } else { format!("at least {text}") }
}

/// Returns the limits of retention in words: "7d, 1 GiB".
pub(super) fn retention(config: &helix_proto::log::v1::TopicConfig) -> String {
    let time = duration(config.retention_time).filter(|time| !time.is_zero());
    let bytes = config.retention_bytes.filter(|bytes| *bytes > 0);
    match (time.map(units::duration), bytes.map(units::bytes)) {
        (Some(time), Some(bytes)) => format!("{time}, {bytes}"),
        (Some(limit), None) | (None, Some(limit)) => limit,
        (None, None) => "unlimited".to_owned(),
    }
}

/// Returns the words for a cleanup policy, as the command line has them.
pub(super) fn cleanup_name(policy: i32) -> &'static str {
    use helix_proto::log::v1::CleanupPolicy;
    match CleanupPolicy::try_from(policy) {
        Ok(CleanupPolicy::Compact) => "compact",
        Ok(CleanupPolicy::CompactAndDelete) => "compact+delete",
        _ => "delete",
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::{PartitionInfo, TopicConfig, Watermarks};

    use super::*;

    #[test]
    fn sums_say_if_a_partition_is_missing() {
        let known = PartitionInfo {
            watermarks: Some(Watermarks { log_start_offset: 5, high_watermark: 1_505 }),
            live_bytes: Some(2_048),
            ..PartitionInfo::default()
        };
        let topic = |partitions| Topic { partitions, ..Topic::default() };
        let whole = topic(vec![known.clone(), known.clone()]);
        assert_eq!(records(&whole), "3,000");
        assert_eq!(sum(&whole, |it| it.live_bytes), "4 KiB");
        let part = topic(vec![known, PartitionInfo::default()]);
        assert_eq!(records(&part), "at least 1,500");
    }

    #[test]
    fn retention_names_its_limits() {
        let config = |seconds: i64, bytes: u64| TopicConfig {
            retention_time: Some(prost_types::Duration { seconds, nanos: 0 }),
            retention_bytes: Some(bytes),
            ..TopicConfig::default()
        };
        assert_eq!(retention(&config(0, 0)), "unlimited");
        assert_eq!(retention(&config(604_800, 0)), "7d");
        assert_eq!(retention(&config(0, 1 << 30)), "1 GiB");
        assert_eq!(retention(&config(60, 1 << 30)), "1m, 1 GiB");
    }
}
