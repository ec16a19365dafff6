//! What a thread that simulates sees of the operating system: its time is the simulation's, and its
//! randomness follows from the seed. For all other threads nothing changes.
//!
//! Libraries ask the system behind our back: hyper for the date in each answer, h2 for how long ago
//! a stream was reset, every `HashMap` for its keys. All of it goes through two functions of libc,
//! which are defined here instead, so that they are what the program is linked to.
//!
//! The only unsafe code of the house, in a crate that nothing but the simulation is linked with.

use std::cell::Cell;
use std::marker::PhantomData;
use std::time::Duration;

use libc::{c_int, c_long, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};

/// Where the two clocks stand when a simulation begins. Far from 0, so that whoever subtracts a
/// while from a moment gets a moment.
const WALL_BEGIN: Duration = Duration::from_secs(1_700_000_000);
const MONOTONIC_BEGIN: Duration = Duration::from_secs(1_000_000);

// Without destructors and without allocation: they are read from within both.
thread_local! {
    static NOW: Cell<Option<Duration>> = const { Cell::new(None) };
    static RANDOM: Cell<Option<u64>> = const { Cell::new(None) };
}

/// While it lives the thread that it was made on simulates.
#[derive(Debug)]
pub struct Hermetic(PhantomData<*const ()>);

impl Hermetic {
    /// From now on this thread's time is what it is told, and its randomness follows from `seed`.
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

/// Time as libc tells it.
///
/// # Safety
/// As `clock_gettime(2)`: `out` is a place for an answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, out: *mut timespec) -> c_int {
    let begin = match clock {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => WALL_BEGIN,
        _ => MONOTONIC_BEGIN,
    };
    // A clock of the processor's is nobody's business here; it is asked for by none.
    match NOW.get() {
        Some(now) => {
            let time = begin + now;
            let answer = timespec {
                tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: c_long::from(time.subsec_nanos()),
            };
            // SAFETY: the caller's promise.
            unsafe { out.write(answer) };
            0
        }
        // SAFETY: the caller's promise. The system call is what libc's own function comes to.
        None => match unsafe { libc::syscall(libc::SYS_clock_gettime, clock, out) } {
            0 => 0,
            _ => -1,
        },
    }
}

/// Randomness as libc gives it.
///
/// # Safety
/// As `getrandom(2)`: `out` is a place for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(out: *mut c_void, len: size_t, flags: c_uint) -> ssize_t {
    let Some(mut state) = RANDOM.get() else {
        // SAFETY: the caller's promise. The system call is what libc's own function comes to.
        let got = unsafe { libc::syscall(libc::SYS_getrandom, out, len, flags) };
        return ssize_t::try_from(got).unwrap_or(-1);
    };
    let out = out.cast::<u8>();
    for at in 0..len {
        // SplitMix64, a byte at a time: a few dozen bytes are asked for in a whole run.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [byte, ..] = (mixed ^ mixed >> 31).to_le_bytes();
        // SAFETY: the caller's promise, since `at` is below `len`.
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
    fn a_thread_that_simulates_sees_what_follows_from_its_seed_and_time() {
        assert_eq!(in_hermetic(1), in_hermetic(1));
        assert_ne!(in_hermetic(1).0, in_hermetic(2).0);
        let wall = in_hermetic(1).2.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(wall, WALL_BEGIN + Duration::from_millis(7));
    }

    #[test]
    fn other_threads_see_the_system() {
        let (one, other) = (RandomState::new(), thread::spawn(RandomState::new).join().unwrap());
        assert_ne!(one.hash_one(1), other.hash_one(1));
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(wall > WALL_BEGIN + Duration::from_secs(1_000_000));
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(1) {}
    }
}
