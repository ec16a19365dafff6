//! The async runtime that openraft runs on: tokio, with two differences.
//! Very short sleeps yield instead, and randomness comes from a source that a test can seed.

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

/// tokio's timer has a resolution of a millisecond and rounds up. openraft waits a microsecond
/// between two completion notices, which would become one to two milliseconds of commit latency;
/// a sleep shorter than this gives way to other tasks once instead.
const SHORTEST_SLEEP: Duration = Duration::from_micros(100);

thread_local! {
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes all later random numbers that openraft draws on this thread a function of `seed`. For
/// simulations, which run on one thread.
pub fn seed_this_thread(seed: u64) {
    SEED.with(|cell| cell.set(Some(seed)));
}

/// A generator: from this thread's seed where there is one, else from the operating system.
fn generator() -> StdRng {
    SEED.with(|cell| match cell.get() {
        Some(seed) => {
            cell.set(Some(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)));
            StdRng::seed_from_u64(seed)
        }
        None => crate::random::from_system(),
    })
}

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

    /// openraft calls this in its own tests only; Helix runs on the runtime it is started in.
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
            .expect("a runtime on the current thread can be built")
            .block_on(future)
    }
}

/// Ready at the second poll.
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
