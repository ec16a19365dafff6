//! The rows of `helix top`, and how they are drawn. Fits 80 columns and 24 rows.

use std::time::{Duration, SystemTime};

use helix_client::proto::log::v1::{GroupSummary, SlowCall, SlowCallKind};
use helix_proto::shown::one_line;
use prost_types::Timestamp;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Clear, Paragraph, Row, Table};

use super::Controls;
use super::rates::{Sample, rate};
use crate::clock;
use crate::commands::cluster::health::ClusterHealth;
use crate::commands::topic::record_count;
use crate::commands::trace::stage_name;
use crate::units;

/// A table of the view.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Section {
    #[default]
    Nodes,
    Shards,
    Topics,
    Groups,
    Slow,
}

const SECTIONS: [Section; 5] =
    [Section::Nodes, Section::Shards, Section::Topics, Section::Groups, Section::Slow];

impl Section {
    pub(super) fn next(self) -> Self {
        SECTIONS[(self as usize + 1) % SECTIONS.len()]
    }

    pub(super) fn previous(self) -> Self {
        SECTIONS[(self as usize + SECTIONS.len() - 1) % SECTIONS.len()]
    }

    fn title(self) -> &'static str {
        match self {
            Self::Nodes => "Nodes",
            Self::Shards => "Shards",
            Self::Topics => "Topics",
            Self::Groups => "Groups",
            Self::Slow => "Slowest calls of the last 15 minutes",
        }
    }

    /// Returns the headings and the widths of the columns; the first one takes the rest.
    fn columns(self) -> &'static [(&'static str, u16)] {
        match self {
            Self::Nodes => &[
                ("NODE", 0),
                ("STATE", 11),
                ("LEADS", 5),
                ("CPU%", 6),
                ("MEMORY", 9),
                ("FREE", 9),
                ("SYNC P99", 9),
            ],
            Self::Shards => &[
                ("SHARD", 0),
                ("LEADER", 6),
                ("TERM", 6),
                ("ENTRIES/S", 9),
                ("PARTS", 6),
                ("LAG", 8),
                ("BEHIND", 12),
            ],
            Self::Topics => {
                &[("TOPIC", 0), ("PARTS", 6), ("RECORDS/S", 9), ("RECORDS", 15), ("SIZE", 9)]
            }
            Self::Groups => &[("GROUP", 0), ("STATE", 12), ("MEMBERS", 7), ("LAG", 15)],
            Self::Slow => {
                &[("CALL", 0), ("NODE", 4), ("AT", 12), ("TOOK", 9), ("LONGEST STAGE", 20)]
            }
        }
    }
}

/// A row of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ViewRow {
    cells: Vec<String>,
    /// Something is wrong with the thing that it shows.
    is_bad: bool,
}

/// Everything that is shown.
#[derive(Debug, Clone)]
pub(super) struct TopView {
    title: String,
    is_healthy: bool,
    /// The first line says how the cluster is; the others name the issues.
    health: Vec<String>,
    tables: [Vec<ViewRow>; 5],
}

impl TopView {
    /// Returns the view before the first answer.
    pub(super) fn waiting(addr: &str) -> Self {
        let health = vec![format!("waiting for {addr}")];
        Self { title: "helix top".to_owned(), is_healthy: true, health, tables: Default::default() }
    }

    /// Returns this view with the reason why it is out of date.
    pub(super) fn silent(self, why: &str) -> Self {
        Self { is_healthy: false, health: vec![format!("no node answers: {why}")], ..self }
    }

    pub(super) fn new(before: Option<&Sample>, now: &Sample) -> Self {
        let health = ClusterHealth::of(&now.snapshot);
        let metadata = now.snapshot.metadata();
        let id = metadata.map(|it| it.cluster_id.chars().take(8).collect::<String>());
        let title =
            format!("helix top  cluster {}  {}", id.unwrap_or_default(), time(clock::now()));
        let issues = health.issue_lines();
        let mut lines = vec![match issues.len() {
            0 if health.is_healthy() => "healthy".to_owned(),
            0 => "NOT healthy".to_owned(),
            count => format!("NOT healthy: {}", units::counted(count as u64, "issue")),
        }];
        lines.extend(issues);
        let (nodes, shards) = (nodes(before, now), shards(before, now));
        let tables = [nodes, shards, topics(before, now), groups(now), slow(now)];
        Self { title, is_healthy: health.is_healthy(), health: lines, tables }
    }
}

