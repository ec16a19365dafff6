//! Reads back what a run has written and shows it to the checker, partition by partition.
//! Waits for acked records that are not there yet, because weaker acks come before the commit.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use helix_client::{Batches, FetchOptions, Position, Start};
use helix_proto::batch;
use helix_proto::log::v1::{ErrorReason, ResolvedOffset};
use tokio::time::Instant;

use crate::target::Target;
use crate::verify::{Checker, Findings, Ledger};

/// Longest silence while acked records are missing.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest wait of one fetch at the end of a partition.
const POLL: Duration = Duration::from_millis(200);

/// Compares everything above `marks` with the ledgers.
///
/// # Errors
/// Why it could not be read.
pub(crate) async fn read_back(
    target: &Target,
    marks: &[ResolvedOffset],
    run: u64,
    ledgers: Vec<Ledger>,
) -> Result<Findings> {
    let mut checker = Checker::new(run, ledgers);
    let mut cursors: Vec<(u32, u64)> =
        marks.iter().map(|mark| (mark.partition, mark.offset)).collect();
    let mut well_at = Instant::now();
    loop {
        let mut has_read = false;
        for (partition, next) in &mut cursors {
            has_read |= read_to_end(target, *partition, next, &mut checker).await?;
        }
        if has_read {
            well_at = Instant::now();
        }
        if checker.outstanding() == 0 || well_at.elapsed() > PATIENCE {
            return Ok(checker.finish());
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Reads one partition until nothing more is there. True if there was anything.
async fn read_to_end(
    target: &Target,
    partition: u32,
    next: &mut u64,
    checker: &mut Checker,
) -> Result<bool> {
    let consumer = target.observer.consumer();
    let topic = &target.topic.name;
    let mut has_read = false;
    loop {
        let start = [Start::new(topic, partition, Position::Offset(*next))];
        let fetched = match consumer.fetch_encoded(&start, &FetchOptions::default()).await {
            Ok(fetched) => fetched,
            Err(error) if error.is(ErrorReason::OffsetOutOfRange) => {
                bail!("retention has removed {topic}/{partition} from offset {next} on")
            }
            Err(error) if error.is(ErrorReason::CorruptLog) => {
                checker.see_corrupt_batch();
                return Ok(has_read);
            }
            Err(error) => return Err(error).context("read back"),
        };
        let before = *next;
        for batches in fetched {
            check(&batches, next, checker);
            *next = batches.next_offset;
        }
        if *next == before {
            return Ok(has_read);
        }
        has_read = true;
    }
}

fn check(batches: &Batches, next: &mut u64, checker: &mut Checker) {
    for stored in &batches.batches {
        let Some(Ok(list)) = stored.batch.as_ref().map(batch::decode) else {
            checker.see_corrupt_batch();
            continue;
        };
        // Only the first batch of a fetch may begin before what was asked for.
        if stored.first_offset > *next {
            checker.see_gap();
        }
        for (offset, record) in (stored.first_offset..).zip(&list.records) {
            if offset >= *next {
                checker.see(batches.partition, offset, record.value.as_deref().unwrap_or(&[]));
                *next = offset + 1;
            }
        }
    }
    if *next < batches.next_offset {
        checker.see_gap();
    }
}
