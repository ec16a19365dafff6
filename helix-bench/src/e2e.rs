//! End-to-end latency: from the intended send of each record to its delivery at subscribers.

use tokio::time::Instant;

use crate::delivery::{self, PublishedTopic};
use crate::load::BenchLoad;
use crate::phase::RunPhase;
use crate::report::BenchReport;
use crate::target::BenchTarget;

/// Runs an end-to-end load.
///
/// # Errors
/// The run could not start.
pub(crate) async fn run(load: &BenchLoad) -> anyhow::Result<BenchReport> {
    let target = BenchTarget::connect(load).await?;
    let topics = [PublishedTopic { load: load.clone(), target }];
    let mut report = measure(&topics, load).await?.report;
    report.notes.push(format!(
        "latency is from the intended send to the delivery at each of {} subscribers; throughput \
         is what was published and acked",
        load.subscribers
    ));
    Ok(report)
}

/// Result of a measured phase with deliveries.
#[derive(Debug)]
pub(crate) struct MeasuredDelivery {
    /// Latency is that of the deliveries; that of the acks is a part named `ack`.
    pub(crate) report: BenchReport,
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    /// From the start of the phase to the last delivery, in seconds.
    pub(crate) seconds: f64,
}

/// Runs the warm-up and the measured phase on all topics. `load` is that of all publishers.
///
/// # Errors
/// See [`delivery::publish`].
pub(crate) async fn measure(
    topics: &[PublishedTopic],
    load: &BenchLoad,
) -> anyhow::Result<MeasuredDelivery> {
    let target = &topics.first().expect("at least one topic").target;
    let epoch = Instant::now();
    let (early, warmup) = delivery::publish(topics, load, epoch, RunPhase::Warmup).await?;
    let before = target.observe().await;
    let (delivered, mut outcome) =
        delivery::publish(topics, load, epoch, RunPhase::Measured).await?;
    let after = target.observe().await;
    outcome
        .meter
        .parts
        .insert("ack", std::mem::replace(&mut outcome.meter.latency, delivered.meter.latency));
    // A record that was lost in the warm-up is lost all the same.
    outcome.meter.failures.merge(&early.meter.failures);
    outcome.meter.failures.merge(&delivered.meter.failures);
    Ok(MeasuredDelivery {
        report: BenchReport::new(load, target, &before, &after, &warmup, &outcome),
        lost: early.lost + delivered.lost,
        doubled: early.doubled + delivered.doubled,
        seconds: delivered.elapsed.max(outcome.elapsed).as_secs_f64(),
    })
}
