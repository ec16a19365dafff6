//! Batches that a read skips because their content is not records: each is named as it is skipped,
//! and the end states their number.

use helix_client::UndecodableBatch;

use crate::output::message;

/// Counts of skipped batches. Reported when it is dropped.
#[derive(Debug, Default)]
pub(crate) struct SkippedBatches {
    batches: u64,
    records: u64,
}

impl SkippedBatches {
    /// Names batches and counts them.
    pub(crate) fn add<'a>(&mut self, undecodable: impl IntoIterator<Item = &'a UndecodableBatch>) {
        for skipped in undecodable {
            message!("skipped: {}", skipped.message);
            self.batches += 1;
            self.records += u64::from(skipped.record_count);
        }
    }

    fn text(&self) -> Option<String> {
        let count = |number: u64, what: &str, more: &str| match number {
            1 => format!("1 {what}"),
            _ => format!("{number} {what}{more}"),
        };
        let Self { batches, records } = *self;
        (batches > 0).then(|| {
            let (batches, records) = (count(batches, "batch", "es"), count(records, "record", "s"));
            format!("skipped {batches} with {records} in total")
        })
    }
}

impl Drop for SkippedBatches {
    fn drop(&mut self) {
        if let Some(text) = self.text() {
            message!("{text}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_is_stated_if_something_was_skipped() {
        let text = |batches, records| SkippedBatches { batches, records }.text();
        assert_eq!(text(0, 0), None);
        assert_eq!(text(1, 2).unwrap(), "skipped 1 batch with 2 records in total");
        assert_eq!(text(3, 1).unwrap(), "skipped 3 batches with 1 record in total");
    }
}
