//! The Prometheus text format, from samples that are added in any order.

use std::fmt::{self, Display, Write};

use super::catalog::{METRICS, Metric, MetricName};
use super::values::{BOUNDS_US, Histogram};

/// Content type of a [`MetricsPage`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Samples of all metrics, shown as Prometheus text.
#[derive(Debug)]
pub struct MetricsPage {
    /// In the order of the catalog.
    samples: Vec<String>,
}

impl Default for MetricsPage {
    fn default() -> Self {
        Self { samples: vec![String::new(); METRICS.len()] }
    }
}

impl MetricsPage {
    /// Adds a sample; `labels` are the label values in the order of the catalog.
    pub fn put(&mut self, metric: MetricName, labels: &[&str], value: u64) {
        self.sample(metric, "", labels, None, &value);
    }

    /// Like [`Self::put`].
    pub fn put_f64(&mut self, metric: MetricName, labels: &[&str], value: f64) {
        self.sample(metric, "", labels, None, &value);
    }

    /// Adds a histogram.
    pub fn put_times(&mut self, metric: MetricName, labels: &[&str], times: &Histogram) {
        let (buckets, sum_us) = times.get();
        self.put_buckets(metric, labels, BOUNDS_US, &buckets, sum_us);
    }

    /// Adds a histogram with one bucket for each bound in µs, and one above them.
    pub fn put_buckets(
        &mut self,
        metric: MetricName,
        labels: &[&str],
        bounds_us: impl IntoIterator<Item = u64>,
        buckets: &[u64],
        sum_us: u64,
    ) {
        let mut count = 0;
        let bounds = bounds_us.into_iter().map(|bound| seconds(bound).to_string());
        for (bound, bucket) in bounds.chain(["+Inf".to_owned()]).zip(buckets) {
            count += bucket;
            self.sample(metric, "_bucket", labels, Some(&bound), &count);
        }
        self.sample(metric, "_sum", labels, None, &seconds(sum_us));
        self.sample(metric, "_count", labels, None, &count);
    }

    fn sample(
        &mut self,
        metric: MetricName,
        suffix: &str,
        labels: &[&str],
        bound: Option<&str>,
        value: &dyn Display,
    ) {
        let Metric { name, labels: names, .. } = &METRICS[metric as usize];
        debug_assert_eq!(names.len(), labels.len(), "{name} has other labels");
        let pairs = names.iter().zip(labels).map(|(name, value)| format!("{name}={value:?}"));
        let bound = bound.map(|bound| format!("le={bound:?}"));
        let pairs: Vec<String> = pairs.chain(bound).collect();
        let labels = match pairs.as_slice() {
            [] => String::new(),
            pairs => format!("{{{}}}", pairs.join(",")),
        };
        // Ignored: writing to a string cannot fail.
        let _ = writeln!(self.samples[metric as usize], "{name}{suffix}{labels} {value}");
    }
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

impl Display for MetricsPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (Metric { name, kind, help, .. }, samples) in METRICS.iter().zip(&self.samples) {
            if !samples.is_empty() {
                writeln!(f, "# HELP {name} {help}")?;
                writeln!(f, "# TYPE {name} {}", kind.as_str())?;
                f.write_str(samples)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::MetricKind;
    use super::*;

    #[test]
    fn groups_samples_by_metric() {
        let mut page = MetricsPage::default();
        page.put(MetricName::ShardTerm, &["0"], 3);
        page.put_f64(MetricName::Uptime, &[], 1.5);
        page.put(MetricName::ShardTerm, &["1"], 4);
        let wanted = "# HELP helix_uptime_seconds Time since the process started\n\
                      # TYPE helix_uptime_seconds gauge\n\
                      helix_uptime_seconds 1.5\n\
                      # HELP helix_shard_term Raft term of the shard\n\
                      # TYPE helix_shard_term gauge\n\
                      helix_shard_term{shard=\"0\"} 3\n\
                      helix_shard_term{shard=\"1\"} 4\n";
        assert_eq!(page.to_string(), wanted);
    }

    #[test]
    fn histogram_buckets_are_cumulative() {
        let histogram = Histogram::default();
        histogram.observe(Duration::from_micros(60));
        histogram.observe(Duration::from_secs(60));
        let mut page = MetricsPage::default();
        page.put_times(MetricName::AppendTimes, &[], &histogram);
        let page = page.to_string();
        for line in [
            "helix_append_seconds_bucket{le=\"0.00005\"} 0",
            "helix_append_seconds_bucket{le=\"0.0001\"} 1",
            "helix_append_seconds_bucket{le=\"20\"} 1",
            "helix_append_seconds_bucket{le=\"+Inf\"} 2",
            "helix_append_seconds_sum 60.00006",
            "helix_append_seconds_count 2",
        ] {
            assert!(page.lines().any(|there| there == line), "{line}: {page}");
        }
    }

    #[test]
    fn catalog_order_matches_metric_names() {
        assert_eq!(METRICS[MetricName::BuildInfo as usize].name, "helix_build_info");
        assert_eq!(
            METRICS[MetricName::PeerReceivedBytes as usize].name,
            "helix_peer_received_bytes_total"
        );
        assert_eq!(METRICS[MetricName::CommitTimes as usize].kind, MetricKind::Histogram);
    }
}
