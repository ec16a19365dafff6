//! Counts of runs. Each run is a subprocess that prints its counts for the series to add up.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::coverage::CoverageMark;
use crate::run::RunReport;

/// Prefix of a machine-readable line.
const LINE: &str = "tally ";

/// Counts by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// Returns a tally of these counts.
    pub fn new(counts: BTreeMap<String, u64>) -> Self {
        Self(counts)
    }

    pub fn of(report: &RunReport) -> Self {
        let millis = u64::try_from(report.simulated.as_millis()).unwrap_or(u64::MAX);
        let mut counts = BTreeMap::from([
            ("runs".to_owned(), 1),
            ("simulated_ms".to_owned(), millis),
            ("acked".to_owned(), report.verdict.acked),
            ("read".to_owned(), report.verdict.reads),
            ("crashes".to_owned(), report.crashes),
            ("groups".to_owned(), u64::from(report.plan.group.is_some())),
            ("group_delivered".to_owned(), report.group.delivered),
            ("group_repeated".to_owned(), report.group.repeated),
            ("group_commits".to_owned(), report.group.commits),
            ("group_moves".to_owned(), report.group.moves),
        ]);
        let faults = report.faults.iter().map(|(kind, count)| (format!("fault {kind:?}"), *count));
        let marks = CoverageMark::ALL.into_iter().map(|mark| (name(mark), report.marks.get(mark)));
        counts.extend(faults.chain(marks));
        Self(counts)
    }

    /// Parses the output of [`fmt::Display`]. Also returns all other text of the output.
    pub fn parse(output: &str) -> (Self, String) {
        let (mut counts, mut text) = (BTreeMap::new(), Vec::new());
        for line in output.lines() {
            let count_line = line.strip_prefix(LINE).and_then(|it| it.rsplit_once(' '));
            match count_line.and_then(|(name, count)| Some((name, count.parse().ok()?))) {
                Some((name, count)) => drop(counts.insert(name.to_owned(), count)),
                None => text.push(line),
            }
        }
        (Self(counts), text.join(" "))
    }

    pub fn merge(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            *self.0.entry(name.clone()).or_default() += count;
        }
    }

    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// Returns the marks that were never hit.
    pub fn missing(&self) -> Vec<CoverageMark> {
        CoverageMark::ALL.into_iter().filter(|mark| self.get(&name(*mark)) == 0).collect()
    }

    /// Formats the counts for people. `wall` is the wall time of the series.
    pub fn summary(&self, wall: Duration) -> String {
        let simulated = Duration::from_millis(self.get("simulated_ms")).as_secs_f64();
        let group = |prefix: &str| {
            let mine = self.0.iter().filter_map(|(name, count)| {
                Some(format!("{} {count}", name.strip_prefix(prefix)?))
            });
            mine.collect::<Vec<_>>().join(", ")
        };
        format!(
            "{} runs, {:.2} simulated hours in {:.0} s ({:.1} times as fast as time); {} batches \
             acked, {} read, {} crashes\n\
             groups: {} runs, {} records delivered, {} of them again, {} commits, {} partitions \
             moved\n\
             faults: {}\nmet: {}",
            self.get("runs"),
            simulated / 3600.0,
            wall.as_secs_f64(),
            simulated / wall.as_secs_f64().max(0.001),
            self.get("acked"),
            self.get("read"),
            self.get("crashes"),
            self.get("groups"),
            self.get("group_delivered"),
            self.get("group_repeated"),
            self.get("group_commits"),
            self.get("group_moves"),
            group("fault "),
            group("mark ")
        )
    }
}

fn name(mark: CoverageMark) -> String {
    format!("mark {mark:?}")
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(name, count)| writeln!(formatter, "{LINE}{name} {count}"))
    }
}
