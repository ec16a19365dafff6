//! Runs one phase of a load: all lanes start together, and the phase ends with the last one.
//!
//! A lane is one sequential worker. Lanes are returned afterwards, so the measured phase continues
//! where the warm-up ended.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::budget::SendBudget;
use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::progress::{self, LiveLine};
use crate::series::RateInterval;

/// A lane stops after this many failures in a row.
pub(crate) const FAILURES_IN_A_ROW_MAX: u32 = 10;

/// Phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunPhase {
    Warmup,
    Measured,
}

/// Sequential worker of a load; awaits one thing at a time.
pub(crate) trait LoadLane: Send + Sized + 'static {
    /// Works until the budget is used up.
    fn run(
        self,
        budget: Arc<SendBudget>,
        part: RunPhase,
    ) -> impl Future<Output = (Self, LoadMeter)> + Send;
}

/// Result of one phase.
#[derive(Debug)]
pub(crate) struct PhaseResult {
    pub(crate) meter: LoadMeter,
    pub(crate) started: Instant,
    pub(crate) elapsed: Duration,
    /// See [`SendBudget::sends_missed`].
    pub(crate) sends_missed: u64,
    pub(crate) lanes: usize,
    pub(crate) intervals: Vec<RateInterval>,
}

/// Runs one phase with all lanes.
///
/// # Errors
/// A lane panicked.
pub(crate) async fn run<L: LoadLane>(
    lanes: Vec<L>,
    load: &BenchLoad,
    part: RunPhase,
) -> Result<(Vec<L>, PhaseResult)> {
    let phase = match part {
        RunPhase::Warmup => load.warmup,
        RunPhase::Measured => load.run,
    };
    let (budget, pacer) = match load.rate {
        None => (SendBudget::closed_loop(phase), None),
        Some(rate) => {
            let (budget, pacer) = SendBudget::open_loop(phase, rate, load.batch_size);
            (budget, Some(pacer))
        }
    };
    let what = match part {
        RunPhase::Warmup => "warming up",
        RunPhase::Measured => "measuring",
    };
    let shown = budget.clone();
    let line = LiveLine::show(move |elapsed| {
        progress::records_text(what, shown.records_dealt(), elapsed, phase)
    });
    let mut running = JoinSet::new();
    let count = lanes.len();
    for (index, lane) in lanes.into_iter().enumerate() {
        let budget = budget.clone();
        running.spawn(async move { (index, lane.run(budget, part).await) });
    }
    let mut back: Vec<Option<L>> = (0..count).map(|_| None).collect();
    let mut meter = LoadMeter::new();
    while let Some(ended) = running.join_next().await {
        let (index, (lane, measured)) = ended.context("a client has failed")?;
        meter.merge(&measured);
        back[index] = Some(lane);
    }
    let elapsed = budget.start().elapsed();
    drop(pacer);
    drop(line);
    let (started, sends_missed) = (budget.start(), budget.sends_missed());
    let intervals = budget.series().whole(elapsed);
    let outcome = PhaseResult { meter, started, elapsed, sends_missed, lanes: count, intervals };
    Ok((back.into_iter().flatten().collect(), outcome))
}
