//! The async runtime of openraft: tokio, with two differences.
//! Very short sleeps yield once instead, and a test can seed the random numbers.

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
        tokio::task::spawn(future)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        if duration < SHORTEST_SLEEP {
            Either::Right(Yield::default())
        } else {
            Either::Left(TokioRuntime::sleep(duration))
        }
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
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
