//! Parses and prints durations, sizes and counts, for people.
//! The parsers accept printed durations. Pure.

use std::time::Duration;

/// Units of a duration in nanoseconds, largest first.
const DURATIONS: [(&str, u128); 8] = [
    ("w", 604_800_000_000_000),
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// Units of a size in bytes. Those without `i` are powers of ten.
const SIZES: [(&str, u64); 10] = [
    ("tib", 1 << 40),
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("tb", 1_000_000_000_000),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1_000),
    ("b", 1),
    ("", 1),
];

/// Parses `500ms`, `10s`, `1h30m`, `7d`.
///
/// # Errors
/// A text with the valid forms.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let invalid =
        || format!("invalid duration {text:?}; use a form such as 500ms, 10s, 5m, 1h30m or 7d");
    let mut rest = text;
    let mut total: u128 = 0;
    while !rest.is_empty() {
        let (number, after) = split(rest, |byte| byte.is_ascii_digit());
        let (unit, after) = split(after, |byte| byte.is_ascii_alphabetic());
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let (_, nanos) = DURATIONS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
        total += u128::from(number) * nanos;
        rest = after;
    }
    if text.is_empty() {
        return Err(invalid());
    }
    let seconds = u64::try_from(total / 1_000_000_000).map_err(|_| invalid())?;
    let nanos = u32::try_from(total % 1_000_000_000).expect("a remainder of a billion fits");
    Ok(Duration::new(seconds, nanos))
}

/// Parses `64KiB`, `1MiB`, `2GB`, `4096`.
///
/// # Errors
/// A text with the valid forms.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let invalid = || format!("invalid size {text:?}; use a form such as 4096, 64KiB, 1MiB or 2GB");
    let (number, unit) = split(text, |byte| byte.is_ascii_digit());
    let number: u64 = number.parse().map_err(|_| invalid())?;
    let unit = unit.trim().to_ascii_lowercase();
    let (_, bytes) = SIZES.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
    number.checked_mul(*bytes).ok_or_else(invalid)
}

fn split(text: &str, is_in: impl Fn(u8) -> bool) -> (&str, &str) {
    let end = text.bytes().position(|byte| !is_in(byte)).unwrap_or(text.len());
    text.split_at(end)
}

/// Formats a duration exactly, as [`parse_duration`] accepts it: `1h30m`.
pub fn duration(duration: Duration) -> String {
    let mut nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    // Weeks are parsed but not printed; 14d is easier to read than 2w.
    for (name, unit) in DURATIONS.iter().skip(1) {
        if nanos >= *unit {
            text += &format!("{}{name}", nanos / unit);
            nanos %= unit;
        }
    }
    text
}

/// Formats a measured time, rounded for people: `0.13 ms`, `2.41 s`.
pub fn measured(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        _ if seconds >= 1.0 => format!("{seconds:.2} s"),
        _ if seconds >= 0.1 => format!("{:.0} ms", seconds * 1e3),
        _ if seconds >= 0.01 => format!("{:.1} ms", seconds * 1e3),
        _ if seconds >= 1e-4 => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.0} us", seconds * 1e6),
    }
}

/// Formats a size, rounded for people: `512 B`, `64 MiB`, `1.5 GiB`.
pub fn bytes(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((name, shift)) = units.into_iter().find(|(_, shift)| bytes >> shift > 0) else {
        return format!("{bytes} B");
    };
    let number = bytes as f64 / (1_u64 << shift) as f64;
    if bytes.trailing_zeros() >= shift || number >= 100.0 {
        format!("{number:.0} {name}")
    } else {
        format!("{number:.1} {name}")
    }
}

/// Formats a count with thousands separators: `1,000,000`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things for people: `1 record`, `2,000 records`.
pub fn counted(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", count(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_round_trip() {
        for (text, millis) in
            [("0s", 0), ("500ms", 500), ("10s", 10_000), ("1h30m", 5_400_000), ("7d", 604_800_000)]
        {
            let read = parse_duration(text).unwrap();
            assert_eq!(read, Duration::from_millis(millis), "{text}");
            assert_eq!(duration(read), text);
        }
        assert_eq!(parse_duration("2w"), parse_duration("14d"));
        assert_eq!(parse_duration("1500us").unwrap(), Duration::from_micros(1500));
    }

    #[test]
    fn rejects_invalid_durations() {
        for text in ["", "10", "s", "10 s", "-5s", "1.5h", "10x", "99999999999999999999s"] {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
        assert!(parse_duration("18446744073709551615w").is_err());
    }

    #[test]
    fn parses_sizes_and_rejects_invalid_ones() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64KiB", 65_536),
            ("1mib", 1 << 20),
            ("2 GB", 2_000_000_000),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "1.5MiB", "-1", "10x", "99999999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn formats_numbers_for_people() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_000_000), "1,000,000");
        assert_eq!(
            [0, 1, 2].map(|it| counted(it, "record")),
            ["0 records", "1 record", "2 records"]
        );
        for (size, text) in [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB")]
        {
            assert_eq!(bytes(size), text);
        }
        assert_eq!(bytes(80_123_456_789), "74.6 GiB");
        assert_eq!(bytes(u64::MAX), "16777216 TiB");
        assert_eq!(measured(Duration::from_micros(130)), "0.13 ms");
        assert_eq!(measured(Duration::from_micros(46)), "46 us");
        assert_eq!(measured(Duration::from_micros(45_200)), "45.2 ms");
        assert_eq!(measured(Duration::from_millis(420)), "420 ms");
        assert_eq!(measured(Duration::from_millis(2410)), "2.41 s");
    }
}
