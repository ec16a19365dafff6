//! `helix offsets`: where each partition begins and ends, and where a position is in it.
//! Reads no records.

use schemars::JsonSchema;
use serde::Serialize;

use super::spans;
use crate::args::{Global, OffsetsArgs};
use crate::connect::connect;
use crate::output::Output;

/// One partition.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Row {
    partition: u32,
    log_start_offset: u64,
    high_watermark: u64,
    /// Offset of the position that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
}

pub(crate) async fn run(global: &Global, args: &OffsetsArgs) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let source = args.source.into();
    let extents = spans::extents(&client, &args.topic, &args.partitions, source).await?;
    let offsets = match &args.position {
        Some(position) => {
            let offsets = spans::offsets(&client, &args.topic, &extents, position, source).await?;
            offsets.into_iter().map(Some).collect()
        }
        None => vec![None; extents.len()],
    };
    let row = |(extent, offset): (&spans::Extent, _)| Row {
        partition: extent.partition,
        log_start_offset: extent.watermarks.log_start_offset,
        high_watermark: extent.watermarks.high_watermark,
        offset,
    };
    let rows: Vec<_> = extents.iter().zip(offsets).map(row).collect();
    Output { format: global.output }.show(&rows)
}
