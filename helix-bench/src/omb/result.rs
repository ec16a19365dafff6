//! Result of a workload, with the names and units of the OpenMessaging Benchmark.
//!
//! Latencies are in milliseconds, except those of the publish delay, which are in microseconds.
//! There are no other names, because some readers of the format reject them.

use std::time::Duration;

use serde_json::{Map, Number, Value, json};

use super::workload::OmbWorkload;
use crate::interval_meter::{IntervalMeter, LongHistogram};

/// Percentiles of the format, with the ends of their names.
pub(crate) const PERCENTILES: [(&str, f64); 6] = [
    ("50pct", 50.0),
    ("75pct", 75.0),
    ("95pct", 95.0),
    ("99pct", 99.0),
    ("999pct", 99.9),
    ("9999pct", 99.99),
];

/// Latencies of the format: the begin of their names, and their unit.
const SERIES: [(&str, LatencyUnit); 3] = [
    ("publishLatency", LatencyUnit::Milliseconds),
    ("publishDelayLatency", LatencyUnit::Microseconds),
    ("endToEndLatency", LatencyUnit::Milliseconds),
];

/// Unit of a latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LatencyUnit {
    Milliseconds,
    /// Percentiles and maximum are whole numbers.
    Microseconds,
}

impl LatencyUnit {
    fn value(self, us: f64) -> Value {
        match self {
            Self::Milliseconds => json!(us / 1e3),
            Self::Microseconds => Value::Number(Number::from(us.round() as u64)),
        }
    }

    /// Returns a mean, which has decimals in both units.
    fn mean(self, us: f64) -> Value {
        match self {
            Self::Milliseconds => json!(us / 1e3),
            Self::Microseconds => json!(us),
        }
    }
}

/// Measurements of one interval, without its histograms.
#[derive(Debug, Clone)]
pub(super) struct OmbInterval {
    /// Per second.
    pub(super) publish_rate: f64,
    pub(super) error_rate: f64,
    pub(super) consume_rate: f64,
    /// Messages that were acked and not delivered yet, over all subscriptions.
    pub(super) backlog: u64,
    latencies: [LatencySummary; 3],
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy)]
struct LatencySummary {
    mean: f64,
    percentiles: [f64; PERCENTILES.len()],
    max: f64,
}

impl LatencySummary {
    fn new(latencies: &LongHistogram) -> Self {
        Self {
            mean: latencies.mean_us(),
            percentiles: PERCENTILES.map(|(_, percent)| latencies.percentile_us(percent)),
            max: latencies.max_us(),
        }
    }

    /// Returns the ends of the names with their values.
    fn values(&self, unit: LatencyUnit) -> Vec<(&'static str, Value)> {
        let mut values = vec![("Avg", unit.mean(self.mean))];
        for ((name, _), us) in PERCENTILES.into_iter().zip(self.percentiles) {
            values.push((name, unit.value(us)));
        }
        values.push(("Max", unit.value(self.max)));
        values
    }
}

fn histograms(meter: &IntervalMeter) -> [&LongHistogram; 3] {
    [&meter.publish, &meter.delay, &meter.end_to_end]
}

impl OmbInterval {
    pub(super) fn new(meter: &IntervalMeter, elapsed: Duration, backlog: u64) -> Self {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        Self {
            publish_rate: meter.acked as f64 / seconds,
            error_rate: meter.failed as f64 / seconds,
            consume_rate: meter.received as f64 / seconds,
            backlog,
            latencies: histograms(meter).map(LatencySummary::new),
        }
    }
}

