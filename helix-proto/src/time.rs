//! Converts durations and timestamps of the wire to those of the standard library.
//!
//! The conversions of `prost_types` panic for some values that a sender can choose, for example a
//! duration of -2^63 seconds. These return an error for every value that has no equivalent.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NANOS_PER_SECOND: i128 = 1_000_000_000;

/// Reason why a time on the wire has no equivalent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TimeError {
    /// A duration is negative.
    #[error("must be a duration of zero or more")]
    Negative,
    /// A timestamp is outside the range of the platform's clock.
    #[error("timestamp is out of the platform's range")]
    OutOfRange,
}

/// Converts a duration. Nanoseconds beyond a second, or of the other sign, count as such.
///
/// # Errors
/// [`TimeError::Negative`] for a negative duration.
pub fn duration(wire: prost_types::Duration) -> Result<Duration, TimeError> {
    let nanos = total_nanos(wire.seconds, wire.nanos);
    from_nanos(u128::try_from(nanos).map_err(|_| TimeError::Negative)?).ok_or(TimeError::OutOfRange)
}

/// Converts a timestamp. Nanoseconds beyond a second, and negative ones, count as such.
///
/// # Errors
/// [`TimeError::OutOfRange`] for a time that the platform cannot represent.
pub fn system_time(wire: prost_types::Timestamp) -> Result<SystemTime, TimeError> {
    let nanos = total_nanos(wire.seconds, wire.nanos);
    // Also bounds what converts back to the wire.
    let distance = from_nanos(nanos.unsigned_abs())
        .filter(|distance| i64::try_from(distance.as_secs()).is_ok())
        .ok_or(TimeError::OutOfRange)?;
    let time =
        if nanos < 0 { UNIX_EPOCH.checked_sub(distance) } else { UNIX_EPOCH.checked_add(distance) };
    time.ok_or(TimeError::OutOfRange)
}

/// Cannot overflow: 2^63 * 10^9 is below 2^93.
fn total_nanos(seconds: i64, nanos: i32) -> i128 {
    i128::from(seconds) * NANOS_PER_SECOND + i128::from(nanos)
}

fn from_nanos(nanos: u128) -> Option<Duration> {
    let per_second = NANOS_PER_SECOND.unsigned_abs();
    let seconds = u64::try_from(nanos / per_second).ok()?;
    let nanos = u32::try_from(nanos % per_second).ok()?;
    Some(Duration::new(seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: [i64; 7] = [i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX];
    const NANOS: [i32; 7] = [i32::MIN, -1_000_000_000, -1, 0, 1, 1_000_000_000, i32::MAX];

    #[test]
    fn converts_every_duration_or_fails() {
        for (seconds, nanos) in SECONDS.into_iter().flat_map(|s| NANOS.map(|n| (s, n))) {
            let converted = duration(prost_types::Duration { seconds, nanos });
            let total = total_nanos(seconds, nanos);
            match converted {
                Ok(duration) => assert_eq!(i128::try_from(duration.as_nanos()).unwrap(), total),
                Err(error) => assert!(total < 0, "{seconds} {nanos}: {error}"),
            }
        }
    }

    #[test]
    fn converts_every_timestamp_or_fails() {
        for (seconds, nanos) in SECONDS.into_iter().flat_map(|s| NANOS.map(|n| (s, n))) {
            if let Ok(time) = system_time(prost_types::Timestamp { seconds, nanos }) {
                let back = prost_types::Timestamp::from(time);
                assert_eq!(total_nanos(back.seconds, back.nanos), total_nanos(seconds, nanos));
            }
        }
        let second = prost_types::Timestamp { seconds: -1, nanos: 500_000_000 };
        assert_eq!(system_time(second).unwrap(), UNIX_EPOCH - Duration::from_millis(500));
    }
}
