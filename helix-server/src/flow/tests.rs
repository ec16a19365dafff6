//! The order of permits, and on several simulated logs the latency of small batches and the
//! throughput of large ones.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::*;

const SMALL: usize = 1024;
const LARGE: usize = 100 << 10;
const MAX: usize = 16 << 20;

const ALICE: FlowShare = FlowShare::new([1; 16]);
const BOB: FlowShare = FlowShare::new([2; 16]);

fn now(taken: Acquired) -> FlowPermit {
    match taken {
        Acquired::Now(permit) => permit,
        Acquired::Later(_) => panic!("expected a permit at once"),
    }
}

fn later(taken: Acquired) -> oneshot::Receiver<FlowPermit> {
    match taken {
        Acquired::Now(_) => panic!("expected to wait for a permit"),
        Acquired::Later(wait) => wait,
    }
}

async fn permit(flow: &Arc<FlowControl>, share: FlowShare, bytes: usize) -> FlowPermit {
    match flow.acquire(share, bytes) {
        Acquired::Now(permit) => permit,
        Acquired::Later(wait) => wait.await.unwrap(),
    }
}

#[tokio::test(start_paused = true)]
async fn small_batch_overtakes_waiting_large_ones() {
    let flow = FlowControl::new(MAX, limits::PACE);
    let large: Vec<_> = (0..153).map(|_| now(flow.acquire(ALICE, LARGE))).collect();
    let mut next = later(flow.acquire(ALICE, LARGE));
    let small = now(flow.acquire(ALICE, SMALL));
    assert_eq!(flow.bytes(), (153 * LARGE + SMALL, MAX));
    drop(small);
    assert!(next.try_recv().is_err(), "its bytes stay reserved for small batches");
    drop(large);
    next.await.unwrap();
    assert_eq!(flow.bytes(), (0, MAX));
}

#[tokio::test(start_paused = true)]
async fn small_batches_use_at_most_half_the_limit() {
    let flow = FlowControl::new(MAX, limits::PACE);
    let count = MAX / 2 / limits::SMALL_BATCH_BYTES;
    let small: Vec<_> =
        (0..count).map(|_| now(flow.acquire(ALICE, limits::SMALL_BATCH_BYTES))).collect();
    let mut wait = later(flow.acquire(ALICE, SMALL));
    let large = now(flow.acquire(ALICE, MAX));
    assert_eq!(flow.bytes(), (MAX, MAX), "a batch counts at most half the limit");
    assert!(wait.try_recv().is_err());
    drop(small);
    wait.await.unwrap();
    drop(large);
}

#[tokio::test(start_paused = true)]
async fn large_batches_get_permits_in_order_of_arrival() {
    let flow = FlowControl::new(MAX, limits::PACE);
    let first = now(flow.acquire(ALICE, MAX / 2));
    let second = now(flow.acquire(ALICE, MAX / 4));
    let mut waits: Vec<_> = (0..4).map(|_| later(flow.acquire(ALICE, MAX / 4))).collect();
    drop(waits.remove(0));
    drop(first);
    let shares: Vec<_> = waits.iter_mut().map(|wait| wait.try_recv().ok()).collect();
    assert_eq!(shares.iter().map(Option::is_some).collect::<Vec<_>>(), [true, true, false]);
    // Granted, and dropped before the waiter received it.
    let third = waits.pop().unwrap();
    drop(second);
    drop(third);
    drop(shares);
    assert_eq!(flow.bytes(), (0, MAX));
}

/// A log: the time to sync a group, the write rate, and the delay until a majority has the group.
/// That delay does not block the next group.
#[derive(Debug, Clone, Copy)]
struct SimulatedLog {
    sync: Duration,
    bytes_per_sec: f64,
    round_trip: Duration,
}

impl SimulatedLog {
    async fn run(
        self,
        mut batches: mpsc::UnboundedReceiver<(usize, FlowPermit, oneshot::Sender<()>)>,
    ) {
        let mut group = Vec::new();
        while batches.recv_many(&mut group, 64).await > 0 {
            let bytes: usize = group.iter().map(|(bytes, ..)| bytes).sum();
            sleep(self.sync + Duration::from_secs_f64(bytes as f64 / self.bytes_per_sec)).await;
            let written = std::mem::take(&mut group);
            tokio::spawn(async move {
                sleep(self.round_trip).await;
                for (_, permit, done) in written {
                    permit.mark_synced();
                    drop(permit);
                    let _ = done.send(());
                }
            });
        }
    }
}

