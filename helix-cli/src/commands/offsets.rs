//! `helix offsets`: the start and end offset of each partition, and the offset of a position.
//! Reads no records.

use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{GlobalArgs, OffsetsArgs};
use crate::connect::connect;
use crate::offset_lookup;
use crate::output::{Output, message};
use crate::position::PositionArg;

/// The offsets of a partition.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct OffsetRow {
    partition: u32,
    log_start_offset: u64,
    high_watermark: u64,
    /// Offset of the requested position.
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
}

pub(crate) async fn run(global: &GlobalArgs, args: &OffsetsArgs) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let source = args.source.into();
    let topic = offset_lookup::topic(&client, &args.topic).await?;
    let bounds = offset_lookup::partition_bounds(&client, topic, &args.partitions, source).await?;
    let offsets: Vec<Option<u64>> = match &args.position {
        Some(position) => {
            let offsets = offset_lookup::offsets(&client, topic, &bounds, position, source).await?;
            offsets.into_iter().map(Some).collect()
        }
        None => vec![None; bounds.len()],
    };
    let row = |(bounds, offset): (&offset_lookup::PartitionBounds, _)| OffsetRow {
        partition: bounds.partition,
        log_start_offset: bounds.watermarks.log_start_offset,
        high_watermark: bounds.watermarks.high_watermark,
        offset,
    };
    if let Some(PositionArg::Offset(requested)) = args.position
        && !global.quiet
    {
        for (bounds, offset) in bounds.iter().zip(&offsets) {
            if let Some(offset) = offset.filter(|offset| *offset != requested) {
                let partition = bounds.partition;
                message!(
                    "partition {partition}: has no offset {requested}, the nearest is {offset}"
                );
            }
        }
    }
    let rows: Vec<_> = bounds.iter().zip(offsets).map(row).collect();
    Output { format: global.output }.show(&rows)
}
