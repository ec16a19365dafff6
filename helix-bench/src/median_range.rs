//! Median of several runs.

use schemars::JsonSchema;
use serde::Serialize;

/// Median with its range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MedianRange {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl MedianRange {
    /// Returns `None` without values.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            1 => values[middle],
            _ => f64::midpoint(values[middle - 1], values[middle]),
        };
        Some(Self { median, min, max })
    }

    /// Formats it as a ratio, with its range.
    pub(crate) fn ratio(self) -> String {
        format!("{:.3} ({:.3}-{:.3})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_ignore_outliers() {
        let spread = MedianRange::of([3.0, 1.0, 1000.0]).unwrap();
        assert_eq!(spread, MedianRange { median: 3.0, min: 1.0, max: 1000.0 });
        assert_eq!(MedianRange::of([4.0, 2.0]).unwrap().median, 3.0);
        assert_eq!(MedianRange::of([]), None);
    }
}
