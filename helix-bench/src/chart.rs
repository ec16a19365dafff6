//! Line charts as SVG, in one form: a few series over one axis, each with its points marked.

use std::fmt::Write as _;

use crate::format::{bytes_text, escaped, grouped};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 440.0;
/// Edges of the plotted area.
const LEFT: f64 = 74.0;
const RIGHT: f64 = 610.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 384.0;
/// Least distance of two labels of the horizontal axis.
const X_LABEL_DISTANCE: f64 = 46.0;
/// Most labels of a logarithmic axis before only powers of ten are labelled.
const LOG_LABELS_MAX: usize = 10;
/// Labels that a linear axis has at least.
const LINEAR_LABELS: f64 = 5.0;

/// Colours that people with colour blindness can tell apart (Okabe and Ito, 2008).
const COLOURS: [&str; 7] =
    ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
/// Dashes by run, so that a measure has the same colour in each run.
const DASHES: [&str; 4] = ["", "7 4", "2 3", "9 3 2 3"];

/// Chart of one or more series.
#[derive(Debug)]
pub(crate) struct LineChart {
    pub(crate) title: String,
    pub(crate) x: ChartAxis,
    pub(crate) y: ChartAxis,
    pub(crate) series: Vec<ChartSeries>,
}

/// Axis of a chart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChartAxis {
    pub(crate) label: &'static str,
    pub(crate) unit: ChartUnit,
    pub(crate) is_log: bool,
}

/// Unit of an axis, by which its labels are formatted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChartUnit {
    /// Numbers with the suffixes K, M and G.
    Count,
    /// Bytes with binary units.
    Bytes,
    /// Percentile p as 1 / (1 - p), which makes the tail visible.
    Nines,
}

/// Series of a chart.
#[derive(Debug)]
pub(crate) struct ChartSeries {
    pub(crate) name: String,
    /// Number of the measure, which selects the colour.
    pub(crate) measure: usize,
    /// Number of the run, which selects the dashes.
    pub(crate) run: usize,
    /// Points in the order of the horizontal axis.
    pub(crate) points: Vec<(f64, f64)>,
}

/// Range of an axis with its labels, mapped to pixels.
#[derive(Debug)]
struct AxisScale {
    is_log: bool,
    min: f64,
    max: f64,
    from: f64,
    to: f64,
    labels: Vec<f64>,
}

impl LineChart {
    /// Returns the chart as an SVG document.
    pub(crate) fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|series| series.points.iter().copied());
        let x_values: Vec<f64> = points().map(|(x, _)| x).collect();
        let y_values: Vec<f64> = points().map(|(_, y)| y).collect();
        let x = AxisScale::of_points(&x_values, self.x.is_log, LEFT + 16.0, RIGHT - 16.0);
        let y = AxisScale::rounded(&y_values, self.y.is_log, BOTTOM, TOP);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\" \
             fill=\"#333\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        );
        text(&mut out, LEFT, 26.0, "start", " font-size=\"16\" font-weight=\"bold\"", &self.title);
        text(&mut out, LEFT, TOP - 14.0, "start", "", self.y.label);
        let middle = f64::midpoint(LEFT, RIGHT);
        text(&mut out, middle, BOTTOM + 40.0, "middle", "", self.x.label);
        for value in &y.labels {
            let at = y.place(*value);
            line(&mut out, (LEFT, at), (RIGHT, at), "#ddd");
            text(&mut out, LEFT - 8.0, at + 4.0, "end", "", &self.y.unit.text(*value));
        }
        for value in &x.labels {
            let at = x.place(*value);
            line(&mut out, (at, BOTTOM), (at, BOTTOM + 5.0), "#888");
            text(&mut out, at, BOTTOM + 20.0, "middle", "", &self.x.unit.text(*value));
        }
        line(&mut out, (LEFT, BOTTOM), (RIGHT, BOTTOM), "#888");
        for (number, series) in self.series.iter().enumerate() {
            series.draw(&mut out, &x, &y, TOP + 12.0 + 20.0 * number as f64);
        }
        out.push_str("</svg>\n");
        out
    }
}

