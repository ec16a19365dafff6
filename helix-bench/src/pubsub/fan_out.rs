//! Ceiling of a row: the same load against a service that checks batches and passes them on to the
//! subscribers, without storage.

use std::time::Duration;

use anyhow::{Result, ensure};
use schemars::JsonSchema;
use serde::Serialize;

use super::{PubsubRow, RowLoads};
use crate::ceiling::CeilingProcess;
use crate::load::BenchLoad;
use crate::meter::Percentiles;
use crate::target::{self, BenchTarget};

/// Longest measured phase of a ceiling; a service without storage does not change over time.
const DURATION_MAX: Duration = Duration::from_secs(10);
const WARMUP_MAX: Duration = Duration::from_secs(1);

/// Throughput and latency of a service without storage, in the same run.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PubsubCeiling {
    messages_per_sec: f64,
    payload_bytes_per_sec: f64,
    deliveries_per_sec: f64,
    latency_us: Option<Percentiles>,
}

/// Measures the ceiling of a row.
///
/// # Errors
/// The run could not start, or messages were not delivered.
pub(super) async fn measure(
    ceiling: &CeilingProcess,
    (whole, loads): &RowLoads,
    payload: usize,
) -> Result<PubsubCeiling> {
    let against_ceiling = |load: &BenchLoad| {
        let mut load = ceiling.load(load);
        load.run.duration = load.run.duration.map(|duration| duration.min(DURATION_MAX));
        load.warmup.duration = load.warmup.duration.map(|duration| duration.min(WARMUP_MAX));
        load
    };
    let whole = against_ceiling(whole);
    let loads: Vec<BenchLoad> = loads.iter().map(against_ceiling).collect();
    let admin = BenchTarget::admin(&whole).await?;
    let names: Vec<&str> = loads.iter().map(|load| load.topic.as_str()).collect();
    target::create_topics(&admin, &names, 0, None).await?;
    let PubsubRow { messages_per_sec, payload_bytes_per_sec, deliveries_per_sec, run, .. } =
        super::measure_row(&whole, &loads, payload).await?;
    // Lost and doubled messages are errors of the run, too.
    ensure!(
        run.errors == 0,
        "{} errors, the first: {}",
        run.errors,
        run.first_error.as_deref().unwrap_or_default()
    );
    let latency_us = run.latency_us;
    Ok(PubsubCeiling { messages_per_sec, payload_bytes_per_sec, deliveries_per_sec, latency_us })
}