struct LoadResult {
    bytes_per_sec: f64,
    /// Latencies of small batches after the warm-up.
    p50: Duration,
    p99: Duration,
}

/// Runs many clients of one principal with batches of `bulk` bytes, and one client with small
/// batches that belong to `probe`.
async fn load(log: SimulatedLog, bulk: usize, probe: Option<FlowShare>, pace: u32) -> LoadResult {
    const LASTS: Duration = Duration::from_secs(11);
    const WARM_UP: Duration = Duration::from_secs(1);
    let flow = FlowControl::new(MAX, pace);
    let (sender, batches) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    tasks.spawn(log.run(batches));
    let begun = Instant::now();
    let done = Arc::new(Mutex::new(0_usize));
    let clients = if bulk == SMALL { 1600 } else { 400 };
    for _ in 0..clients {
        let (flow, sender, done) = (flow.clone(), sender.clone(), done.clone());
        tasks.spawn(async move {
            loop {
                let permit = permit(&flow, ALICE, bulk).await;
                let (answer, answered) = oneshot::channel();
                sender.send((bulk, permit, answer)).unwrap();
                answered.await.unwrap();
                if begun.elapsed() > WARM_UP {
                    *done.lock().unwrap() += bulk;
                }
            }
        });
    }
    let mut times = Vec::new();
    while begun.elapsed() < LASTS {
        sleep(Duration::from_millis(3)).await;
        let Some(probe) = probe else { continue };
        let before = Instant::now();
        let permit = permit(&flow, probe, SMALL).await;
        let (answer, answered) = oneshot::channel();
        sender.send((SMALL, permit, answer)).unwrap();
        answered.await.unwrap();
        if begun.elapsed() > WARM_UP {
            times.push(before.elapsed());
        }
    }
    let bytes_per_sec = *done.lock().unwrap() as f64 / (LASTS - WARM_UP).as_secs_f64();
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
    LoadResult { bytes_per_sec, p50: at(50), p99: at(99) }
}

