//! Places in a partition, by name, time or distance, and the offsets they stand for.
//! Used by every call that reads.

use helix_proto::log::v1::start_position::Position as Wire;
use helix_proto::log::v1::{NamedPosition, StartPosition};

use super::time;
use crate::error::{Error, Result};
use crate::log::{PartitionId, Watermarks};
use crate::shard::{ReadFrom, Shard};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Position {
    Offset(u64),
    /// The first record that was appended at or after this time.
    Time(u64),
    Earliest,
    Latest,
    /// This many records before the high watermark.
    TailRecords(u64),
}

impl Position {
    pub(super) fn parse(start: Option<StartPosition>) -> Result<Self> {
        match start.and_then(|start| start.position) {
            Some(Wire::Offset(offset)) => Ok(Self::Offset(offset)),
            Some(Wire::Timestamp(timestamp)) => {
                Ok(Self::Time(time::from_timestamp("start.timestamp", timestamp)?))
            }
            Some(Wire::Named(named)) => match NamedPosition::try_from(named) {
                Ok(NamedPosition::Earliest) => Ok(Self::Earliest),
                Ok(NamedPosition::Latest) => Ok(Self::Latest),
                Ok(NamedPosition::Unspecified) | Err(_) => Err(unset()),
            },
            Some(Wire::TailRecords(records)) => Ok(Self::TailRecords(records)),
            Some(Wire::CommittedGroup(_)) => {
                Err(Error::Unimplemented { what: "start.committed_group" })
            }
            None => Err(unset()),
        }
    }

    /// The offset that this stands for in a partition that has these watermarks. An offset that
    /// was given as such is not checked against them.
    pub(super) async fn offset(
        self,
        shard: &Shard,
        partition: PartitionId,
        watermarks: Watermarks,
        from: ReadFrom,
    ) -> Result<u64> {
        let Watermarks { log_start, high_watermark } = watermarks;
        match self {
            Self::Offset(offset) => Ok(offset),
            Self::Earliest => Ok(log_start),
            Self::Latest => Ok(high_watermark),
            Self::TailRecords(records) => Ok(high_watermark.saturating_sub(records).max(log_start)),
            Self::Time(time_us) => {
                // The watermarks are older than the search: nothing between the two is missed.
                let found = shard.offset_at_time(partition, time_us, from).await?;
                Ok(found.unwrap_or(high_watermark))
            }
        }
    }
}

fn unset() -> Error {
    Error::InvalidArgument {
        field: "start",
        what: "must say where to start: an offset, a time, EARLIEST, LATEST or a number of records"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(position: Option<Wire>) -> Result<Position> {
        Position::parse(Some(StartPosition { position }))
    }

    #[test]
    fn an_unset_start_is_an_error() {
        assert!(Position::parse(None).is_err());
        assert!(parse(None).is_err());
        assert!(parse(Some(Wire::Named(0))).is_err());
        assert!(parse(Some(Wire::Named(99))).is_err());
    }

    #[test]
    fn a_group_is_refused_and_not_ignored() {
        let group = parse(Some(Wire::CommittedGroup("readers".to_owned())));
        assert!(matches!(group, Err(Error::Unimplemented { .. })));
    }

    #[test]
    fn the_rest_is_understood() {
        assert_eq!(parse(Some(Wire::Offset(7))).unwrap(), Position::Offset(7));
        assert_eq!(parse(Some(Wire::Named(1))).unwrap(), Position::Earliest);
        assert_eq!(parse(Some(Wire::Named(2))).unwrap(), Position::Latest);
        assert_eq!(parse(Some(Wire::TailRecords(3))).unwrap(), Position::TailRecords(3));
        let second = prost_types::Timestamp { seconds: 1, nanos: 0 };
        assert_eq!(parse(Some(Wire::Timestamp(second))).unwrap(), Position::Time(1_000_000));
    }
}
