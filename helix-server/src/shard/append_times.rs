//! Append times that are ahead of the clock: a node with a wrong clock stamped them.

use std::time::Duration;

use super::Shard;
use crate::limits::APPEND_TIME_AHEAD_MAX;

/// Partitions whose newest append time is far in the future.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AheadPartitions {
    pub count: usize,
    /// The partition that is ahead the most: its topic and its number.
    pub topic_id: u64,
    pub number: u32,
    /// Time from now to its newest append time.
    pub ahead: Duration,
}

impl Shard {
    /// Returns the partitions whose newest append time is more than [`APPEND_TIME_AHEAD_MAX`] in
    /// the future; `None` if there are none.
    pub fn ahead_of(&self, now_us: u64) -> Option<AheadPartitions> {
        self.machine.read_state(|state| {
            let times = state.partitions().map(|it| (it.last_time_us, it.topic_id, it.number));
            find_ahead(times, now_us)
        })
    }
}

/// Finds what is ahead among the newest append times of partitions: time, topic and number.
fn find_ahead(
    times: impl Iterator<Item = (u64, u64, u32)>,
    now_us: u64,
) -> Option<AheadPartitions> {
    let ahead_us = |time_us: u64| Duration::from_micros(time_us.saturating_sub(now_us));
    let mut found: Option<AheadPartitions> = None;
    for (time_us, topic_id, number) in times {
        let ahead = ahead_us(time_us);
        if ahead <= APPEND_TIME_AHEAD_MAX {
            continue;
        }
        let count = found.map_or(0, |found| found.count) + 1;
        let most = found.filter(|found| found.ahead >= ahead);
        let most = most.unwrap_or(AheadPartitions { count, topic_id, number, ahead });
        found = Some(AheadPartitions { count, ..most });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_partition_that_is_ahead_the_most() {
        let day = 86_400_000_000;
        let now = 1_000 * day;
        let limit = APPEND_TIME_AHEAD_MAX.as_micros() as u64;
        let times = [(now, 1, 0), (now + limit, 1, 1), (now - day, 2, 0), (0, 2, 1)];
        assert_eq!(find_ahead(times.into_iter(), now), None);
        let times = times.into_iter().chain([
            (now + day, 3, 0),
            (now + 10 * day, 3, 5),
            (now + 2 * day, 4, 1),
        ]);
        let ahead = Duration::from_secs(10 * 86_400);
        let found = AheadPartitions { count: 3, topic_id: 3, number: 5, ahead };
        assert_eq!(find_ahead(times, now), Some(found));
    }
}