/// On every log, the latency of small batches is bounded by a multiple of their latency without
/// load. A lower pace lowers that latency, and large batches keep part of their throughput.
#[tokio::test(start_paused = true)]
async fn pacing_bounds_small_batch_latency_and_keeps_throughput() {
    // tokio's clock has a resolution of 1 ms.
    let log = |sync, megabytes_per_sec, round_trip| SimulatedLog {
        sync: Duration::from_millis(sync),
        bytes_per_sec: 1e6 * f64::from(megabytes_per_sec),
        round_trip: Duration::from_millis(round_trip),
    };
    let logs = [log(5, 200, 0), log(30, 50, 0), log(5, 200, 40), log(5, 200, 200)];
    for log in logs {
        let alone = log.sync + log.round_trip;
        let without = load(log, LARGE, None, 2).await;
        let unpaced = load(log, LARGE, Some(ALICE), 0).await;
        let mut before = unpaced.p50;
        for pace in [4, 2] {
            let paced = load(log, LARGE, Some(ALICE), pace).await;
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
        assert!(
            !is_near || unpaced.p99 > before * 2,
            "without pacing, large batches must delay small ones"
        );
    }
}

/// A principal with hundreds of small batches delays another one's by a few groups of the log, and
/// keeps its throughput.
#[tokio::test(start_paused = true)]
async fn small_batches_of_principals_share_the_log() {
    for (sync, round_trip) in [(2, 0), (10, 0), (2, 20)] {
        let log = SimulatedLog {
            sync: Duration::from_millis(sync),
            bytes_per_sec: 1e9,
            round_trip: Duration::from_millis(round_trip),
        };
        let alone = log.sync + log.round_trip;
        let without = load(log, SMALL, None, limits::PACE).await;
        let behind = load(log, SMALL, Some(ALICE), limits::PACE).await;
        let beside = load(log, SMALL, Some(BOB), limits::PACE).await;
        let part = beside.bytes_per_sec / without.bytes_per_sec;
        println!("{log:?}: {part:.2} of the rate, {:?}, one queue {:?}", beside.p99, behind.p99);
        assert!(beside.p99 <= alone * 8, "{log:?}: {:?}", beside.p99);
        assert!(part > 0.7, "{log:?}: {part}");
        assert!(behind.p99 > beside.p99 * 3 / 2, "{log:?}: one queue must be slower");
    }
}

/// Waiting batches of principals take turns, also if one of them has waited longer.
#[tokio::test(start_paused = true)]
async fn waiting_batches_take_turns() {
    let flow = FlowControl::new(MAX, limits::PACE);
    let all = [MAX / 2, MAX / 4].map(|bytes| now(flow.acquire(ALICE, bytes)));
    let (order, mut granted) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for share in [[ALICE; 20], [BOB; 20]].concat() {
        let (order, wait) = (order.clone(), later(flow.acquire(share, MAX / 4)));
        tasks.spawn(async move {
            let permit = wait.await.unwrap();
            order.send(share).unwrap();
            drop(permit);
        });
    }
    drop(all);
    while tasks.join_next().await.is_some() {}
    let mut first = Vec::new();
    granted.recv_many(&mut first, 10).await;
    let of_bob = first.iter().filter(|share| **share == BOB).count();
    assert!((4..=6).contains(&of_bob), "{first:?}");
}

/// A share that has few batches in flight does not wait for the turns of the others.
#[tokio::test(start_paused = true)]
async fn principal_with_few_batches_does_not_wait() {
    let flow = FlowControl::new(MAX, limits::PACE);
    drop(now(flow.acquire(BOB, SMALL)));
    let alices: Vec<_> = (0..200).map(|_| flow.acquire(ALICE, SMALL)).collect();
    let waiting = |it: &&Acquired| matches!(it, Acquired::Later(_));
    assert_eq!(alices.iter().filter(waiting).count(), 200 - limits::SHARED_BATCHES_MIN);
    let bobs: Vec<_> =
        (0..limits::SHARE_BATCHES_MIN).map(|_| now(flow.acquire(BOB, SMALL))).collect();
    let next = later(flow.acquire(BOB, SMALL));
    drop(bobs);
    next.await.unwrap();
    sleep(limits::SHARED_AFTER_COMPETITION).await;
    assert_eq!(flow.bytes().0, SMALL * limits::SHARED_BATCHES_MIN);
    drop(alices);
    assert_eq!(flow.bytes(), (0, MAX));
}

#[tokio::test(start_paused = true)]
async fn pacing_ends_some_time_after_the_last_small_batch() {
    let flow = FlowControl::new(MAX, limits::PACE);
    let most = flow.large_bytes_max();
    assert_eq!(most, MAX - MAX / 16);
    drop(now(flow.acquire(ALICE, SMALL)));
    assert_eq!(flow.large_bytes_max(), 0, "the probe allows one large batch at a time");
    sleep(limits::PACE_PROBE_MAX).await;
    assert_eq!(flow.large_bytes_max(), most, "the probe measured nothing");
    sleep(limits::PACE_PROBE_INTERVAL).await;
    for _ in 0..=limits::PACE_PROBE_BATCHES {
        let permit = now(flow.acquire(ALICE, SMALL));
        sleep(Duration::from_millis(1)).await;
        permit.mark_synced();
    }
    assert_eq!(flow.large_bytes_max(), limits::PACED_BYTES_MIN, "the rate is unknown");
    sleep(limits::PACED_AFTER_SMALL).await;
    assert_eq!(flow.large_bytes_max(), most);
}

/// Otherwise a stale probe would take the time in a queue for the latency without one.
#[tokio::test(start_paused = true)]
async fn ignores_measurements_made_without_pacing() {
    let flow = FlowControl::new(MAX, limits::PACE);
    // A probe starts, and no more small batches arrive.
    drop(now(flow.acquire(ALICE, SMALL)));
    sleep(limits::PACED_AFTER_SMALL).await;
    for _ in 0..=limits::PACE_PROBE_BATCHES {
        let queue: Vec<_> = (0..100).map(|_| now(flow.acquire(ALICE, LARGE))).collect();
        sleep(Duration::from_millis(100)).await;
        queue.iter().for_each(FlowPermit::mark_synced);
    }
    drop(now(flow.acquire(ALICE, SMALL)));
    assert_eq!(flow.large_bytes_max(), 0, "a new probe starts");
}

/// A batch larger than the window is let through alone.
#[tokio::test(start_paused = true)]
async fn batch_larger_than_window_gets_a_permit() {
    let flow = FlowControl::new(MAX, limits::PACE);
    drop(now(flow.acquire(ALICE, SMALL)));
    let first = now(flow.acquire(ALICE, 4 << 20));
    let second = later(flow.acquire(ALICE, 4 << 20));
    drop(first);
    timeout(Duration::from_secs(1), second).await.unwrap().unwrap();
}
