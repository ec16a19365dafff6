//! One part of a run: all lanes begin at once, and it ends when the last one has.
//! Lanes come back afterwards, so that the measured part goes on where the warm-up ended.

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, interval};

use crate::budget::Budget;
use crate::load::{Load, Phase};
use crate::meter::Meter;

/// A lane that has failed this often in a row stops.
pub(crate) const FAILURES_IN_A_ROW_MAX: u32 = 10;

/// How often progress is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Which part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Warmup,
    Measured,
}

/// One strand of a load, with at most one thing to wait for at a time.
pub(crate) trait Lane: Send + Sized + 'static {
    /// Works until the budget is used up.
    fn run(self, budget: Arc<Budget>, part: Part) -> impl Future<Output = (Self, Meter)> + Send;
}

/// What came of a part.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) meter: Meter,
    pub(crate) elapsed: Duration,
    /// As [`Budget::sends_missed`].
    pub(crate) sends_missed: u64,
    pub(crate) lanes: usize,
}

/// Runs a part with all lanes.
///
/// # Errors
/// A lane has panicked.
pub(crate) async fn run<L: Lane>(
    lanes: Vec<L>,
    load: &Load,
    part: Part,
) -> Result<(Vec<L>, Outcome)> {
    let phase = match part {
        Part::Warmup => load.warmup,
        Part::Measured => load.run,
    };
    let (budget, pacer) = match load.rate {
        None => (Budget::closed_loop(phase), None),
        Some(rate) => {
            let (budget, pacer) = Budget::open_loop(phase, rate, load.batch_size);
            (budget, Some(pacer))
        }
    };
    let progress = show_progress(&budget, phase, part);
    let mut running = JoinSet::new();
    let count = lanes.len();
    for (place, lane) in lanes.into_iter().enumerate() {
        let budget = budget.clone();
        running.spawn(async move { (place, lane.run(budget, part).await) });
    }
    let mut back: Vec<Option<L>> = (0..count).map(|_| None).collect();
    let mut meter = Meter::new();
    while let Some(ended) = running.join_next().await {
        let (place, (lane, measured)) = ended.context("a client has failed")?;
        meter.merge(&measured);
        back[place] = Some(lane);
    }
    let elapsed = budget.start().elapsed();
    drop(pacer);
    if let Some(progress) = progress {
        progress.abort();
        clear_line();
    }
    let outcome = Outcome { meter, elapsed, sends_missed: budget.sends_missed(), lanes: count };
    Ok((back.into_iter().flatten().collect(), outcome))
}

/// Rewrites one line on the terminal, if there is one.
fn show_progress(budget: &Arc<Budget>, phase: Phase, part: Part) -> Option<JoinHandle<()>> {
    if !std::io::stderr().is_terminal() {
        return None;
    }
    let budget = budget.clone();
    let what = match part {
        Part::Warmup => "warming up",
        Part::Measured => "measuring",
    };
    let of = match phase {
        Phase { records: Some(records), .. } => format!(" of {records} records"),
        Phase { duration: Some(duration), .. } => format!(" records, {duration:?}"),
        Phase { .. } => " records".to_owned(),
    };
    Some(tokio::spawn(async move {
        let mut ticks = interval(PROGRESS_INTERVAL);
        let start = Instant::now();
        loop {
            ticks.tick().await;
            let records = budget.records_given();
            let seconds = start.elapsed().as_secs_f64();
            let mut stderr = std::io::stderr();
            // Ignored: without a terminal there is nobody to tell.
            let _ = write!(stderr, "\r\x1b[K{what}: {records}{of}, {seconds:.1} s");
            let _ = stderr.flush();
        }
    }))
}

fn clear_line() {
    // Ignored: without a terminal there is nothing to clear.
    let _ = write!(std::io::stderr(), "\r\x1b[K");
}
