//! What one node counts while it works, and the page on which all its figures are shown.
//! Each node has its own; nothing is global. What is known anyway is not counted a second time but
//! looked up when somebody asks.

mod calls;
mod catalog;
mod page;
#[cfg(test)]
mod reference;
mod values;

use std::time::Duration;

pub use calls::{Calls, OpenCall};
pub use catalog::{ALL, Kind, Metric, Name};
pub use page::{CONTENT_TYPE, Page};
pub use values::{BOUNDS_US, Counter, Histogram};

/// Counters on the way of a record: each is an addition or two per request, never per record.
#[derive(Debug, Default)]
pub struct Metrics {
    pub calls: Calls,
    appended_batches: Counter,
    duplicate_batches: Counter,
    appended_records: Counter,
    appended_bytes: Counter,
    append_times: Histogram,
    commit_times: Histogram,
    read_records: Counter,
    read_bytes: Counter,
    fetch_times: Histogram,
    scrubbed_bytes: Counter,
    scrub_rounds: Counter,
}

impl Metrics {
    /// A batch was acknowledged, so long after it had come in.
    pub fn on_ack(&self, records: u32, bytes: usize, is_duplicate: bool, took: Duration) {
        self.append_times.observe(took);
        if is_duplicate {
            return self.duplicate_batches.add(1);
        }
        self.appended_batches.add(1);
        self.appended_records.add(records.into());
        self.appended_bytes.add(bytes as u64);
    }

    /// A batch was committed and applied on the leader, so long after it was proposed.
    pub fn on_commit(&self, took: Duration) {
        self.commit_times.observe(took);
    }

    /// Records go out to a reader.
    pub fn on_read(&self, records: u64, bytes: u64) {
        self.read_records.add(records);
        self.read_bytes.add(bytes);
    }

    /// A fetch has read what was there, without waiting for more.
    pub fn on_fetch(&self, took: Duration) {
        self.fetch_times.observe(took);
    }

    /// Bytes of a log were read anew.
    pub fn on_scrub(&self, bytes: u64) {
        self.scrubbed_bytes.add(bytes);
    }

    /// All that is sealed has been read anew.
    pub fn on_scrub_round(&self) {
        self.scrub_rounds.add(1);
    }

    pub fn write(&self, page: &mut Page) {
        page.put(Name::AppendedBatches, &[], self.appended_batches.get());
        page.put(Name::DuplicateBatches, &[], self.duplicate_batches.get());
        page.put(Name::AppendedRecords, &[], self.appended_records.get());
        page.put(Name::AppendedBytes, &[], self.appended_bytes.get());
        page.put_times(Name::AppendTimes, &[], &self.append_times);
        page.put_times(Name::CommitTimes, &[], &self.commit_times);
        page.put(Name::ReadRecords, &[], self.read_records.get());
        page.put(Name::ReadBytes, &[], self.read_bytes.get());
        page.put_times(Name::FetchTimes, &[], &self.fetch_times);
        page.put(Name::ScrubbedBytes, &[], self.scrubbed_bytes.get());
        page.put(Name::ScrubRounds, &[], self.scrub_rounds.get());
        self.calls.write(page);
    }
}
