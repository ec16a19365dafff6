//! The async runtime of openraft: tokio, with three differences.
//! Very short sleeps yield once instead, the ticks of all replicas of a node coincide, and a test
//! can seed the random numbers.

use std::cell::Cell;
use std::future::Future;
use std::time::Duration;

use futures_util::future::Either;
use openraft_rt::{AsyncRuntime, Instant as _, OptionalSend};
use openraft_rt_tokio::{
    TokioInstant, TokioMpsc, TokioMutex, TokioOneshot, TokioRuntime, TokioWatch,
};
use rand::SeedableRng;
use rand::rngs::StdRng;

/// Sleeps shorter than this yield to other tasks once instead.
///
/// tokio's timer has a resolution of 1 ms and rounds up. openraft sleeps 1 µs between two
/// completion notices, which would add 1 to 2 ms to the commit latency.
const SHORTEST_SLEEP: Duration = Duration::from_micros(100);

tokio::task_local! {
    static TICKS: TaskTicks;
}

/// The tick grid of a task of openraft.
struct TaskTicks {
    grid: TickGrid,
    /// The task is a tick loop: all others sleep for microseconds.
    is_loop: Cell<bool>,
}

impl TaskTicks {
    fn new(grid: TickGrid) -> Self {
        Self { grid, is_loop: Cell::new(false) }
    }

    /// Returns the tick at which a sleep until a deadline ends; `None` if it is not a tick loop's.
    ///
    /// openraft ticks five times as often. Its deadlines count only before the first tick: a later
    /// one comes before the next tick of the grid.
    fn wake_at(&self, deadline: TokioInstant) -> Option<TokioInstant> {
        let now = TokioInstant::now();
        if self.is_loop.get() {
            return Some(self.grid.after(now));
        }
        let is_loop = deadline.saturating_duration_since(now) >= SHORTEST_SLEEP;
        self.is_loop.set(is_loop);
        is_loop.then(|| self.grid.after(deadline))
    }
}

/// The moments at which all replicas of a node tick: multiples of a period after an epoch.
///
/// openraft spreads the ticks of its groups, so that each group wakes the node separately. With
/// ticks that coincide, the heartbeats of all shards between two nodes travel in one write, and so
/// do their responses. A tick does little but send heartbeats, so there is one for each.
#[derive(Debug, Clone, Copy)]
pub struct TickGrid {
    epoch: TokioInstant,
    period: Duration,
}

impl TickGrid {
    /// Creates the grid whose epoch is now.
    pub fn new(period: Duration) -> Self {
        Self { epoch: TokioInstant::now(), period }
    }

    /// Returns a grid with the same epoch.
    pub fn with_period(self, period: Duration) -> Self {
        Self { period, ..self }
    }

    /// Returns the time until the next tick.
    pub fn until_next(self) -> Duration {
        let now = TokioInstant::now();
        self.after(now).saturating_duration_since(now)
    }

    /// Returns the first tick after a moment.
    fn after(self, moment: TokioInstant) -> TokioInstant {
        let period = self.period.as_nanos().max(1);
        let past = moment.saturating_duration_since(self.epoch).as_nanos() % period;
        moment + Duration::from_nanos(u64::try_from(period - past).unwrap_or(u64::MAX))
    }

    /// Runs a future whose openraft tasks tick on this grid, also those that they spawn.
    pub async fn scope<F: Future>(self, future: F) -> F::Output {
        TICKS.scope(TaskTicks::new(self), future).await
    }
}

thread_local! {
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Seeds all later random numbers that openraft draws on this thread.
/// For simulations, which run on one thread.
pub fn seed_this_thread(seed: u64) {
    SEED.with(|cell| cell.set(Some(seed)));
}

/// Returns a generator seeded by this thread's seed, or by the operating system without one.
fn generator() -> StdRng {
    SEED.with(|cell| match cell.get() {
        Some(seed) => {
            cell.set(Some(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)));
            StdRng::seed_from_u64(seed)
        }
        None => crate::random::from_system(),
    })
}

/// The runtime that [`TypeConfig`](super::TypeConfig) names.
#[derive(Debug)]
pub struct Runtime;

