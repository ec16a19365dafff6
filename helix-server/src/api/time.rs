//! Converts times between the wire (seconds and nanoseconds) and the server (microseconds since the
//! Unix epoch). Pure.

use std::time::Duration;

use crate::error::{Error, Result};

const MICROS_PER_SECOND: u64 = 1_000_000;

/// Converts an append time to the wire.
pub(super) fn to_timestamp(time_us: u64) -> prost_types::Timestamp {
    let seconds = i64::try_from(time_us / MICROS_PER_SECOND).expect("2^64 / 10^6 fits");
    let nanos = i32::try_from(time_us % MICROS_PER_SECOND * 1_000).expect("below 10^9");
    prost_types::Timestamp { seconds, nanos }
}

/// Returns the first microsecond at or after a time; 0 for times before 1970.
pub(super) fn from_timestamp(
    field: &'static str,
    timestamp: prost_types::Timestamp,
) -> Result<u64> {
    let nanos = u64::try_from(timestamp.nanos)
        .ok()
        .filter(|&nanos| nanos < 1_000_000_000)
        .ok_or_else(|| Error::InvalidArgument {
            field,
            what: format!("nanos must be in 0..1000000000, not {}", timestamp.nanos),
        })?;
    let Ok(seconds) = u64::try_from(timestamp.seconds) else { return Ok(0) };
    Ok(seconds.saturating_mul(MICROS_PER_SECOND).saturating_add(nanos.div_ceil(1_000)))
}

/// Converts a duration, which must not be negative.
pub(super) fn from_duration(
    field: &'static str,
    duration: prost_types::Duration,
) -> Result<Duration> {
    helix_proto::time::duration(duration)
        .map_err(|error| Error::InvalidArgument { field, what: error.to_string() })
}

/// Converts a duration to the wire.
pub(super) fn to_duration(micros: u64) -> prost_types::Duration {
    let prost_types::Timestamp { seconds, nanos } = to_timestamp(micros);
    prost_types::Duration { seconds, nanos }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_round_trip() {
        for time_us in [0, 1, 999_999, 1_000_000, 1_763_712_000_123_456, u64::MAX] {
            assert_eq!(from_timestamp("t", to_timestamp(time_us)).unwrap(), time_us);
        }
    }

    #[test]
    fn a_time_between_two_microseconds_rounds_up() {
        let between = prost_types::Timestamp { seconds: 1, nanos: 1 };
        assert_eq!(from_timestamp("t", between).unwrap(), 1_000_001);
        let before = prost_types::Timestamp { seconds: -1, nanos: 999_999_999 };
        assert_eq!(from_timestamp("t", before).unwrap(), 0);
    }

    #[test]
    fn rejects_invalid_times() {
        let nanos = prost_types::Timestamp { seconds: 1, nanos: -1 };
        assert!(matches!(from_timestamp("t", nanos), Err(Error::InvalidArgument { .. })));
        for seconds in [-1, i64::MIN] {
            let negative = prost_types::Duration { seconds, nanos: 0 };
            assert!(matches!(from_duration("d", negative), Err(Error::InvalidArgument { .. })));
        }
    }
}
