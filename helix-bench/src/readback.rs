//! Reads back what a run has written and passes it to the checker, partition by partition.
//!
//! Waits for acked records that are not visible yet, because weak acks precede the commit.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use helix_client::{Batches, FetchOptions, Position, ReadStart};
use helix_proto::batch;
use helix_proto::log::v1::{ErrorReason, ResolvedOffset};
use tokio::time::Instant;

use crate::target::BenchTarget;
use crate::verify::{ReadbackChecker, ReadbackFindings, SentBatches};

/// Longest time without a new record while acked records are missing.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two passes over the partitions.
const POLL: Duration = Duration::from_millis(200);

/// Compares everything after `initial_ends` with the sent batches.
///
/// # Errors
/// The partitions could not be read.
pub(crate) async fn read_back(
    target: &BenchTarget,
    initial_ends: &[ResolvedOffset],
    run: u64,
    sent_batches: Vec<SentBatches>,
) -> Result<ReadbackFindings> {
    let mut checker = ReadbackChecker::new(run, sent_batches);
    let mut cursors: Vec<(u32, u64)> =
        initial_ends.iter().map(|end| (end.partition, end.offset)).collect();
    let mut last_progress_at = Instant::now();
    loop {
        let mut has_read = false;
        for (partition, next) in &mut cursors {
            has_read |= read_to_end(target, *partition, next, &mut checker).await?;
        }
        if has_read {
            last_progress_at = Instant::now();
        }
        if checker.outstanding() == 0 || last_progress_at.elapsed() > PROGRESS_TIMEOUT {
            return Ok(checker.finish());
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Reads one partition to its end. True if there were new records.
async fn read_to_end(
    target: &BenchTarget,
    partition: u32,
    next: &mut u64,
    checker: &mut ReadbackChecker,
) -> Result<bool> {
    let consumer = target.observer.consumer();
    let topic = &target.topic.name;
    let mut has_read = false;
    loop {
        let start = [ReadStart::new(topic, partition, Position::Offset(*next))];
        let fetched = match consumer.fetch_encoded(&start, &FetchOptions::default()).await {
            Ok(fetched) => fetched,
            Err(error) if error.is(ErrorReason::OffsetOutOfRange) => {
                bail!("retention has removed {topic}/{partition} from offset {next} on")
            }
            Err(error) if error.is(ErrorReason::CorruptLog) => {
                checker.count_corrupt_batch();
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

fn check(batches: &Batches, next: &mut u64, checker: &mut ReadbackChecker) {
    for stored in &batches.batches {
        let Some(Ok(list)) = stored.batch.as_ref().map(batch::decode) else {
            checker.count_corrupt_batch();
            continue;
        };
        // Only the first batch of a fetch may begin before the requested offset.
        if stored.first_offset > *next {
            checker.count_gap();
        }
        for (offset, record) in (stored.first_offset..).zip(&list.records) {
            if offset >= *next {
                checker.check_record(
                    batches.partition,
                    offset,
                    record.value.as_deref().unwrap_or(&[]),
                );
                *next = offset + 1;
            }
        }
    }
    if *next < batches.next_offset {
        checker.count_gap();
    }
}
