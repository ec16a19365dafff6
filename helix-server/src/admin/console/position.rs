//! Positions in a partition, in the forms of the command line: `earliest`, `latest`, `1234`,
//! `-100`, `@-15m`, `@2026-01-31T10:00:00Z`. Pure.

use std::time::Duration;

use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{NamedPosition, StartPosition};
use helix_proto::units;
use prost_types::Timestamp;

use crate::quote::quote;

/// Syntax of a position.
pub(super) const FORMS: &str = "earliest, latest, an offset (1234), a count before the end (-100), \
                                a time (@2026-01-31T10:00:00Z) or an age (@-15m)";

/// Parses a position.
///
/// # Errors
/// A text with the valid forms.
pub(super) fn parse(text: &str, now_us: u64) -> Result<Position, String> {
    let invalid = || format!("invalid position {}; use {FORMS}", quote(text));
    let position = match text {
        "earliest" => Position::Named(NamedPosition::Earliest.into()),
        "latest" => Position::Named(NamedPosition::Latest.into()),
        _ => match (text.strip_prefix("@-"), text.strip_prefix('@'), text.strip_prefix('-')) {
            (Some(age), ..) => {
                let age = units::parse_duration(age).map_err(|_| invalid())?;
                Position::Timestamp(before(now_us, age))
            }
            (_, Some(time), _) => {
                let time: Timestamp = time.parse().map_err(|_| invalid())?;
                helix_proto::time::system_time(time).map_err(|_| invalid())?;
                Position::Timestamp(time)
            }
            (.., Some(count)) => Position::TailRecords(number(count).ok_or_else(invalid)?),
            _ => Position::Offset(number(text).ok_or_else(invalid)?),
        },
    };
    Ok(position)
}

/// Returns the position as a part of a request.
pub(super) fn start(position: Position) -> Option<StartPosition> {
    Some(StartPosition { position: Some(position), ..StartPosition::default() })
}

fn number(text: &str) -> Option<u64> {
    // `parse` would also accept a plus sign.
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Returns the time this long before now, but at least the Unix epoch.
fn before(now_us: u64, age: Duration) -> Timestamp {
    let age_us = u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
    let at_us = now_us.saturating_sub(age_us);
    Timestamp {
        seconds: i64::try_from(at_us / 1_000_000).unwrap_or(i64::MAX),
        nanos: i32::try_from(at_us % 1_000_000 * 1_000).unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_have_the_forms_of_the_command_line() {
        let now_us = 1_000_000_000;
        let at = |seconds| Position::Timestamp(Timestamp { seconds, nanos: 0 });
        for (text, position) in [
            ("earliest", Position::Named(NamedPosition::Earliest.into())),
            ("latest", Position::Named(NamedPosition::Latest.into())),
            ("1234", Position::Offset(1_234)),
            ("-100", Position::TailRecords(100)),
            ("@-15m", at(100)),
            ("@-1h", at(0)),
            ("@2026-01-31T10:00:00Z", at(1_769_853_600)),
        ] {
            assert_eq!(parse(text, now_us), Ok(position), "{text}");
        }
        for text in
            ["", "oldest", "+1", "--1", "1.5", "@", "@yesterday", "@-", "@-1", "-", "١", "1 2"]
        {
            let error = parse(text, now_us).unwrap_err();
            assert!(error.contains("earliest, latest"), "{error}");
        }
        assert!(parse("99999999999999999999", now_us).is_err());
    }
}