fn nodes(before: Option<&Sample>, now: &Sample) -> Vec<ViewRow> {
    let leaders = now.snapshot.leaders();
    let row = |node: &crate::commands::cluster::snapshot::NodeSnapshot| {
        let id = node.node_id;
        let status = node.report.as_ref().ok().map(|report| &report.status);
        let led = leaders.values().flatten().filter(|leader| leader.node_id == id).count();
        let cpu = before.and_then(|before| now.cpu_percent(before, id));
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), units::bytes);
        let sync = status.and_then(|it| helix_proto::time::duration(it.sync_p99?).ok());
        ViewRow {
            cells: vec![
                format!("{id} {}", node.endpoint),
                if status.is_some() { "up" } else { "unreachable" }.to_owned(),
                led.to_string(),
                cpu.map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.1}")),
                bytes(status.map(|status| status.rss_bytes)),
                bytes(status.map(|status| status.free_bytes)),
                sync.map_or_else(|| "-".to_owned(), units::measured),
            ],
            is_bad: status.is_none(),
        }
    };
    now.snapshot.nodes.iter().map(row).collect()
}

fn shards(before: Option<&Sample>, now: &Sample) -> Vec<ViewRow> {
    let row = |(shard_id, leader): (u32, Option<helix_client::proto::log::v1::LeaderHint>)| {
        let nodes = now.snapshot.nodes.iter().map(|node| node.node_id);
        let replicas: Vec<_> =
            nodes.filter_map(|id| Some((id, now.snapshot.replica(shard_id, id)?))).collect();
        let committed = replicas.iter().map(|(_, it)| it.committed_index).max().unwrap_or(0);
        let lag = |status: &helix_client::proto::log::v1::ShardStatus| {
            committed.saturating_sub(status.synced_index)
        };
        let behind = replicas.iter().filter(|(_, status)| lag(status) > 0);
        let behind: Vec<_> = behind.map(|(id, _)| id.to_string()).collect();
        // No replica is reported of a shard that no node serves.
        let most = |of: &dyn Fn(&helix_client::proto::log::v1::ShardStatus) -> u64| {
            let most = replicas.iter().map(|(_, it)| of(it)).max();
            most.map_or_else(|| "-".to_owned(), units::count)
        };
        let entries = before.and_then(|before| now.entries_per_second(before, shard_id));
        let (node, term) = match &leader {
            Some(leader) => (leader.node_id.to_string(), leader.term.to_string()),
            None => ("none".to_owned(), "-".to_owned()),
        };
        ViewRow {
            cells: vec![
                shard_id.to_string(),
                node,
                term,
                rate(entries),
                most(&|it| it.partition_count.into()),
                most(&lag),
                if behind.is_empty() { "-".to_owned() } else { behind.join(",") },
            ],
            is_bad: leader.is_none(),
        }
    };
    now.snapshot.leaders().into_iter().map(row).collect()
}

/// Returns the topics, the busiest first.
fn topics(before: Option<&Sample>, now: &Sample) -> Vec<ViewRow> {
    let Some(topics) = &now.topics else { return Vec::new() };
    let mut rows: Vec<(f64, ViewRow)> = Vec::new();
    for topic in topics {
        let records = topic.partitions.iter().map(record_count).sum::<Option<u64>>();
        let bytes = topic.partitions.iter().map(|it| it.live_bytes).sum::<Option<u64>>();
        let is_known = records.is_some();
        let shown = |number: Option<u64>, form: fn(u64) -> String| {
            number.map_or_else(|| "-".to_owned(), form)
        };
        let per_second = before.and_then(|before| now.records_per_second(before, topic));
        let cells = vec![
            topic.name.clone(),
            topic.partitions.len().to_string(),
            rate(per_second),
            shown(records, units::count),
            shown(bytes, units::bytes),
        ];
        rows.push((per_second.unwrap_or(0.0), ViewRow { cells, is_bad: !is_known }));
    }
    rows.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    rows.into_iter().map(|(_, row)| row).collect()
}

/// Returns the groups, those with the most lag first.
fn groups(now: &Sample) -> Vec<ViewRow> {
    let mut groups: Vec<&GroupSummary> = now.groups.iter().flatten().collect();
    let lag = |group: &GroupSummary| group.total_lag.saturating_add(group.uncommitted_lag);
    groups.sort_by_key(|group| std::cmp::Reverse(lag(group)));
    let row = |group: &&GroupSummary| ViewRow {
        cells: vec![
            group.group.clone(),
            crate::commands::group::rows::state_name(group.state()).to_owned(),
            group.member_count.to_string(),
            units::count(lag(group)),
        ],
        is_bad: group.member_count == 0 && lag(group) > 0,
    };
    groups.iter().map(row).collect()
}

