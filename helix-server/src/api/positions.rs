//! Start positions in a partition (offset, name, time, tail) and their offsets.
//! Used by every call that reads.

use helix_proto::log::v1::start_position::Position as Wire;
use helix_proto::log::v1::{CommitFallback as WireFallback, NamedPosition, StartPosition};

use super::group::check_group;
use super::time;
use crate::error::{Error, Result};
use crate::log::Watermarks;
use crate::node::{CommitFallback, LocatedPartition, Node};
use crate::shard::ReadFrom;

/// Position at which a read starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ReadPosition {
    Offset(u64),
    /// The first record appended at or after this time, in microseconds.
    Time(u64),
    Earliest,
    Latest,
    /// This many records before the high watermark.
    TailRecords(u64),
    /// The offset that a group has committed, or that a reader of it has reached.
    Committed {
        group: String,
        fallback: CommitFallback,
        reached: Option<u64>,
    },
}

impl ReadPosition {
    pub(super) fn parse(start: Option<StartPosition>) -> Result<Self> {
        let fallback = start.as_ref().map_or(0, |start| start.commit_fallback);
        let reached = start.as_ref().and_then(|start| start.reached_offset);
        let position = start.and_then(|start| start.position);
        if !matches!(position, Some(Wire::CommittedGroup(_))) {
            let field = match (fallback, reached) {
                (0, None) => None,
                (0, Some(_)) => Some("start.reached_offset"),
                _ => Some("start.commit_fallback"),
            };
            if let Some(field) = field {
                let what = "is for a committed_group".to_owned();
                return Err(Error::InvalidArgument { field, what });
            }
        }
        match position {
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
            Some(Wire::CommittedGroup(group)) => {
                check_group(&group)?;
                Ok(Self::Committed { group, fallback: parse_fallback(fallback)?, reached })
            }
            None => Err(unset()),
        }
    }

    /// Resolves the position to an offset in a partition with these watermarks.
    ///
    /// Does not check an explicit offset against them.
    pub(super) async fn offset(
        &self,
        node: &Node,
        located: &LocatedPartition,
        watermarks: Watermarks,
        from: ReadFrom,
    ) -> Result<u64> {
        let Watermarks { log_start, high_watermark } = watermarks;
        match self {
            Self::Offset(offset) => Ok(*offset),
            Self::Earliest => Ok(log_start),
            Self::Latest => Ok(high_watermark),
            Self::TailRecords(records) => {
                Ok(high_watermark.saturating_sub(*records).max(log_start))
            }
            Self::Time(time_us) => {
                // The watermarks are older than the search, so no record is skipped.
                let LocatedPartition { shard, partition, .. } = located;
                let found = shard.offset_at_time(*partition, *time_us, from).await?;
                Ok(found.unwrap_or(high_watermark))
            }
            // Boxed: it may ask another node.
            Self::Committed { group, fallback, reached } => {
                Box::pin(node.committed_offset(group, located, *fallback, *reached, from)).await
            }
        }
    }
}

fn parse_fallback(fallback: i32) -> Result<CommitFallback> {
    match WireFallback::try_from(fallback) {
        Ok(WireFallback::Unspecified) => Ok(CommitFallback::Safe),
        Ok(WireFallback::Fail) => Ok(CommitFallback::Fail),
        Ok(WireFallback::Earliest) => Ok(CommitFallback::Earliest),
        Ok(WireFallback::Latest) => Ok(CommitFallback::Latest),
        Err(_) => Err(Error::InvalidArgument {
            field: "start.commit_fallback",
            what: format!("{fallback} is unknown to this version"),
        }),
    }
}

fn unset() -> Error {
    Error::InvalidArgument {
        field: "start",
        what: "is required: an offset, a timestamp, EARLIEST, LATEST, a number of tail records or \
               a committed_group"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(position: Option<Wire>) -> Result<ReadPosition> {
        ReadPosition::parse(Some(StartPosition { position, ..StartPosition::default() }))
    }

    #[test]
    fn rejects_an_unset_start() {
        assert!(ReadPosition::parse(None).is_err());
        assert!(parse(None).is_err());
        assert!(parse(Some(Wire::Named(0))).is_err());
        assert!(parse(Some(Wire::Named(99))).is_err());
    }

    #[test]
    fn parses_a_group_and_its_fallback() {
        let parse = |group: &str, commit_fallback| {
            let position = Some(Wire::CommittedGroup(group.to_owned()));
            let start = StartPosition { position, commit_fallback, ..StartPosition::default() };
            ReadPosition::parse(Some(start))
        };
        let committed = |fallback| {
            let (group, reached) = ("readers".to_owned(), None);
            ReadPosition::Committed { group, fallback, reached }
        };
        assert_eq!(parse("readers", 0).unwrap(), committed(CommitFallback::Safe));
        assert_eq!(parse("readers", 3).unwrap(), committed(CommitFallback::Latest));
        assert!(parse("readers", 4).is_err());
        assert!(parse("", 0).is_err() && parse("a b", 0).is_err());
        let position = Some(Wire::Offset(1));
        let (commit_fallback, reached_offset) = (1, Some(1));
        let offset = StartPosition { position, ..StartPosition::default() };
        let start = StartPosition { commit_fallback, ..offset.clone() };
        assert!(ReadPosition::parse(Some(start)).is_err(), "a fallback without a group");
        let start = StartPosition { reached_offset, ..offset };
        assert!(ReadPosition::parse(Some(start)).is_err(), "a reached offset without a group");
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
