//! Who goes first, and on simulated logs of several kinds: how long small batches take, and what
//! the large ones lose.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::*;

const SMALL: usize = 1024;
const LARGE: usize = 100 << 10;
const MAX: usize = 16 << 20;

fn now(taken: Taken) -> Share {
    match taken {
        Taken::Now(share) => share,
        Taken::Later(_) => panic!("there was room"),
    }
}

fn later(taken: Taken) -> oneshot::Receiver<Share> {
    match taken {
        Taken::Now(_) => panic!("there was no room"),
        Taken::Later(wait) => wait,
    }
}

async fn share(flow: &Arc<Flow>, bytes: usize) -> Share {
    match flow.take(bytes) {
        Taken::Now(share) => share,
        Taken::Later(wait) => wait.await.unwrap(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_small_batch_passes_by_the_large_ones_that_wait() {
    let flow = Flow::new(MAX, limits::PACE);
    let large: Vec<_> = (0..153).map(|_| now(flow.take(LARGE))).collect();
    let mut next = later(flow.take(LARGE));
    let small = now(flow.take(SMALL));
    assert_eq!(flow.bytes(), (153 * LARGE + SMALL, MAX));
    drop(small);
    assert!(next.try_recv().is_err(), "and what it gives back is kept for small ones");
    drop(large);
    next.await.unwrap();
    assert_eq!(flow.bytes(), (0, MAX));
}

#[tokio::test(start_paused = true)]
async fn small_batches_leave_the_large_ones_half() {
    let flow = Flow::new(MAX, limits::PACE);
    let count = MAX / 2 / limits::SMALL_BATCH_BYTES;
    let small: Vec<_> = (0..count).map(|_| now(flow.take(limits::SMALL_BATCH_BYTES))).collect();
    let mut wait = later(flow.take(SMALL));
    let large = now(flow.take(MAX));
    assert_eq!(flow.bytes(), (MAX, MAX), "however large it is, half is what it counts");
    assert!(wait.try_recv().is_err());
    drop(small);
    wait.await.unwrap();
    drop(large);
}

#[tokio::test(start_paused = true)]
async fn large_batches_go_in_the_order_in_which_they_came_but_for_those_given_up() {
    let flow = Flow::new(MAX, limits::PACE);
    let first = now(flow.take(MAX / 2));
    let second = now(flow.take(MAX / 4));
    let mut waits: Vec<_> = (0..4).map(|_| later(flow.take(MAX / 4))).collect();
    drop(waits.remove(0));
    drop(first);
    let shares: Vec<_> = waits.iter_mut().map(|wait| wait.try_recv().ok()).collect();
    assert_eq!(shares.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false]);
    // Given, and given up before it was looked at.
    let third = waits.pop().unwrap();
    drop(second);
    drop(third);
    drop(shares);
    assert_eq!(flow.bytes(), (0, MAX));
}

/// What a log takes for a group, beside the time of its bytes; how fast those are; and what comes
/// on top until a majority has it, without keeping the next group from being written.
#[derive(Debug, Clone, Copy)]
struct Log {
    sync: Duration,
    bytes_per_sec: f64,
    round_trip: Duration,
}

impl Log {
    async fn run(self, mut batches: mpsc::UnboundedReceiver<(usize, Share, oneshot::Sender<()>)>) {
        let mut group = Vec::new();
        while batches.recv_many(&mut group, 64).await > 0 {
            let bytes: usize = group.iter().map(|(bytes, ..)| bytes).sum();
            sleep(self.sync + Duration::from_secs_f64(bytes as f64 / self.bytes_per_sec)).await;
            let written = std::mem::take(&mut group);
            tokio::spawn(async move {
                sleep(self.round_trip).await;
                for (_, share, done) in written {
                    share.has_synced();
                    drop(share);
                    let _ = done.send(());
                }
            });
        }
    }
}

struct Seen {
    bytes_per_sec: f64,
    /// The median and the slowest hundredth of the small ones, after a second.
    p50: Duration,
    p99: Duration,
}

/// Many clients with large batches, and one with small ones if `with_small`.
async fn load(log: Log, with_small: bool, pace: u32) -> Seen {
    const LASTS: Duration = Duration::from_secs(11);
    const WARM_UP: Duration = Duration::from_secs(1);
    let flow = Flow::new(MAX, pace);
    let (sender, batches) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    tasks.spawn(log.run(batches));
    let begun = Instant::now();
    let done = Arc::new(Mutex::new(0_usize));
    for _ in 0..400 {
        let (flow, sender, done) = (flow.clone(), sender.clone(), done.clone());
        tasks.spawn(async move {
            loop {
                let share = share(&flow, LARGE).await;
                let (answer, answered) = oneshot::channel();
                sender.send((LARGE, share, answer)).unwrap();
                answered.await.unwrap();
                if begun.elapsed() > WARM_UP {
                    *done.lock().unwrap() += LARGE;
                }
            }
        });
    }
    let mut times = Vec::new();
    while begun.elapsed() < LASTS {
        sleep(Duration::from_millis(3)).await;
        if !with_small {
            continue;
        }
        let before = Instant::now();
        let share = share(&flow, SMALL).await;
        let (answer, answered) = oneshot::channel();
        sender.send((SMALL, share, answer)).unwrap();
        answered.await.unwrap();
        if begun.elapsed() > WARM_UP {
            times.push(before.elapsed());
        }
    }
    let bytes_per_sec = *done.lock().unwrap() as f64 / (LASTS - WARM_UP).as_secs_f64();
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
    Seen { bytes_per_sec, p50: at(50), p99: at(99) }
}

/// Whatever the log is like: a small batch takes some times what it takes alone, the fewer the less
/// the large ones get, and those lose a part of the rate that they have without it.
#[tokio::test(start_paused = true)]
async fn beside_small_batches_the_large_ones_keep_the_log_busy_and_no_more() {
    // Tokio's clock has steps of a millisecond.
    let log = |sync, megabytes_per_sec, round_trip| Log {
        sync: Duration::from_millis(sync),
        bytes_per_sec: 1e6 * f64::from(megabytes_per_sec),
        round_trip: Duration::from_millis(round_trip),
    };
    let logs = [log(5, 200, 0), log(30, 50, 0), log(5, 200, 40), log(5, 200, 200)];
    for log in logs {
        let alone = log.sync + log.round_trip;
        let without = load(log, false, 2).await;
        let unpaced = load(log, true, 0).await;
        let mut before = unpaced.p50;
        for pace in [4, 2] {
            let paced = load(log, true, pace).await;
            let part = paced.bytes_per_sec / without.bytes_per_sec;
            println!(
                "{log:?}, {pace}: {part:.2} of the rate, small {:?} {:?}",
                paced.p50, paced.p99
            );
            assert!(paced.p99 <= alone * 3 * pace, "{log:?}, {pace}: {:?}", paced.p99);
            assert!(part > 0.15 * f64::from(pace), "{log:?}, {pace}: {part}");
            assert!(paced.p50 <= before, "{log:?}, {pace}: {:?}", paced.p50);
            before = paced.p50;
        }
        let is_near = log.round_trip.is_zero();
        assert!(!is_near || unpaced.p99 > before * 2, "else there was nothing to hold back");
    }
}

#[tokio::test(start_paused = true)]
async fn large_batches_are_held_back_for_some_seconds_after_a_small_one_only() {
    let flow = Flow::new(MAX, limits::PACE);
    let most = flow.large_bytes_max();
    assert_eq!(most, MAX - MAX / 16);
    drop(now(flow.take(SMALL)));
    assert_eq!(flow.large_bytes_max(), 0, "it is being measured, with one at a time");
    sleep(limits::PACE_PROBE_MAX).await;
    assert_eq!(flow.large_bytes_max(), most, "nothing came of it");
    sleep(limits::PACE_PROBE_INTERVAL).await;
    for _ in 0..=limits::PACE_PROBE_BATCHES {
        let share = now(flow.take(SMALL));
        sleep(Duration::from_millis(1)).await;
        share.has_synced();
    }
    assert_eq!(flow.large_bytes_max(), limits::PACED_BYTES_MIN, "there is no rate");
    sleep(limits::PACED_AFTER_SMALL).await;
    assert_eq!(flow.large_bytes_max(), most);
}

/// Else what was left of a measurement would take the time in a queue for that without one.
#[tokio::test(start_paused = true)]
async fn what_is_measured_while_nothing_is_held_back_does_not_count() {
    let flow = Flow::new(MAX, limits::PACE);
    // A measurement begins, and no more small ones come.
    drop(now(flow.take(SMALL)));
    sleep(limits::PACED_AFTER_SMALL).await;
    for _ in 0..=limits::PACE_PROBE_BATCHES {
        let queue: Vec<_> = (0..100).map(|_| now(flow.take(LARGE))).collect();
        sleep(Duration::from_millis(100)).await;
        queue.iter().for_each(Share::has_synced);
    }
    drop(now(flow.take(SMALL)));
    assert_eq!(flow.large_bytes_max(), 0, "it is being measured anew");
}

/// A window that is smaller than a batch lets it in all the same, alone.
#[tokio::test(start_paused = true)]
async fn a_batch_larger_than_the_window_gets_its_turn() {
    let flow = Flow::new(MAX, limits::PACE);
    drop(now(flow.take(SMALL)));
    let first = now(flow.take(4 << 20));
    let second = later(flow.take(4 << 20));
    drop(first);
    timeout(Duration::from_secs(1), second).await.unwrap().unwrap();
}