/// Returns the slowest calls with the stage in which each spent the most time.
fn slow(now: &Sample) -> Vec<ViewRow> {
    let row = |(node_id, call): &(u64, SlowCall)| {
        let kind = match call.kind() {
            SlowCallKind::Read => "read",
            SlowCallKind::Append | SlowCallKind::Unspecified => "append",
        };
        let topic = if call.topic.is_empty() { "(hidden)" } else { &call.topic };
        let longest = call.stages.iter().max_by_key(|stage| took(stage.duration));
        let longest = longest.map_or_else(String::new, |stage| {
            format!("{} {}", stage_name(stage.stage()), units::measured(took(stage.duration)))
        });
        let at = call.time.and_then(|at| helix_proto::time::system_time(at).ok());
        ViewRow {
            cells: vec![
                format!("{kind} {topic}/{}", call.partition),
                node_id.to_string(),
                at.map(time).unwrap_or_default(),
                units::measured(took(call.duration)),
                longest,
            ],
            is_bad: false,
        }
    };
    now.slow.iter().map(row).collect()
}

/// Returns a duration as sent; zero if it is missing or not valid.
pub(super) fn took(wire: Option<prost_types::Duration>) -> Duration {
    wire.and_then(|wire| helix_proto::time::duration(wire).ok()).unwrap_or_default()
}

/// Returns the time of day in UTC.
fn time(time: SystemTime) -> String {
    let text = Timestamp::from(time).to_string();
    text.get(11..19).map(|time| format!("{time} UTC")).unwrap_or_default()
}

