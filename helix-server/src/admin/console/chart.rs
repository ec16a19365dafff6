//! Small charts as SVG: one line over the last 15 minutes. The numbers are in the text beside them,
//! so that nothing is only in the picture. Pure.

use std::fmt::Write;

use super::history::SAMPLES_MAX;

/// Size of the drawing area.
const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 48.0;

/// One chart of a page.
#[derive(Debug)]
pub(super) struct LoadChart {
    pub(super) title: &'static str,
    /// The latest value, and the largest one.
    pub(super) latest: String,
    pub(super) largest: String,
    /// Points of the line, and of the area below it.
    pub(super) line: String,
    pub(super) area: String,
}

impl LoadChart {
    /// Draws values, oldest first; the newest is at the right edge.
    pub(super) fn new(title: &'static str, values: &[f64], format: impl Fn(f64) -> String) -> Self {
        Self::of_samples(title, values, SAMPLES_MAX, format)
    }

    /// Like [`Self::new`], for values of which `samples_max` fill the width.
    pub(super) fn of_samples(
        title: &'static str,
        values: &[f64],
        samples_max: usize,
        format: impl Fn(f64) -> String,
    ) -> Self {
        let values = &values[values.len().saturating_sub(samples_max)..];
        let largest = values.iter().copied().filter(|it| it.is_finite()).fold(0.0, f64::max);
        let step = WIDTH / samples_max.saturating_sub(1).max(1) as f64;
        let first = WIDTH - step * values.len().saturating_sub(1) as f64;
        let mut line = String::new();
        for (index, value) in values.iter().enumerate() {
            let part = if largest > 0.0 && value.is_finite() { value / largest } else { 0.0 };
            let (x, y) = (first + step * index as f64, 1.0 + (HEIGHT - 2.0) * (1.0 - part));
            // Writing to a string cannot fail.
            let _ = write!(line, "{x:.1},{y:.1} ");
        }
        let area = match values.len() {
            0 => String::new(),
            _ => format!("{first:.1},{HEIGHT} {line}{WIDTH},{HEIGHT}"),
        };
        let latest = values.last().copied().unwrap_or_default();
        Self { title, latest: format(latest), largest: format(largest), line, area }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[f64]) -> LoadChart {
        LoadChart::new("load", values, |value| format!("{value:.0}"))
    }

    #[test]
    fn the_newest_value_is_at_the_right_edge() {
        let drawn = chart(&[1.0, 4.0, 2.0]);
        assert_eq!((&*drawn.latest, &*drawn.largest), ("2", "4"));
        let points: Vec<&str> = drawn.line.split_whitespace().collect();
        assert_eq!(points, ["237.3,35.5", "238.7,1.0", "240.0,24.0"]);
        assert!(drawn.area.starts_with("237.3,48") && drawn.area.ends_with("240,48"));
        let full = chart(&[1.0; SAMPLES_MAX]);
        assert!(full.line.starts_with("0.0,1.0"), "{}", full.line);
    }

    #[test]
    fn no_values_and_odd_ones_are_drawn() {
        assert!(chart(&[]).line.is_empty() && chart(&[]).area.is_empty());
        assert_eq!(chart(&[0.0, 0.0]).line, "238.7,47.0 240.0,47.0 ");
        assert!(!chart(&[f64::NAN, f64::INFINITY]).line.contains("NaN"));
    }
}
