//! Places in a partition as people write them: `earliest`, `latest`, `1234`, `-100`, `@-15m`,
//! `@2026-01-31T10:00:00Z`. Pure: what they mean on a partition is the service's to resolve.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use helix_client as client;
use prost_types::Timestamp;

use crate::units;

/// How to write a position.
const FORMS: &str = "earliest, latest, an offset (1234), so many before the end (-100), a time \
                     (@2026-01-31T10:00:00Z, @2026-01-31) or a time ago (@-15m)";

/// Help for an argument that is a position: what it is for, and how to write it.
pub(crate) fn help(purpose: &str) -> String {
    format!(
        "\
{purpose}: a position in each partition
  earliest                first record that is kept
  latest                  end: only records that come from now on
  1234                    this offset
  -100                    so many records before the end
  @2026-01-31T10:00:00Z   first record appended at this time or later
  @-15m                   first record appended so long ago or later"
    )
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
    /// This many records before the end.
    BeforeEnd(u64),
    /// First record appended at this time or later.
    At(SystemTime),
    /// First record appended this long ago or later.
    Ago(Duration),
}

impl Position {
    /// As the client takes it.
    pub(crate) fn to_client(&self, now: SystemTime) -> client::Position {
        match self {
            Self::Earliest => client::Position::Earliest,
            Self::Latest => client::Position::Latest,
            Self::Offset(offset) => client::Position::Offset(*offset),
            Self::BeforeEnd(records) => client::Position::Tail(*records),
            Self::At(time) => client::Position::Timestamp(*time),
            Self::Ago(ago) => client::Position::Timestamp(before(now, *ago)),
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
        let (records, is_before_end) = match text.strip_prefix('-') {
            Some(records) => (records, true),
            None => (text, false),
        };
        // `u64` would take a sign of its own.
        if !records.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(invalid());
        }
        let number = records.parse().map_err(|_| invalid())?;
        Ok(if is_before_end { Self::BeforeEnd(number) } else { Self::Offset(number) })
    }
}

impl fmt::Display for Position {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Earliest => formatter.write_str("earliest"),
            Self::Latest => formatter.write_str("latest"),
            Self::Offset(offset) => write!(formatter, "{offset}"),
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
            "+5",
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
    fn positions_become_what_the_client_takes() {
        let now = time("2026-01-31T10:00:00Z");
        let start = |position: Position| position.to_client(now);
        assert_eq!(start(Position::Earliest), client::Position::Earliest);
        assert_eq!(start(Position::Latest), client::Position::Latest);
        assert_eq!(start(Position::Offset(7)), client::Position::Offset(7));
        assert_eq!(start(Position::BeforeEnd(7)), client::Position::Tail(7));
        let earlier = client::Position::Timestamp(time("2026-01-31T09:44:59.5Z"));
        assert_eq!(start(Position::Ago(Duration::from_millis(900_500))), earlier);
        let long_ago = Position::Ago(Duration::from_secs(u64::MAX));
        assert_eq!(start(long_ago), client::Position::Timestamp(SystemTime::UNIX_EPOCH));
    }
}
