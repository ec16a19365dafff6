//! The slowest appends and reads of the last 15 minutes on all nodes, with their stages. One call
//! to each node, and one for the routes.

use std::time::Duration;

use askama::Template;
use futures_util::future::join_all;
use helix_proto::log::v1::{
    GetMetadataRequest, ListSlowCallsRequest, Node, SlowCall, SlowCallKind, Stage, StageTime,
};
use helix_proto::units;
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller;
use super::page::{AdminBody, PageFailure, PageFrame, ROWS_PER_PAGE, duration, html, shown, time};

/// Time for the list of another node; without it the page says so.
const LIST_WAIT_MAX: Duration = Duration::from_secs(2);

/// A name that no topic has: the routes without topics.
const NO_TOPIC: &str = "";

/// Width of a row's picture.
const WIDTH: f64 = 200.0;

#[derive(Template)]
#[template(path = "slow.html")]
struct SlowPage {
    frame: PageFrame,
    kind: &'static str,
    rows: Vec<SlowRow>,
    more: usize,
    /// Nodes without a list, and why.
    silent: Vec<(u64, String)>,
}

struct SlowRow {
    took: String,
    kind: &'static str,
    topic: String,
    partition: u32,
    shard_id: u32,
    node_id: u64,
    at: String,
    size: String,
    stages: Vec<StageBar>,
}

struct StageBar {
    name: String,
    took: String,
    /// Place in the row's picture.
    x: String,
    width: String,
    /// Row of the picture: stages that overlap are in two.
    y: u32,
    /// The longest stage.
    is_longest: bool,
}

/// Shows the page.
pub(super) async fn show(page: &PageRequest) -> Result<Response<AdminBody>, PageFailure> {
    let caller = &page.caller;
    let kind = match page.query.get("kind") {
        "" => "all",
        "append" => "append",
        "read" => "read",
        _ => return Err(PageFailure::bad("kind is one of append, read and nothing")),
    };
    let request = caller.request(GetMetadataRequest { topics: vec![NO_TOPIC.to_owned()] });
    let metadata = caller::cluster(caller.local()).get_metadata(request).await?.into_inner();
    let own_id = metadata.node_id;
    let nodes = metadata.metadata.unwrap_or_default().nodes;
    let lists = join_all(nodes.iter().map(|node| list(page, node, own_id))).await;
    let mut calls: Vec<(u64, SlowCall)> = Vec::new();
    let mut silent = Vec::new();
    for (node, list) in nodes.iter().zip(lists) {
        match list {
            Ok(listed) => calls.extend(listed.into_iter().map(|call| (node.node_id, call))),
            // The page is about this node first.
            Err(failure) if node.node_id == own_id => return Err(failure),
            Err(failure) => silent.push((node.node_id, failure.message)),
        }
    }
    calls.retain(|(_, call)| kind == "all" || kind == kind_name(call.kind()));
    calls.sort_by_key(|(_, call)| std::cmp::Reverse(duration(call.duration)));
    let size = ROWS_PER_PAGE.unsigned_abs() as usize;
    let shown_page = SlowPage {
        frame: PageFrame { refresh_seconds: 5, ..page.frame("Slow appends and reads", "slow") },
        kind,
        more: calls.len().saturating_sub(size),
        rows: calls.iter().take(size).map(|(node_id, call)| row(*node_id, call)).collect(),
        silent,
    };
    html(StatusCode::OK, &shown_page)
}

async fn list(page: &PageRequest, node: &Node, own_id: u64) -> Result<Vec<SlowCall>, PageFailure> {
    let unreachable = |message: String| PageFailure {
        message: shown(&message),
        ..PageFailure::of(StatusCode::SERVICE_UNAVAILABLE)
    };
    let channel = match node.node_id == own_id {
        true => page.caller.local(),
        false => page.caller.other(&node.endpoint).map_err(unreachable)?,
    };
    let mut cluster = caller::cluster(channel);
    let listed = cluster.list_slow_calls(page.caller.request(ListSlowCallsRequest {}));
    match tokio::time::timeout(LIST_WAIT_MAX, listed).await {
        Ok(listed) => Ok(listed?.into_inner().calls),
        Err(_) => {
            let wait = units::duration(LIST_WAIT_MAX);
            Err(unreachable(format!("it has not answered for {wait}")))
        }
    }
}

fn kind_name(kind: SlowCallKind) -> &'static str {
    match kind {
        SlowCallKind::Append => "append",
        SlowCallKind::Read => "read",
        SlowCallKind::Unspecified => "call",
    }
}

fn row(node_id: u64, call: &SlowCall) -> SlowRow {
    let took = duration(call.duration).unwrap_or_default();
    let records = units::counted(call.records, "record");
    SlowRow {
        took: units::measured(took),
        kind: kind_name(call.kind()),
        topic: shown(&call.topic),
        partition: call.partition,
        shard_id: call.shard_id,
        node_id,
        at: time(call.time.as_ref()),
        size: format!("{records}, {}", units::bytes(call.bytes)),
        stages: bars(&call.stages, took),
    }
}

/// Places the stages on a line as long as the call.
fn bars(stages: &[StageTime], took: Duration) -> Vec<StageBar> {
    let times = |stage: &StageTime| {
        let of = |wire| duration(wire).unwrap_or_default();
        (of(stage.start), of(stage.duration))
    };
    let longest = stages.iter().map(|stage| times(stage).1).max().unwrap_or_default();
    let scale = WIDTH / took.as_secs_f64().max(1e-9);
    let mut ends = [Duration::ZERO; 2];
    let bar = |stage: &StageTime| {
        let (start, took) = times(stage);
        let y = u32::from(start < ends[0]);
        ends[y as usize] = ends[y as usize].max(start + took);
        let x = (start.as_secs_f64() * scale).min(WIDTH - 1.0);
        let width = (took.as_secs_f64() * scale).clamp(1.0, WIDTH - x);
        StageBar {
            name: stage_name(stage.stage()),
            took: units::measured(took),
            x: format!("{x:.1}"),
            width: format!("{width:.1}"),
            y: y * 8,
            is_longest: took == longest && !took.is_zero(),
        }
    };
    stages.iter().map(bar).collect()
}

fn stage_name(stage: Stage) -> String {
    let name = stage.as_str_name();
    let name = name.strip_prefix("STAGE_").unwrap_or(name).to_lowercase();
    // One word of the documentation has a hyphen.
    if stage == Stage::WakeUp { "wake-up".to_owned() } else { name.replace('_', " ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_drawn_within_the_call() {
        let ms = |count: i32| Some(prost_types::Duration { seconds: 0, nanos: count * 1_000_000 });
        let stage = |stage: Stage, start, took| StageTime {
            stage: stage.into(),
            start: ms(start),
            duration: ms(took),
        };
        let stages = [
            stage(Stage::Queue, 0, 10),
            stage(Stage::LogWrite, 10, 1),
            stage(Stage::Sync, 11, 79),
            stage(Stage::Quorum, 15, 200),
        ];
        let bars = bars(&stages, Duration::from_millis(100));
        let shown: Vec<_> = bars.iter().map(|it| (&*it.name, &*it.x, &*it.width, it.y)).collect();
        let expected = [
            ("queue", "0.0", "20.0", 0),
            ("log write", "20.0", "2.0", 0),
            ("sync", "22.0", "158.0", 0),
            ("quorum", "30.0", "170.0", 8),
        ];
        assert_eq!(shown, expected);
        assert!(bars[3].is_longest && !bars[2].is_longest);
    }
}
