//! `helix trace append`: appends one record and shows the stages of the append with their times.

use std::fmt::Write;
use std::time::Duration;

use bytes::Bytes;
use helix_client::AppendOptions;
use helix_proto::log::v1::{Record, Stage, StageTime};
use helix_proto::time;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use crate::api_duration::ApiDuration;
use crate::args::{GlobalArgs, TraceAppendArgs};
use crate::connect::connect;
use crate::durability::durability_name;
use crate::exit::{CliError, Exit};
use crate::output::Output;
use crate::units;

/// Width of the chart, in characters.
const CHART_WIDTH: usize = 40;

/// An append with its stages.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TracedAppend {
    topic: String,
    partition: u32,
    /// Offset of the record. Absent with LEADER_WRITTEN and NONE.
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    durability: &'static str,
    /// Time of the call as this program saw it, with the network.
    duration: Option<ApiDuration>,
    /// Stages on the leader, by their start. They may overlap.
    stages: Vec<StageRow>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StageRow {
    stage: &'static str,
    /// Time from the start of the call on the leader.
    start: Option<ApiDuration>,
    duration: Option<ApiDuration>,
}

pub(crate) async fn run_append(global: &GlobalArgs, args: &TraceAppendArgs) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let batch = vec![Record {
        key: args.key.clone().map(Bytes::from),
        value: Some(Bytes::from(args.value.clone())),
        ..Record::default()
    }];
    let options = AppendOptions {
        durability: args.durability.map(Into::into).unwrap_or_default(),
        ..AppendOptions::default()
    };
    // Finds the leader first, so that the time is that of the append.
    client.route(&args.topic, args.partition).await?;
    let began = Instant::now();
    let appended = client.append_with_stages(&args.topic, args.partition, &batch, &options);
    let (ack, stages) = appended.await?;
    let took = began.elapsed();
    if stages.is_empty() {
        let what = "the record was appended, but the leader does not report stages";
        return Err(CliError::new(Exit::Error, what).hint("update the nodes: helix check").into());
    }
    let traced = TracedAppend {
        topic: args.topic.clone(),
        partition: args.partition,
        offset: ack.first_offset,
        durability: durability_name(ack.durability),
        duration: prost_types::Duration::try_from(took).ok().and_then(ApiDuration::new),
        stages: stages.iter().map(StageRow::new).collect(),
    };
    Output { format: global.output }.show_as(&traced, || traced.chart(took, &stages))
}

impl StageRow {
    fn new(stage: &StageTime) -> Self {
        let name = stage.stage().as_str_name();
        Self {
            stage: name.strip_prefix("STAGE_").unwrap_or(name),
            start: stage.start.and_then(ApiDuration::new),
            duration: stage.duration.and_then(ApiDuration::new),
        }
    }
}

impl TracedAppend {
    fn chart(&self, took: Duration, stages: &[StageTime]) -> String {
        let Self { topic, partition, durability, .. } = self;
        let at = self.offset.map_or_else(String::new, |offset| format!(" at offset {offset}"));
        let mut text = format!(
            "appended to {topic}/{partition}{at}, {durability}, in {}\n\n",
            units::measured(took)
        );
        let spans: Vec<_> = stages.iter().map(StageSpan::new).collect();
        let end = spans.iter().map(|span| span.start + span.took).max().unwrap_or_default();
        for span in &spans {
            let bar = bar(span, end);
            let _ = writeln!(text, "  {:<9} {bar} {:>9}", span.name, units::measured(span.took));
        }
        let _ = writeln!(
            text,
            "\n  on the leader {}; with the network and this program {}",
            units::measured(end),
            units::measured(took)
        );
        text
    }
}

/// Returns the name of a stage as the documentation has it.
pub(crate) fn stage_name(stage: Stage) -> String {
    match stage {
        Stage::WakeUp => "wake-up".to_owned(),
        other => {
            let name = other.as_str_name();
            name.strip_prefix("STAGE_").unwrap_or(name).to_lowercase().replace('_', " ")
        }
    }
}

struct StageSpan {
    name: String,
    start: Duration,
    took: Duration,
}

impl StageSpan {
    fn new(stage: &StageTime) -> Self {
        let of = |wire: Option<prost_types::Duration>| {
            wire.and_then(|wire| time::duration(wire).ok()).unwrap_or_default()
        };
        let name = stage_name(stage.stage());
        Self { name, start: of(stage.start), took: of(stage.duration) }
    }
}

/// Draws a stage on the line from the start to the end of the append. Every stage has a mark.
fn bar(span: &StageSpan, end: Duration) -> String {
    let scale = CHART_WIDTH as f64 / end.as_secs_f64().max(1e-9);
    let place = |time: Duration| (time.as_secs_f64() * scale).round() as usize;
    let from = place(span.start).min(CHART_WIDTH - 1);
    let to = place(span.start + span.took).clamp(from + 1, CHART_WIDTH);
    let mark = if place(span.took) == 0 { "|" } else { "#" };
    format!("{}{}{}", ".".repeat(from), mark.repeat(to - from), ".".repeat(CHART_WIDTH - to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start_us: u64, took_us: u64) -> StageSpan {
        let micros = Duration::from_micros;
        StageSpan { name: String::new(), start: micros(start_us), took: micros(took_us) }
    }

    #[test]
    fn bars_are_within_the_chart() {
        let end = Duration::from_micros(400);
        assert_eq!(bar(&span(0, 400), end), "#".repeat(40));
        let (quarter, half) = (".".repeat(10), ".".repeat(20));
        assert_eq!(bar(&span(100, 100), end), format!("{quarter}{}{half}", "#".repeat(10)));
        assert_eq!(bar(&span(400, 0), end), format!("{}|", ".".repeat(39)));
        assert_eq!(bar(&span(0, 0), Duration::ZERO), format!("|{}", ".".repeat(39)));
    }
}
