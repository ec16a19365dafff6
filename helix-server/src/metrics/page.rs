//! The text form of Prometheus, put together from samples that come in any order.

use std::fmt::{self, Display, Write};

use super::catalog::{ALL, Metric, Name};
use super::values::{BOUNDS_US, Histogram};

/// Content type of the page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Samples of all metrics.
#[derive(Debug)]
pub struct Page {
    /// In the order of the catalog.
    samples: Vec<String>,
}

impl Default for Page {
    fn default() -> Self {
        Self { samples: vec![String::new(); ALL.len()] }
    }
}

impl Page {
    /// One sample; the labels' values in the order of the catalog.
    pub fn put(&mut self, metric: Name, labels: &[&str], value: u64) {
        self.sample(metric, "", labels, None, &value);
    }

    pub fn put_f64(&mut self, metric: Name, labels: &[&str], value: f64) {
        self.sample(metric, "", labels, None, &value);
    }

    pub fn put_times(&mut self, metric: Name, labels: &[&str], times: &Histogram) {
        let (classes, sum_us) = times.get();
        self.put_classes(metric, labels, BOUNDS_US, &classes, sum_us);
    }

    /// Times in classes: one for each bound, and one above them all.
    pub fn put_classes(
        &mut self,
        metric: Name,
        labels: &[&str],
        bounds_us: impl IntoIterator<Item = u64>,
        classes: &[u64],
        sum_us: u64,
    ) {
        let mut count = 0;
        let bounds = bounds_us.into_iter().map(|bound| seconds(bound).to_string());
        for (bound, class) in bounds.chain(["+Inf".to_owned()]).zip(classes) {
            count += class;
            self.sample(metric, "_bucket", labels, Some(&bound), &count);
        }
        self.sample(metric, "_sum", labels, None, &seconds(sum_us));
        self.sample(metric, "_count", labels, None, &count);
    }

    fn sample(
        &mut self,
        metric: Name,
        suffix: &str,
        labels: &[&str],
        bound: Option<&str>,
        value: &dyn Display,
    ) {
        let Metric { name, labels: names, .. } = &ALL[metric as usize];
        debug_assert_eq!(names.len(), labels.len(), "{name} has other labels");
        let pairs = names.iter().zip(labels).map(|(name, value)| format!("{name}={value:?}"));
        let bound = bound.map(|bound| format!("le={bound:?}"));
        let pairs: Vec<String> = pairs.chain(bound).collect();
        let labels = match pairs.as_slice() {
            [] => String::new(),
            pairs => format!("{{{}}}", pairs.join(",")),
        };
        // Ignored: a string takes everything.
        let _ = writeln!(self.samples[metric as usize], "{name}{suffix}{labels} {value}");
    }
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

impl Display for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (Metric { name, kind, help, .. }, samples) in ALL.iter().zip(&self.samples) {
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

    use super::super::Kind;
    use super::*;

    #[test]
    fn samples_of_a_metric_stand_together_under_its_type() {
        let mut page = Page::default();
        page.put(Name::ShardTerm, &["0"], 3);
        page.put_f64(Name::Uptime, &[], 1.5);
        page.put(Name::ShardTerm, &["1"], 4);
        let wanted = "# HELP helix_uptime_seconds Time since the start\n\
                      # TYPE helix_uptime_seconds gauge\n\
                      helix_uptime_seconds 1.5\n\
                      # HELP helix_shard_term Raft term\n\
                      # TYPE helix_shard_term gauge\n\
                      helix_shard_term{shard=\"0\"} 3\n\
                      helix_shard_term{shard=\"1\"} 4\n";
        assert_eq!(page.to_string(), wanted);
    }

    #[test]
    fn classes_of_times_add_up() {
        let histogram = Histogram::default();
        histogram.observe(Duration::from_micros(60));
        histogram.observe(Duration::from_secs(60));
        let mut page = Page::default();
        page.put_times(Name::AppendTimes, &[], &histogram);
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
    fn the_catalog_is_in_the_order_of_its_names() {
        assert_eq!(ALL[Name::BuildInfo as usize].name, "helix_build_info");
        assert_eq!(ALL[Name::PeerReceivedBytes as usize].name, "helix_peer_received_bytes_total");
        assert_eq!(ALL[Name::CommitTimes as usize].kind, Kind::Histogram);
    }
}
