//! Places in a partition as people write them: `earliest`, `latest`, `1234`, `-100`, `@-15m`,
//! `@2026-01-31T10:00:00Z`. Pure: what they mean on a partition is the service's to resolve.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use prost_types::Timestamp;

use crate::units;

/// How to write a position.
const FORMS: &str = "earliest, latest, an offset (1234), so many after the start (+100) or before \
                     the end (-100), a time (@2026-01-31T10:00:00Z, @2026-01-31) or a time ago \
                     (@-15m)";

/// How to write a position, for documentation.
pub(crate) const HELP: &str = "\
\x20 earliest                first record that is kept
  latest                  end: only records that come from now on
  1234                    this offset
  +100                    so many records after the first one that is kept
  -100                    so many records before the end
  @2026-01-31T10:00:00Z   first record appended at this time or later; @2026-01-31 is midnight UTC
  @-15m                   first record appended so long ago or later";

/// Help for an argument that is a position: what it is for, and how to write it.
pub(crate) fn help(purpose: &str) -> String {
    format!("{purpose}: a position in each partition\n{HELP}")
}

/// A place in a partition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Position {
    /// First record that is kept.
    Earliest,
    /// One past the last record.
    Latest,
    /// This offset.
    Offset(u64),
    /// This many records after the first one that is kept.
    AfterStart(u64),
    /// This many records before the end.
    BeforeEnd(u64),
    /// First record appended at this time or later.
    At(SystemTime),
    /// First record appended this long ago or later.
    Ago(Duration),
}

impl Position {
    /// The time that it names, if it is one.
    pub(crate) fn time(&self, now: SystemTime) -> Option<SystemTime> {
        match self {
            Self::At(time) => Some(*time),
            Self::Ago(ago) => Some(before(now, *ago)),
            _ => None,
        }
    }
}

/// Where to begin and where to stop: `A..B`, each of which may be left out. `A` alone has no end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PositionRange {
    pub(crate) from: Option<Position>,
    pub(crate) until: Option<Position>,
}

impl FromStr for PositionRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |side: &str| match side {
            "" => Ok(None),
            side => side.parse().map(Some),
        };
        match text.split_once("..") {
            Some(("", "")) => Err(format!("\"..\" names no position; write {FORMS}, or A..B")),
            Some((from, until)) => Ok(Self { from: side(from)?, until: side(until)? }),
            None => Ok(Self { from: Some(text.parse()?), until: None }),
        }
    }
}

/// `ago` before `now`, but not before 1970: nothing was appended then.
fn before(now: SystemTime, ago: Duration) -> SystemTime {
    now.checked_sub(ago).map_or(SystemTime::UNIX_EPOCH, |time| time.max(SystemTime::UNIX_EPOCH))
}

impl FromStr for Position {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("{text:?} is no position; write {FORMS}");
        if let Some(ago) = text.strip_prefix("@-") {
            return Ok(Self::Ago(units::parse_duration(ago)?));
        }
        if let Some(time) = text.strip_prefix('@') {
            let time: Timestamp = time.parse().map_err(|_| invalid())?;
            return time.try_into().map(Self::At).map_err(|_| invalid());
        }
        match text {
            "earliest" => return Ok(Self::Earliest),
            "latest" => return Ok(Self::Latest),
            _ => {}
        }
        let (sign, records) = match text.strip_prefix(['+', '-']) {
            Some(records) => (&text[..1], records),
            None => ("", text),
        };
        // `u64` would take a sign of its own.
        if !records.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(invalid());
        }
        let number = records.parse().map_err(|_| invalid())?;
        Ok(match sign {
            "+" => Self::AfterStart(number),
            "-" => Self::BeforeEnd(number),
            _ => Self::Offset(number),
        })
    }
}

impl fmt::Display for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Earliest => formatter.write_str("earliest"),
            Self::Latest => formatter.write_str("latest"),
            Self::Offset(offset) => write!(formatter, "{offset}"),
            Self::AfterStart(records) => write!(formatter, "+{records}"),
            Self::BeforeEnd(records) => write!(formatter, "-{records}"),
            Self::At(time) => write!(formatter, "@{}", Timestamp::from(*time)),
            Self::Ago(ago) => write!(formatter, "@-{}", units::duration(*ago)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> SystemTime {
        text.parse::<Timestamp>().unwrap().try_into().unwrap()
    }

    #[test]
    fn every_form_is_read_and_printed_back() {
        for (text, position) in [
            ("earliest", Position::Earliest),
            ("latest", Position::Latest),
            ("0", Position::Offset(0)),
            ("1234", Position::Offset(1234)),
            ("+100", Position::AfterStart(100)),
            ("-100", Position::BeforeEnd(100)),
            ("@-15m", Position::Ago(Duration::from_secs(900))),
            ("@-1h30m", Position::Ago(Duration::from_secs(5400))),
            ("@2026-01-31T10:00:00Z", Position::At(time("2026-01-31T10:00:00Z"))),
        ] {
            assert_eq!(text.parse(), Ok(position.clone()));
            assert_eq!(position.to_string(), text);
        }
    }

    #[test]
    fn times_may_be_short_or_in_another_zone() {
        assert_eq!("@2026-01-31".parse(), Ok(Position::At(time("2026-01-31T00:00:00Z"))));
        assert_eq!(
            "@2026-01-31T10:00:00+02:00".parse(),
            Ok(Position::At(time("2026-01-31T08:00:00Z")))
        );
        assert_eq!(
            "@2026-01-31T10:00:00.25Z".parse(),
            Ok(Position::At(time("2026-01-31T10:00:00Z") + Duration::from_millis(250)))
        );
    }

    #[test]
    fn what_is_no_position_is_refused_with_help() {
        for text in [
            "",
            "-",
            "+",
            "+-5",
            "--5",
            "1.5",
            "first",
            "Earliest",
            "@",
            "@-",
            "@-5",
            "@noon",
            "@2026-13-01",
            "18446744073709551616",
            " 5",
        ] {
            assert!(text.parse::<Position>().is_err(), "{text:?}");
        }
        let error = "first".parse::<Position>().unwrap_err();
        assert!(error.contains("\"first\"") && error.contains("earliest"), "{error}");
    }

    #[test]
    fn ranges_have_one_end_or_both() {
        let range = |from: Option<Position>, until| Ok(PositionRange { from, until });
        let (ten, twenty) = (Some(Position::Offset(10)), Some(Position::Offset(20)));
        assert_eq!("10..20".parse(), range(ten.clone(), twenty.clone()));
        assert_eq!("10..".parse(), range(ten.clone(), None));
        assert_eq!("..20".parse(), range(None, twenty));
        assert_eq!("10".parse(), range(ten, None));
        let quarter = Some(Position::Ago(Duration::from_secs(900)));
        let newest = Some(Position::BeforeEnd(5));
        assert_eq!("@-15m..-5".parse(), range(quarter, newest));
        for text in ["..", "", "10..x", "x..10", "1..2..3"] {
            assert!(text.parse::<PositionRange>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn times_ago_are_counted_from_now() {
        let now = time("2026-01-31T10:00:00Z");
        let ago = |ago| Position::Ago(ago).time(now);
        assert_eq!(ago(Duration::from_millis(900_500)), Some(time("2026-01-31T09:44:59.5Z")));
        assert_eq!(ago(Duration::from_secs(u64::MAX)), Some(SystemTime::UNIX_EPOCH));
        assert_eq!(Position::At(now).time(now), Some(now));
        assert_eq!(Position::Offset(7).time(now), None);
    }
}
