//! Measured values, each beside the reference that was measured with it.

use schemars::JsonSchema;
use serde::Serialize;

/// One measurement, with the values of all runs.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct GroupBenchRow {
    name: String,
    unit: &'static str,
    /// Median of `values`.
    value: f64,
    values: Vec<f64>,
    /// Measurement to compare with, in the same unit; empty if there is none.
    reference_name: String,
    /// Median of `references`.
    reference: Option<f64>,
    references: Vec<f64>,
    /// Median of the ratios of the single runs, with the lowest and the highest one.
    ratio: Option<f64>,
    ratio_min: Option<f64>,
    ratio_max: Option<f64>,
}

impl GroupBenchRow {
    /// Returns the measurement of these runs, without a reference.
    pub(super) fn new(name: impl Into<String>, unit: &'static str, values: Vec<f64>) -> Self {
        Self {
            name: name.into(),
            unit,
            value: median(&values),
            values,
            reference_name: String::new(),
            reference: None,
            references: Vec::new(),
            ratio: None,
            ratio_min: None,
            ratio_max: None,
        }
    }

    /// Adds the reference; a run of it belongs to each run of the measurement.
    pub(super) fn against(mut self, name: impl Into<String>, references: Vec<f64>) -> Self {
        let runs = self.values.iter().zip(&references);
        let ratios: Vec<f64> = runs.map(|(value, reference)| value / reference).collect();
        self.reference_name = name.into();
        self.reference = Some(median(&references));
        self.references = references;
        self.ratio = Some(median(&ratios));
        self.ratio_min = ratios.iter().copied().reduce(f64::min);
        self.ratio_max = ratios.iter().copied().reduce(f64::max);
        self
    }
}

/// Returns the middle of the values: the upper one of two.
pub(super) fn median(values: &[f64]) -> f64 {
    percentile(values, 50)
}

/// Returns the value that this percentage of the values does not exceed.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (sorted.len() * percent).div_euclid(100).min(sorted.len().saturating_sub(1));
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[7.0])), (2.0, 7.0));
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        // With 100 values, only one may exceed it.
        assert_eq!((percentile(&hundred, 99), percentile(&hundred[..20], 99)), (100.0, 20.0));
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn ratio_is_that_of_runs_made_together() {
        let row = GroupBenchRow::new("a", "1/s", vec![10.0, 40.0, 30.0]);
        let row = row.against("b", vec![20.0, 40.0, 20.0]);
        assert_eq!((row.value, row.reference), (30.0, Some(20.0)));
        assert_eq!((row.ratio, row.ratio_min, row.ratio_max), (Some(1.0), Some(0.5), Some(1.5)));
    }
}
