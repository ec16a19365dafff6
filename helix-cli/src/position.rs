//! Parses positions in a partition: `earliest`, `latest`, `1234`, `-100`, `@-15m`,
//! `@2026-01-31T10:00:00Z`. `offset_lookup` resolves them to offsets.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use helix_proto::time;
use prost_types::Timestamp;

use crate::units;

/// Syntax of a position, for error texts.
const FORMS: &str = "earliest, latest, an offset (1234), a count after the start (+100) or before \
                     the end (-100), a time (@2026-01-31T10:00:00Z, @2026-01-31) or an age \
                     (@-15m)";

/// Syntax of a position, for help texts and documentation.
pub(crate) const HELP: &str = "\
\x20 earliest                first available record
  latest                  end of the partition: only new records
  1234                    this offset
  +100                    this many records after the first available one
  -100                    this many records before the end
  @2026-01-31T10:00:00Z   first record appended at this time or later; @2026-01-31 is midnight UTC
  @-15m                   first record appended within this time";

/// Returns the help text of a position argument: its purpose and the syntax.
pub(crate) fn help(purpose: &str) -> String {
    format!("{purpose}: a position in each partition\n{HELP}")
}

/// A position in a partition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PositionArg {
    /// First available record.
    Earliest,
    /// One past the last record.
    Latest,
    /// This offset.
    Offset(u64),
    /// This many records after the first available one.
    AfterStart(u64),
    /// This many records before the end.
    BeforeEnd(u64),
    /// First record appended at this time or later.
    At(SystemTime),
    /// First record appended within this time before now.
    Ago(Duration),
}

impl PositionArg {
    /// Returns the time of a time-based position.
    pub(crate) fn time(&self, now: SystemTime) -> Option<SystemTime> {
        match self {
            Self::At(time) => Some(*time),
            Self::Ago(ago) => Some(before(now, *ago)),
            _ => None,
        }
    }
}

/// A range of positions: `A..B`, with either side optional. `A` alone has no end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PositionRange {
    pub(crate) from: Option<PositionArg>,
    pub(crate) until: Option<PositionArg>,
}

impl PositionRange {
    /// Returns start and end if the end is before the start whatever a partition has.
    pub(crate) fn is_reversed(&self) -> Option<(&PositionArg, &PositionArg)> {
        use PositionArg::{AfterStart, Ago, At, BeforeEnd, Earliest, Latest, Offset};
        let (from, until) = (self.from.as_ref()?, self.until.as_ref()?);
        let is_reversed = match (from, until) {
            (Offset(from), Offset(until)) | (AfterStart(from), AfterStart(until)) => until < from,
            (BeforeEnd(from), BeforeEnd(until)) => until > from,
            (At(from), At(until)) => until < from,
            (Ago(from), Ago(until)) => until > from,
            (Latest, Earliest) => true,
            _ => false,
        };
        is_reversed.then_some((from, until))
    }
}

impl FromStr for PositionRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |side: &str| match side {
            "" => Ok(None),
            side => side.parse().map(Some),
        };
        match text.split_once("..") {
            Some(("", "")) => Err(format!("\"..\" has no position; use {FORMS}, or A..B")),
            Some((from, until)) => Ok(Self { from: side(from)?, until: side(until)? }),
            None => Ok(Self { from: Some(text.parse()?), until: None }),
        }
    }
}

/// Returns `now - ago`, but at least the Unix epoch.
fn before(now: SystemTime, ago: Duration) -> SystemTime {
    now.checked_sub(ago).map_or(SystemTime::UNIX_EPOCH, |time| time.max(SystemTime::UNIX_EPOCH))
}