impl AsyncRuntime for Runtime {
    type JoinError = tokio::task::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = tokio::task::JoinHandle<T>;
    type Sleep = Either<tokio::time::Sleep, Yield>;
    type Instant = TokioInstant;
    type TimeoutError = tokio::time::error::Elapsed;
    type Timeout<R, T: Future<Output = R> + OptionalSend> = tokio::time::Timeout<T>;
    type ThreadLocalRng = StdRng;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        match TICKS.try_with(|ticks| ticks.grid) {
            Ok(grid) => tokio::task::spawn(grid.scope(future)),
            Err(_) => tokio::task::spawn(future),
        }
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        if duration < SHORTEST_SLEEP {
            Either::Right(Yield::default())
        } else {
            Either::Left(TokioRuntime::sleep(duration))
        }
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        if let Ok(Some(tick)) = TICKS.try_with(|ticks| ticks.wake_at(deadline)) {
            return Either::Left(TokioRuntime::sleep_until(tick));
        }
        if deadline.saturating_duration_since(TokioInstant::now()) < SHORTEST_SLEEP {
            Either::Right(Yield::default())
        } else {
            Either::Left(TokioRuntime::sleep_until(deadline))
        }
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(
        duration: Duration,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout(duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout_at(deadline, future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        join_error.is_panic()
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        generator()
    }

    type Mpsc = TokioMpsc;
    type Watch = TokioWatch;
    type Oneshot = TokioOneshot;
    type Mutex<T: OptionalSend + 'static> = TokioMutex<T>;

    /// Returns a handle. Only openraft's own tests call this; Helix uses the ambient runtime.
    fn new(_threads: usize) -> Self {
        Self
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a current-thread runtime can be built")
            .block_on(future)
    }
}

/// A future that is ready at the second poll.
#[derive(Debug, Default)]
pub struct Yield {
    polled: bool,
}

impl Future for Yield {
    type Output = ();

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<()> {
        if self.polled {
            return std::task::Poll::Ready(());
        }
        self.polled = true;
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn sleeps_end_on_the_grid_also_in_spawned_tasks() {
        let period = Duration::from_millis(80);
        let grid = TickGrid::new(period);
        let epoch = grid.epoch;
        tokio::time::advance(Duration::from_millis(33)).await;
        let slept = move |duration: Duration| async move {
            Runtime::sleep_until(TokioInstant::now() + duration).await;
            epoch.elapsed()
        };
        let outside = slept(Duration::from_millis(50)).await;
        assert_eq!(outside.as_millis(), 83, "tasks without a grid sleep as long as they ask for");
        let nested = async move { Runtime::spawn(slept(Duration::from_millis(100))).await };
        let spawned = grid.scope(async move { Runtime::spawn(nested).await }).await;
        assert_eq!(spawned.unwrap().unwrap().as_millis(), 240);
        assert_eq!(grid.until_next().as_millis(), 80, "a tick is over when it has come");
        assert_eq!(grid.with_period(Duration::from_millis(100)).until_next().as_millis(), 60);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tick_loop_wakes_once_a_period_whatever_its_phase() {
        let period = Duration::from_millis(80);
        for late_us in [0, 1, 50, 99, 100, 999, 40_000, 79_900, 79_950, 79_999] {
            let grid = TickGrid::new(period);
            tokio::time::advance(Duration::from_micros(late_us)).await;
            let ticks = grid.scope(async move {
                let step = period * 13 / 64;
                let mut at = TokioInstant::now() + step;
                let mut ticks = Vec::new();
                for _ in 0..4 {
                    Runtime::sleep_until(at).await;
                    // Timers are late by up to a millisecond.
                    ticks.push(grid.epoch.elapsed().as_millis() / period.as_millis());
                    // As openraft's tick loop: the first of its deadlines that is not over.
                    while at <= TokioInstant::now() {
                        at += step;
                    }
                }
                ticks
            });
            let first = ticks.await;
            let [one, rest @ ..] = first.as_slice() else { panic!("no ticks") };
            assert!([1, 2].contains(one), "{late_us}: {first:?}");
            assert_eq!(rest, [one + 1, one + 2, one + 3], "{late_us}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn short_waits_yield_also_beside_ticks() {
        let grid = TickGrid::new(Duration::from_millis(80));
        let start = TokioInstant::now();
        let wait = Runtime::sleep_until(start + Duration::from_micros(1));
        grid.scope(wait).await;
        grid.scope(async { Runtime::sleep_until(start + Duration::from_micros(1)).await }).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
