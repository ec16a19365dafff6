//! The rate of acks during the writes of the demo, as a small picture.

use std::fmt::Write;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::write::WriteProgress;
use crate::units::{count, measured};

/// Time between two samples at first.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum number of samples. At this number every second one is dropped.
const SAMPLES_MAX: usize = 4_096;

/// Columns of the picture.
const COLUMNS: usize = 60;

/// Rows of the picture.
const ROWS: usize = 4;

/// Heights of a character cell in eighths.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Counts acks at regular times until it is stopped or dropped.
#[derive(Debug)]
pub(crate) struct AckSampler {
    task: JoinHandle<()>,
    samples: tokio::sync::watch::Receiver<Vec<AckSample>>,
    started: Instant,
}

/// The number of acked records at a time.
#[derive(Debug, Clone, Copy)]
struct AckSample {
    seconds: f64,
    acked: u64,
}

/// The rate of acks over the time of the writes.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AckTimeline {
    /// Length of the writes.
    pub(crate) seconds: f64,
    /// Time of the kill.
    pub(crate) killed_at_seconds: f64,
    /// Rates in equal parts of the writes.
    pub(crate) records_per_sec: Vec<f64>,
}

impl AckSampler {
    /// Starts at a time that has just passed.
    pub(crate) fn start(progress: &WriteProgress, started: Instant) -> Self {
        let (sender, samples) = tokio::sync::watch::channel(Vec::new());
        let progress = progress.clone();
        let task = tokio::spawn(async move {
            let mut ticks = interval(SAMPLE_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
            let mut keeps_every = 1;
            for tick in 0_u64.. {
                ticks.tick().await;
                if tick % keeps_every == 0 {
                    let seconds = started.elapsed().as_secs_f64();
                    let acked = progress.acked();
                    sender.send_modify(|samples| samples.push(AckSample { seconds, acked }));
                }
                if sender.borrow().len() >= SAMPLES_MAX {
                    keeps_every *= 2;
                    sender.send_modify(drop_every_second);
                }
            }
        });
        Self { task, samples, started }
    }

    /// Returns the timeline of the writes, which have just ended.
    pub(crate) fn finish(self, killed: Instant, acked: u64) -> AckTimeline {
        let seconds = self.started.elapsed().as_secs_f64();
        let mut samples = self.samples.borrow().clone();
        samples.push(AckSample { seconds, acked });
        let killed_at_seconds = killed.duration_since(self.started).as_secs_f64();
        AckTimeline { seconds, killed_at_seconds, records_per_sec: rates(&samples, seconds) }
    }
}

impl Drop for AckSampler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn drop_every_second(samples: &mut Vec<AckSample>) {
    let mut is_kept = false;
    samples.retain(|_| {
        is_kept = !is_kept;
        is_kept
    });
}

/// Returns the rates in [`COLUMNS`] equal parts of the time, interpolated between samples.
fn rates(samples: &[AckSample], seconds: f64) -> Vec<f64> {
    let part = seconds / COLUMNS as f64;
    let acked_at = |time: f64| {
        let after = samples.partition_point(|sample| sample.seconds < time);
        let origin = AckSample { seconds: 0.0, acked: 0 };
        let before = after.checked_sub(1).map_or(origin, |index| samples[index]);
        let Some(after) = samples.get(after) else { return before.acked as f64 };
        let span = after.seconds - before.seconds;
        let share = if span > 0.0 { (time - before.seconds) / span } else { 1.0 };
        before.acked as f64 + (after.acked - before.acked) as f64 * share
    };
    let ends: Vec<_> = (0..=COLUMNS).map(|column| acked_at(column as f64 * part)).collect();
    ends.windows(2).map(|ends| if part > 0.0 { (ends[1] - ends[0]) / part } else { 0.0 }).collect()
}

impl AckTimeline {
    /// Returns the picture, each line indented.
    pub(crate) fn text(&self, indent: &str) -> String {
        let highest = self.records_per_sec.iter().copied().fold(0.0, f64::max);
        if highest <= 0.0 {
            return String::new();
        }
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{indent}{} records/s", count(highest.round() as u64));
        for row in (0..ROWS).rev() {
            let cell = |rate: &f64| {
                let height = (rate / highest * (ROWS * 8) as f64).round() as usize;
                EIGHTHS[height.saturating_sub(row * 8).min(8)]
            };
            let cells: String = self.records_per_sec.iter().map(cell).collect();
            let _ = writeln!(text, "{indent}{}", cells.trim_end());
        }
        let killed = self.killed_at_seconds / self.seconds * COLUMNS as f64;
        let killed = (killed as usize).min(COLUMNS - 1);
        let axis: String = (0..COLUMNS).map(|at| if at == killed { '┴' } else { '─' }).collect();
        let time = |seconds| measured(Duration::from_secs_f64(seconds));
        let label = format!("kill -9 at {}", time(self.killed_at_seconds));
        let end = time(self.seconds);
        // The label begins below its mark, unless the end of the axis would not fit behind it.
        let label_max = COLUMNS.saturating_sub(label.len() + 1 + end.len());
        let at = killed.min(label_max);
        let gap = COLUMNS.saturating_sub(at + label.len() + end.len()).max(1);
        let _ = writeln!(text, "{indent}{axis}\n{indent}{:at$}{label}{:gap$}{end}", "", "");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seconds: f64, acked: u64) -> AckSample {
        AckSample { seconds, acked }
    }