/// Returns the result of a test as the format has it.
///
/// `total` has the latencies of the whole test.
pub(super) fn json(
    workload: &OmbWorkload,
    driver: &str,
    intervals: &[OmbInterval],
    total: &IntervalMeter,
) -> Value {
    let mut fields = Map::new();
    for (name, value) in [
        ("workload", json!(workload.name)),
        ("driver", json!(driver)),
        ("messageSize", json!(workload.message_size)),
        ("topics", json!(workload.topics)),
        ("partitions", json!(workload.partitions_per_topic)),
        ("producersPerTopic", json!(workload.producers_per_topic)),
        ("consumersPerTopic", json!(workload.consumers_per_subscription)),
    ] {
        fields.insert(name.to_owned(), value);
    }
    let list = |of: fn(&OmbInterval) -> Value| Value::Array(intervals.iter().map(of).collect());
    for (name, values) in [
        ("publishRate", list(|interval| json!(interval.publish_rate))),
        ("publishErrorRate", list(|interval| json!(interval.error_rate))),
        ("consumeRate", list(|interval| json!(interval.consume_rate))),
        ("backlog", list(|interval| json!(interval.backlog))),
    ] {
        fields.insert(name.to_owned(), values);
    }
    for (number, ((name, unit), histogram)) in SERIES.into_iter().zip(histograms(total)).enumerate()
    {
        let mut lists: Map<String, Value> = Map::new();
        for interval in intervals {
            for (end, value) in interval.latencies[number].values(unit) {
                let list = lists.entry(format!("{name}{end}")).or_insert_with(|| json!([]));
                if let Value::Array(list) = list {
                    list.push(value);
                }
            }
        }
        fields.append(&mut lists);
        let aggregated = format!("aggregated{}{}", name[..1].to_uppercase(), &name[1..]);
        for (end, value) in LatencySummary::new(histogram).values(unit) {
            fields.insert(format!("{aggregated}{end}"), value);
        }
        let points = histogram.distribution().into_iter();
        // As `{:?}`, which shows a decimal point, as the format's own writer does.
        let points = points.map(|(percent, us)| (format!("{percent:?}"), unit.value(us)));
        fields.insert(format!("{aggregated}Quantiles"), Value::Object(points.collect()));
    }
    Value::Object(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::KeyDistribution;
    use crate::omb::workload::OmbPayload;

    /// Names of the format, as its writer has them.
    const NAMES: &str = "
        workload driver messageSize topics partitions producersPerTopic consumersPerTopic
        publishRate publishErrorRate consumeRate backlog publishLatencyAvg publishLatency50pct
        publishLatency75pct publishLatency95pct publishLatency99pct publishLatency999pct
        publishLatency9999pct publishLatencyMax publishDelayLatencyAvg publishDelayLatency50pct
        publishDelayLatency75pct publishDelayLatency95pct publishDelayLatency99pct
        publishDelayLatency999pct publishDelayLatency9999pct publishDelayLatencyMax
        endToEndLatencyAvg endToEndLatency50pct endToEndLatency75pct endToEndLatency95pct
        endToEndLatency99pct endToEndLatency999pct endToEndLatency9999pct endToEndLatencyMax
        aggregatedPublishLatencyAvg aggregatedPublishLatency50pct aggregatedPublishLatency75pct
        aggregatedPublishLatency95pct aggregatedPublishLatency99pct
        aggregatedPublishLatency999pct aggregatedPublishLatency9999pct
        aggregatedPublishLatencyMax aggregatedPublishLatencyQuantiles
        aggregatedPublishDelayLatencyAvg aggregatedPublishDelayLatency50pct
        aggregatedPublishDelayLatency75pct aggregatedPublishDelayLatency95pct
        aggregatedPublishDelayLatency99pct aggregatedPublishDelayLatency999pct
        aggregatedPublishDelayLatency9999pct aggregatedPublishDelayLatencyMax
        aggregatedPublishDelayLatencyQuantiles aggregatedEndToEndLatencyAvg
        aggregatedEndToEndLatency50pct aggregatedEndToEndLatency75pct
        aggregatedEndToEndLatency95pct aggregatedEndToEndLatency99pct
        aggregatedEndToEndLatency999pct aggregatedEndToEndLatency9999pct
        aggregatedEndToEndLatencyMax aggregatedEndToEndLatencyQuantiles";

    fn workload() -> OmbWorkload {
        OmbWorkload {
            name: "a workload".to_owned(),
            topics: 1,
            partitions_per_topic: 2,
            message_size: 100,
            payload: OmbPayload::Random { ratio: 0.5, pool_size: 1 },
            keys: KeyDistribution::NoKey,
            producers_per_topic: 3,
            subscriptions_per_topic: 4,
            consumers_per_subscription: 5,
            rate: None,
            backlog_bytes: 0,
            backlog_drain_ratio: 1.0,
            duration: Duration::from_secs(20),
            warmup: Duration::ZERO,
        }
    }

    fn result() -> Value {
        let mut meter = IntervalMeter::new();
        (meter.acked, meter.received) = (1000, 2000);
        for ms in 1..=1000 {
            let time = Duration::from_millis(ms);
            meter.publish.record(time);
            meter.delay.record(time / 10);
            meter.end_to_end.record(2 * time);
        }
        let interval = OmbInterval::new(&meter, Duration::from_secs(10), 7);
        json(&workload(), "Helix", &[interval.clone(), interval], &meter)
    }

    #[test]
    fn names_are_those_of_the_format() {
        let result = result();
        let mut names: Vec<&str> = result.as_object().unwrap().keys().map(String::as_str).collect();
        let mut expected: Vec<&str> = NAMES.split_whitespace().collect();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }

    #[test]
    fn values_have_the_units_of_the_format() {
        let result = result();
        let near = |value: &Value, expected: f64| {
            let value = value.as_f64().unwrap();
            assert!((value / expected - 1.0).abs() < 0.01, "{value}, expected {expected}");
        };
        assert_eq!(
            (&result["publishRate"][1], &result["consumeRate"][0]),
            (&json!(100.0), &json!(200.0))
        );
        assert_eq!((&result["backlog"], &result["partitions"]), (&json!([7, 7]), &json!(2)));
        assert_eq!(
            (&result["consumersPerTopic"], &result["messageSize"]),
            (&json!(5), &json!(100))
        );
        near(&result["publishLatency99pct"][0], 990.0);
        near(&result["endToEndLatency95pct"][1], 1900.0);
        near(&result["publishDelayLatency50pct"][0], 50_000.0);
        near(&result["publishDelayLatencyAvg"][0], 50_050.0);
        assert!(result["publishDelayLatency50pct"][0].is_u64() && result["backlog"][0].is_u64());
        near(&result["aggregatedPublishLatencyMax"], 1000.0);
        near(&result["aggregatedEndToEndLatencyAvg"], 1001.0);
        near(&result["aggregatedPublishDelayLatencyQuantiles"]["100.0"], 100_000.0);
        // The format's chart script reads these keys as numbers.
        let quantiles = result["aggregatedPublishLatencyQuantiles"].as_object().unwrap();
        assert!(quantiles.len() > 100);
        for (percent, value) in quantiles {
            assert!((0.0..=100.0).contains(&percent.parse::<f64>().unwrap()), "{percent}");
            assert!(value.is_f64());
        }
    }

    #[test]
    fn interval_without_messages_has_numbers() {
        let empty = IntervalMeter::new();
        let interval = OmbInterval::new(&empty, Duration::ZERO, 0);
        let result = json(&workload(), "Helix", &[interval], &empty);
        let nulls = result.as_object().unwrap().iter().filter(|(_, value)| {
            value.is_null() || value.as_array().is_some_and(|list| list[0].is_null())
        });
        assert_eq!(nulls.count(), 0);
        assert_eq!(result["endToEndLatency99pct"], json!([0.0]));
    }
}
