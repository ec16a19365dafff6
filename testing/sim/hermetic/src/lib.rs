//! Simulated system time and randomness for simulating threads. Other threads are not affected.
//!
//! Libraries call the system directly: hyper for the date of each response, h2 for the age of reset
//! streams, every `HashMap` for its keys. These calls go through two functions of libc, which this
//! crate defines, so that the program links to them.
//!
//! Has unsafe code. Only the simulation links to this crate.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::Duration;

use libc::{c_int, c_long, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};

/// Both clocks at the start of a simulation. Far from 0, so that subtracting a duration from an
/// instant does not underflow.
const WALL_BEGIN: Duration = Duration::from_secs(1_700_000_000);
const MONOTONIC_BEGIN: Duration = Duration::from_secs(1_000_000);

// Without destructors and allocation, because both may call these functions.
thread_local! {
    static NOW: Cell<Option<Duration>> = const { Cell::new(None) };
    static RANDOM: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Guard: the thread that created it simulates until it is dropped.
#[derive(Debug)]
pub struct Hermetic(PhantomData<*const ()>);

impl Hermetic {
    /// Starts simulated time and randomness, derived from `seed`, on this thread.
    pub fn enter(seed: u64) -> Self {
        NOW.set(Some(Duration::ZERO));
        RANDOM.set(Some(seed));
        Self(PhantomData)
    }

    /// Sets the time since the simulation began.
    pub fn set_now(&self, now: Duration) {
        NOW.set(Some(now));
    }
}

impl Drop for Hermetic {
    fn drop(&mut self) {
        NOW.set(None);
        RANDOM.set(None);
    }
}

/// Replaces `clock_gettime` of libc.
///
/// # Safety
/// As for `clock_gettime(2)`: `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, out: *mut timespec) -> c_int {
    let begin = match clock {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => WALL_BEGIN,
        _ => MONOTONIC_BEGIN,
    };
    // CPU clocks are not used by the simulation.
    match NOW.get() {
        Some(now) => {
            let time = begin + now;
            let result = timespec {
                tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: c_long::from(time.subsec_nanos()),
            };
            // SAFETY: guaranteed by the caller.
            unsafe { out.write(result) };
            0
        }
        // SAFETY: guaranteed by the caller. libc's own function makes the same system call.
        None => match unsafe { libc::syscall(libc::SYS_clock_gettime, clock, out) } {
            0 => 0,
            _ => -1,
        },
    }
}

/// Replaces `getrandom` of libc.
///
/// # Safety
/// As for `getrandom(2)`: `out` is valid for writes of `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(out: *mut c_void, len: size_t, flags: c_uint) -> ssize_t {
    let Some(mut state) = RANDOM.get() else {
        // SAFETY: guaranteed by the caller. libc's own function makes the same system call.
        let got = unsafe { libc::syscall(libc::SYS_getrandom, out, len, flags) };
        return ssize_t::try_from(got).unwrap_or(-1);
    };
    let out = out.cast::<u8>();
    for at in 0..len {
        // SplitMix64, one byte at a time: a run needs only a few dozen bytes.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [byte, ..] = (mixed ^ mixed >> 31).to_le_bytes();
        // SAFETY: guaranteed by the caller, since `at` is below `len`.
        unsafe { out.add(at).write(byte) };
    }
    RANDOM.set(Some(state));
    ssize_t::try_from(len).unwrap_or(ssize_t::MAX)
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher, RandomState};
    use std::thread;
    use std::time::{Instant, SystemTime};

    use super::*;

    fn in_hermetic(seed: u64) -> (u64, Instant, SystemTime) {
        let work = move || {
            let hermetic = Hermetic::enter(seed);
            hermetic.set_now(Duration::from_millis(7));
            (RandomState::new().hash_one(1), Instant::now(), SystemTime::now())
        };
        thread::spawn(work).join().unwrap()
    }

    #[test]
    fn simulating_thread_gets_time_and_randomness_of_its_seed() {
        assert_eq!(in_hermetic(1), in_hermetic(1));
        assert_ne!(in_hermetic(1).0, in_hermetic(2).0);
        let wall = in_hermetic(1).2.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(wall, WALL_BEGIN + Duration::from_millis(7));
    }

    #[test]
    fn other_threads_use_the_system() {
        let (one, other) = (RandomState::new(), thread::spawn(RandomState::new).join().unwrap());
        assert_ne!(one.hash_one(1), other.hash_one(1));
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(wall > WALL_BEGIN + Duration::from_secs(1_000_000));
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(1) {}
    }
}