impl FromStr for PositionArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("invalid position {text:?}; use {FORMS}");
        if let Some(ago) = text.strip_prefix("@-") {
            return Ok(Self::Ago(units::parse_duration(ago)?));
        }
        if let Some(time) = text.strip_prefix('@') {
            let at: Timestamp = time.parse().map_err(|_| invalid())?;
            return time::system_time(at).map(Self::At).map_err(|_| invalid());
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
        // Parsing as `u64` would accept another sign.
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

impl fmt::Display for PositionArg {
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
    fn every_form_round_trips() {
        for (text, position) in [
            ("earliest", PositionArg::Earliest),
            ("latest", PositionArg::Latest),
            ("0", PositionArg::Offset(0)),
            ("1234", PositionArg::Offset(1234)),
            ("+100", PositionArg::AfterStart(100)),
            ("-100", PositionArg::BeforeEnd(100)),
            ("@-15m", PositionArg::Ago(Duration::from_secs(900))),
            ("@-1h30m", PositionArg::Ago(Duration::from_secs(5400))),
            ("@2026-01-31T10:00:00Z", PositionArg::At(time("2026-01-31T10:00:00Z"))),
        ] {
            assert_eq!(text.parse(), Ok(position.clone()));
            assert_eq!(position.to_string(), text);
        }
    }

    #[test]
    fn times_may_omit_the_clock_or_have_a_zone() {
        assert_eq!("@2026-01-31".parse(), Ok(PositionArg::At(time("2026-01-31T00:00:00Z"))));
        assert_eq!(
            "@2026-01-31T10:00:00+02:00".parse(),
            Ok(PositionArg::At(time("2026-01-31T08:00:00Z")))
        );
        assert_eq!(
            "@2026-01-31T10:00:00.25Z".parse(),
            Ok(PositionArg::At(time("2026-01-31T10:00:00Z") + Duration::from_millis(250)))
        );
    }

    #[test]
    fn rejects_invalid_positions_with_the_syntax() {
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
            assert!(text.parse::<PositionArg>().is_err(), "{text:?}");
        }
        let error = "first".parse::<PositionArg>().unwrap_err();
        assert!(error.contains("\"first\"") && error.contains("earliest"), "{error}");
    }

    #[test]
    fn ranges_have_one_side_or_both() {
        let range = |from: Option<PositionArg>, until| Ok(PositionRange { from, until });
        let (ten, twenty) = (Some(PositionArg::Offset(10)), Some(PositionArg::Offset(20)));
        assert_eq!("10..20".parse(), range(ten.clone(), twenty.clone()));
        assert_eq!("10..".parse(), range(ten.clone(), None));
        assert_eq!("..20".parse(), range(None, twenty));
        assert_eq!("10".parse(), range(ten, None));
        let quarter = Some(PositionArg::Ago(Duration::from_secs(900)));
        let newest = Some(PositionArg::BeforeEnd(5));
        assert_eq!("@-15m..-5".parse(), range(quarter, newest));
        for text in ["..", "", "10..x", "x..10", "1..2..3"] {
            assert!(text.parse::<PositionRange>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn reversed_ranges_are_noticed() {
        let is_reversed =
            |text: &str| text.parse::<PositionRange>().unwrap().is_reversed().is_some();
        for text in ["5..2", "-2..-5", "+5..+2", "@2026-02-01..@2026-01-01", "@-1m..@-1h"] {
            assert!(is_reversed(text), "{text}");
        }
        assert!(is_reversed("latest..earliest"));
        for text in ["2..5", "5..5", "-5..-2", "@-1h..@-1m", "5..-2", "5..", "..2", "100..@-1m"] {
            assert!(!is_reversed(text), "{text}");
        }
    }

    #[test]
    fn ages_are_relative_to_now() {
        let now = time("2026-01-31T10:00:00Z");
        let ago = |ago| PositionArg::Ago(ago).time(now);
        assert_eq!(ago(Duration::from_millis(900_500)), Some(time("2026-01-31T09:44:59.5Z")));
        assert_eq!(ago(Duration::from_secs(u64::MAX)), Some(SystemTime::UNIX_EPOCH));
        assert_eq!(PositionArg::At(now).time(now), Some(now));
        assert_eq!(PositionArg::Offset(7).time(now), None);
    }
}