impl ChartSeries {
    fn draw(&self, out: &mut String, x: &AxisScale, y: &AxisScale, legend_at: f64) {
        let colour = COLOURS[self.measure % COLOURS.len()];
        let dashes = DASHES[self.run % DASHES.len()];
        let style = format!("stroke=\"{colour}\" stroke-dasharray=\"{dashes}\"");
        let shown = self.points.iter().filter(|(at, value)| x.has(*at) && y.has(*value));
        let places: Vec<(f64, f64)> =
            shown.map(|(at, value)| (x.place(*at), y.place(*value))).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        // Ignored throughout: writing to a string does not fail.
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke-width=\"2\" {style}/>",
            path.join(" ")
        );
        for (x, y) in places {
            let _ =
                writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
        let (from, to) = (RIGHT + 18.0, RIGHT + 46.0);
        let _ = writeln!(
            out,
            "<line x1=\"{from}\" y1=\"{legend_at}\" x2=\"{to}\" y2=\"{legend_at}\" \
             stroke-width=\"2\" {style}/>"
        );
        text(out, to + 8.0, legend_at + 4.0, "start", "", &self.name);
    }
}

impl ChartUnit {
    fn text(self, value: f64) -> String {
        match self {
            Self::Bytes => bytes_text(value as usize),
            Self::Nines => format!("{}", round_to(100.0 * (1.0 - 1.0 / value), 3)),
            Self::Count => {
                let (scaled, suffix) = match value {
                    _ if value >= 1e9 => (value / 1e9, " G"),
                    _ if value >= 1e6 => (value / 1e6, " M"),
                    _ if value >= 1e4 => (value / 1e3, " K"),
                    _ => (value, ""),
                };
                match scaled {
                    _ if scaled > 0.0 && scaled < 1.0 => format!("{}", round_to(scaled, 4)),
                    _ if suffix.is_empty() => grouped(scaled),
                    _ => format!("{}{suffix}", round_to(scaled, 2)),
                }
            }
        }
    }
}

impl AxisScale {
    /// Spans the points and labels them, as many as have space.
    fn of_points(values: &[f64], is_log: bool, from: f64, to: f64) -> Self {
        let mut values: Vec<f64> =
            values.iter().copied().filter(|v| is_shown(*v, is_log)).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (min, max) = match (values.first(), values.last()) {
            (Some(min), Some(max)) => (*min, *max),
            _ => (1.0, 1.0),
        };
        let mut scale = Self { is_log, min, max, from, to, labels: Vec::new() };
        for value in values {
            let is_apart = scale.labels.last().is_none_or(|last| {
                (scale.place(value) - scale.place(*last)).abs() >= X_LABEL_DISTANCE
            });
            if is_apart {
                scale.labels.push(value);
            }
        }
        scale
    }

    /// Spans the values up to the next round numbers.
    fn rounded(values: &[f64], is_log: bool, from: f64, to: f64) -> Self {
        let shown = || values.iter().copied().filter(|value| is_shown(*value, is_log));
        let max = shown().reduce(f64::max).unwrap_or(1.0);
        if !is_log {
            let step = round_step(max / LINEAR_LABELS);
            let steps = (max / step).ceil().max(1.0) as u32;
            let labels: Vec<f64> = (0..=steps).map(|number| f64::from(number) * step).collect();
            return Self { is_log, min: 0.0, max: f64::from(steps) * step, from, to, labels };
        }
        let min = shown().reduce(f64::min).unwrap_or(1.0);
        let (low, high) = (min.log10().floor() as i32, max.log10().ceil() as i32);
        let steps =
            (low..=high).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)));
        let steps: Vec<f64> = steps.collect();
        let first = steps.iter().rposition(|step| *step <= min * 1.000_001).unwrap_or(0);
        let last = steps.iter().position(|step| *step >= max * 0.999_999).unwrap_or(first);
        let last = last.max(first + 1).min(steps.len() - 1);
        let (min, max) = (steps[first], steps[last]);
        let mut labels = steps[first..=last].to_vec();
        if labels.len() > LOG_LABELS_MAX {
            labels.retain(|label| label.log10().round() == (label.log10() * 1e9).round() / 1e9);
        }
        Self { is_log, min, max, from, to, labels }
    }

    fn has(&self, value: f64) -> bool {
        is_shown(value, self.is_log)
    }

    fn place(&self, value: f64) -> f64 {
        let position = |value: f64| if self.is_log { value.ln() } else { value };
        let (min, max) = (position(self.min), position(self.max));
        if max <= min {
            return f64::midpoint(self.from, self.to);
        }
        self.from + (position(value) - min) / (max - min) * (self.to - self.from)
    }
}