pub(super) fn draw(frame: &mut Frame<'_>, view: &TopView, controls: &mut Controls) {
    let issues = view.health.len().min(4);
    let [head, health, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(u16::try_from(issues).unwrap_or(1)),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let paused = if controls.is_paused { "  paused" } else { "" };
    let title = one_line(&view.title);
    let title = Line::from(vec![Span::styled(title, bold), Span::raw(paused)]);
    frame.render_widget(title, head);
    let colour = if view.is_healthy { Color::Green } else { Color::Red };
    let lines = view.health.iter().take(issues).map(|line| Line::raw(one_line(line)));
    let lines: Vec<Line<'_>> = lines.collect();
    frame.render_widget(Paragraph::new(lines).style(Style::new().fg(colour)), health);
    let heights = heights(view, body.height, controls.section);
    let areas: [Rect; 5] = Layout::vertical(heights.map(Constraint::Length)).areas(body);
    for (section, area) in SECTIONS.into_iter().zip(areas) {
        table(frame, area, section, &view.tables[section as usize], controls);
    }
    let keys = " q quit  ? help  space pause  tab next table  up/down scroll";
    frame.render_widget(Line::styled(keys, Style::new().add_modifier(Modifier::REVERSED)), foot);
    if controls.shows_help {
        help(frame);
    }
}

/// Divides the height: each table gets a title, a heading and its rows; the selected one gets rows
/// that others do not need, and before others.
fn heights(view: &TopView, total: u16, selected: Section) -> [u16; 5] {
    let mut heights = [3_u16; 5];
    let mut left = total.saturating_sub(15);
    let mut order = SECTIONS.to_vec();
    order.sort_by_key(|section| *section != selected);
    for section in order {
        let rows = u16::try_from(view.tables[section as usize].len()).unwrap_or(u16::MAX);
        let more = rows.saturating_sub(1).min(left);
        heights[section as usize] += more;
        left -= more;
    }
    heights[Section::Slow as usize] += left;
    heights
}

fn table(
    frame: &mut Frame<'_>,
    area: Rect,
    section: Section,
    rows: &[ViewRow],
    controls: &mut Controls,
) {
    let is_selected = controls.section == section;
    let fit = usize::from(area.height.saturating_sub(2));
    let first = if is_selected {
        controls.scroll = controls.scroll.min(rows.len().saturating_sub(fit.max(1)));
        controls.scroll
    } else {
        0
    };
    let title = match rows.len() {
        0 => format!("{}: none", section.title()),
        count if count > fit => {
            format!("{} {}-{} of {count}", section.title(), first + 1, (first + fit).min(count))
        }
        _ => section.title().to_owned(),
    };
    let style = Style::new().fg(Color::Cyan);
    let style = if is_selected { style.add_modifier(Modifier::BOLD) } else { style };
    let block = Block::new().borders(Borders::TOP).title(title).border_style(style);
    let columns = section.columns();
    let aligned = |(index, text): (usize, &str)| match columns[index].1 {
        0 => text.to_owned(),
        width => format!("{text:>width$}", width = usize::from(width)),
    };
    let heading = columns.iter().map(|(name, _)| *name).enumerate().map(aligned);
    let heading = Row::new(heading).style(Style::new().add_modifier(Modifier::BOLD));
    let lines = rows.iter().skip(first).take(fit).map(|row| {
        let cells = row.cells.iter().map(|cell| one_line(cell)).enumerate();
        let cells = cells.map(|(index, cell)| aligned((index, &cell)));
        let style = if row.is_bad { Style::new().fg(Color::Red) } else { Style::new() };
        Row::new(cells).style(style)
    });
    let widths = columns.iter().map(|(_, width)| match width {
        0 => Constraint::Min(8),
        width => Constraint::Length(*width),
    });
    frame.render_widget(Table::new(lines, widths).header(heading).block(block), area);
}

fn help(frame: &mut Frame<'_>) {
    let text = "\
q, F10, esc      quit
?, h, F1         this help
space, p         pause, continue
tab, right       next table
left             previous table
up, down, j, k   scroll the selected table
pgup, pgdn, home scroll by pages, to the first row

ENTRIES/S are entries of the shard's log, which have one or
more records. LAG is that of the replica that is most behind.";
    let area = frame.area();
    let (width, height) = (64.min(area.width), 12.min(area.height));
    let area = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title("helix top")), area);
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::{PartitionInfo, Stage, StageTime, Topic, Watermarks};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use tokio::time::Instant;

    use super::*;
    use crate::commands::cluster::snapshot::tests::snapshot;

    fn sample() -> Sample {
        let topic = |number: u64| Topic {
            name: format!("topic-{number}"),
            topic_id: number,
            partitions: vec![PartitionInfo {
                watermarks: Some(Watermarks { log_start_offset: 0, high_watermark: number }),
                ..PartitionInfo::default()
            }],
            ..Topic::default()
        };
        let topics = Some((1..=40).map(topic).collect());
        let group = GroupSummary { group: "billing".to_owned(), ..GroupSummary::default() };
        let ms = |nanos| Some(prost_types::Duration { seconds: 0, nanos: nanos * 1_000_000 });
        let stage = |stage: Stage, took| StageTime {
            stage: stage.into(),
            duration: ms(took),
            ..StageTime::default()
        };
        let call = SlowCall {
            kind: SlowCallKind::Append.into(),
            topic: "orders".to_owned(),
            partition: 3,
            duration: ms(90),
            stages: vec![stage(Stage::Sync, 80), stage(Stage::WakeUp, 2)],
            ..SlowCall::default()
        };
        let groups = Some(vec![group]);
        let slow = vec![(2, call)];
        Sample { at: Instant::now(), snapshot: snapshot(), topics, groups, slow }
    }

    fn drawn(controls: &mut Controls) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        let view = TopView::new(None, &sample());
        terminal.draw(|frame| draw(frame, &view, controls)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let cells = buffer.content().chunks(80);
        cells.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>() + "\n").collect()
    }

    #[test]
    fn fits_80_columns_and_24_rows() {
        let text = drawn(&mut Controls::default());
        for part in ["NOT healthy", "unreachable", "SYNC P99", "ENTRIES/S", "topic-1", "billing"] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(text.contains("append orders/3") && text.contains("sync 80"), "{text}");
        assert!(text.contains("q quit"), "{text}");
    }

    #[test]
    fn selected_table_scrolls_to_its_end() {
        let mut controls =
            Controls { section: Section::Topics, scroll: 999, ..Controls::default() };
        let text = drawn(&mut controls);
        assert!(text.contains("topic-40") && !text.contains("topic-1 "), "{text}");
        assert!(controls.scroll < 40);
    }

    #[test]
    fn help_covers_the_view() {
        let text = drawn(&mut Controls { shows_help: true, ..Controls::default() });
        assert!(text.contains("pause, continue"), "{text}");
    }

    #[test]
    fn sections_follow_each_other() {
        assert_eq!(Section::Slow.next(), Section::Nodes);
        assert_eq!(Section::Nodes.previous(), Section::Slow);
    }
}
