//! Start positions in a partition (offset, name, time, tail) and their offsets.
//! Used by every call that reads.

use helix_proto::log::v1::start_position::Position as Wire;
use helix_proto::log::v1::{NamedPosition, StartPosition};

use super::time;
use crate::error::{Error, Result};
use crate::log::{PartitionId, Watermarks};
use crate::shard::{ReadFrom, Shard};

/// Position at which a read starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadPosition {
    Offset(u64),
    /// The first record appended at or after this time, in microseconds.
    Time(u64),
    Earliest,
    Latest,
    /// This many records before the high watermark.
    TailRecords(u64),
}

impl ReadPosition {
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

    /// Resolves the position to an offset in a partition with these watermarks.
    ///
    /// Does not check an explicit offset against them.
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
                // The watermarks are older than the search, so no record is skipped.
                let found = shard.offset_at_time(partition, time_us, from).await?;
                Ok(found.unwrap_or(high_watermark))
            }
        }
    }
}

fn unset() -> Error {
    Error::InvalidArgument {
        field: "start",
        what: "is required: an offset, a timestamp, EARLIEST, LATEST or a number of tail records"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(position: Option<Wire>) -> Result<ReadPosition> {
        ReadPosition::parse(Some(StartPosition { position }))
    }

    #[test]
    fn rejects_an_unset_start() {
        assert!(ReadPosition::parse(None).is_err());
        assert!(parse(None).is_err());
        assert!(parse(Some(Wire::Named(0))).is_err());
        assert!(parse(Some(Wire::Named(99))).is_err());
    }

    #[test]
    fn rejects_a_group() {
        let group = parse(Some(Wire::CommittedGroup("readers".to_owned())));
        assert!(matches!(group, Err(Error::Unimplemented { .. })));
    }

    #[test]
    fn parses_the_other_positions() {
        assert_eq!(parse(Some(Wire::Offset(7))).unwrap(), ReadPosition::Offset(7));
        assert_eq!(parse(Some(Wire::Named(1))).unwrap(), ReadPosition::Earliest);
        assert_eq!(parse(Some(Wire::Named(2))).unwrap(), ReadPosition::Latest);
        assert_eq!(parse(Some(Wire::TailRecords(3))).unwrap(), ReadPosition::TailRecords(3));
        let second = prost_types::Timestamp { seconds: 1, nanos: 0 };
        assert_eq!(parse(Some(Wire::Timestamp(second))).unwrap(), ReadPosition::Time(1_000_000));
    }
}