    #[test]
    fn rates_of_all_parts_add_up() {
        let samples = [sample(0.5, 50), sample(1.0, 100), sample(2.0, 100), sample(3.0, 400)];
        let rates = rates(&samples, 3.0);
        assert_eq!(rates.len(), COLUMNS);
        let total: f64 = rates.iter().map(|rate| rate * 3.0 / COLUMNS as f64).sum();
        assert!((total - 400.0).abs() < 1e-6, "{total}");
        assert!((rates[5] - 100.0).abs() < 1e-6 && rates[30].abs() < 1e-6, "{rates:?}");
        assert!((rates[50] - 300.0).abs() < 1e-6, "{rates:?}");
    }

    #[test]
    fn picture_shows_the_pause_after_the_kill() {
        let mut records_per_sec = vec![1_000.0; COLUMNS];
        records_per_sec[30..40].fill(0.0);
        let timeline = AckTimeline { seconds: 6.0, killed_at_seconds: 3.0, records_per_sec };
        let text = timeline.text("  ");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "  1,000 records/s");
        let bar = |from: usize, to: usize| "█".repeat(to - from);
        let expected = format!("  {}{}{}", bar(0, 30), " ".repeat(10), bar(40, 60));
        assert_eq!(lines[1..=ROWS], [expected.as_str(); ROWS]);
        assert_eq!(lines[ROWS + 1].chars().position(|c| c == '┴'), Some(32));
        assert_eq!(lines[ROWS + 2].find("kill -9"), Some(32));
        assert!(lines.iter().all(|line| line.chars().count() <= COLUMNS + 2), "{text}");
    }

    #[test]
    fn late_kill_and_no_acks_leave_a_picture_in_its_width() {
        let records_per_sec = vec![7.0; COLUMNS];
        let timeline = AckTimeline { seconds: 6.0, killed_at_seconds: 6.0, records_per_sec };
        assert!(timeline.text("").lines().all(|line| line.chars().count() <= COLUMNS));
        let timeline = AckTimeline { records_per_sec: vec![0.0; COLUMNS], ..timeline };
        assert_eq!(timeline.text(""), "");
    }

    #[test]
    fn samples_stay_bounded() {
        let mut samples: Vec<_> = (0..9).map(|n| sample(n as f64, n)).collect();
        drop_every_second(&mut samples);
        assert_eq!(samples.iter().map(|it| it.acked).collect::<Vec<_>>(), [0, 2, 4, 6, 8]);
    }
}
