//! What runs add up to. Each is a process of its own, which writes it out for the one that adds.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::marks::Mark;
use crate::run::Report;

/// Begins a line that is for the one that adds, not for people.
const LINE: &str = "tally ";

/// Figures by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    pub fn of(report: &Report) -> Self {
        let millis = u64::try_from(report.simulated.as_millis()).unwrap_or(u64::MAX);
        let mut figures = BTreeMap::from([
            ("runs".to_owned(), 1),
            ("simulated_ms".to_owned(), millis),
            ("acked".to_owned(), report.verdict.acked),
            ("read".to_owned(), report.verdict.reads),
            ("crashes".to_owned(), report.crashes),
        ]);
        let faults = report.faults.iter().map(|(kind, count)| (format!("fault {kind:?}"), *count));
        let marks = Mark::ALL.into_iter().map(|mark| (name(mark), report.marks.get(mark)));
        figures.extend(faults.chain(marks));
        Self(figures)
    }

    /// Reads what [`fmt::Display`] wrote, and what else was said.
    pub fn parse(said: &str) -> (Self, String) {
        let (mut figures, mut text) = (BTreeMap::new(), Vec::new());
        for line in said.lines() {
            let figure = line.strip_prefix(LINE).and_then(|it| it.rsplit_once(' '));
            match figure.and_then(|(name, count)| Some((name, count.parse().ok()?))) {
                Some((name, count)) => drop(figures.insert(name.to_owned(), count)),
                None => text.push(line),
            }
        }
        (Self(figures), text.join(" "))
    }

    pub fn take(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            *self.0.entry(name.clone()).or_default() += count;
        }
    }

    fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// What was never met.
    pub fn missing(&self) -> Vec<Mark> {
        Mark::ALL.into_iter().filter(|mark| self.get(&name(*mark)) == 0).collect()
    }

    /// For people.
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
             acked, {} read, {} crashes\nfaults: {}\nmet: {}",
            self.get("runs"),
            simulated / 3600.0,
            wall.as_secs_f64(),
            simulated / wall.as_secs_f64().max(0.001),
            self.get("acked"),
            self.get("read"),
            self.get("crashes"),
            group("fault "),
            group("mark ")
        )
    }
}

fn name(mark: Mark) -> String {
    format!("mark {mark:?}")
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(name, count)| writeln!(formatter, "{LINE}{name} {count}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_adds_up() {
        let one = Tally(BTreeMap::from([("mark Purge".to_owned(), 2), ("runs".to_owned(), 1)]));
        let (mut read, text) = Tally::parse(&format!("{one}and so on\ntally nothing\n"));
        assert_eq!((&read, text.as_str()), (&one, "and so on tally nothing"));
        read.take(&one);
        assert_eq!((read.get("runs"), read.get("mark Purge")), (2, 4));
        assert!(!read.missing().contains(&Mark::Purge) && read.missing().contains(&Mark::Trimmed));
    }
}