fn is_shown(value: f64, is_log: bool) -> bool {
    value.is_finite() && (!is_log || value > 0.0)
}

/// Returns the next of 1, 2 and 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    if least <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= least * 0.999_999);
    digit.unwrap_or(10.0) * power
}

fn round_to(value: f64, decimals: i32) -> f64 {
    let factor = 10_f64.powi(decimals);
    (value * factor).round() / factor
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    // Ignored: writing to a string does not fail.
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, style: &str, content: &str) {
    let content = escaped(content);
    // Ignored: writing to a string does not fail.
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{style}>{content}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>, is_log: bool) -> LineChart {
        LineChart {
            title: "a < b".to_owned(),
            x: ChartAxis { label: "payload", unit: ChartUnit::Bytes, is_log: true },
            y: ChartAxis { label: "messages/s", unit: ChartUnit::Count, is_log },
            series: vec![ChartSeries { name: "p50".to_owned(), measure: 0, run: 1, points }],
        }
    }

    #[test]
    fn points_are_within_the_area() {
        for is_log in [true, false] {
            let svg = chart(vec![(256.0, 70_000.0), (1024.0, 650_123.0)], is_log).svg();
            assert!(svg.contains("a &lt; b") && svg.contains("256 B") && svg.contains("1 KiB"));
            assert_eq!(svg.matches("<circle").count(), 2);
            for circle in svg.lines().filter(|line| line.starts_with("<circle")) {
                let number = |name: &str| -> f64 {
                    let start = circle.find(name).unwrap() + name.len();
                    circle[start..].split('"').next().unwrap().parse().unwrap()
                };
                let (x, y) = (number("cx=\""), number("cy=\""));
                assert!((LEFT..=RIGHT).contains(&x) && (TOP..=BOTTOM).contains(&y), "{circle}");
            }
        }
    }

    #[test]
    fn charts_without_or_with_one_point_are_drawn() {
        for points in [vec![], vec![(256.0, 0.0)], vec![(256.0, 5.0)], vec![(1.0, f64::NAN)]] {
            for is_log in [true, false] {
                let svg = chart(points.clone(), is_log).svg();
                assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"));
            }
        }
    }

    #[test]
    fn axes_end_at_round_numbers() {
        let linear = AxisScale::rounded(&[70_000.0, 650_123.0], false, 0.0, 1.0);
        assert_eq!((linear.min, linear.max, linear.labels.len()), (0.0, 800_000.0, 5));
        let log = AxisScale::rounded(&[0.31, 7.9], true, 0.0, 1.0);
        assert_eq!((log.min, log.max), (0.2, 10.0));
        assert_eq!(log.labels, [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]);
        let wide = AxisScale::rounded(&[0.001, 5000.0], true, 0.0, 1.0);
        assert_eq!(wide.labels, [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]);
    }

    #[test]
    fn labels_have_units() {
        let texts =
            [0.25, 5.0, 2000.0, 20_000.0, 1_500_000.0, 2e9].map(|v| ChartUnit::Count.text(v));
        assert_eq!(texts, ["0.25", "5", "2,000", "20 K", "1.5 M", "2 G"]);
    }
}
