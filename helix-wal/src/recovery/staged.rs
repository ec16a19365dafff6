//! Staged segments: received for a snapshot that is not installed yet.
//!
//! The state file lists them, so they survive a restart. They are not part of the log before
//! [`Wal::install`](crate::Wal::install).

use std::sync::Arc;

use tracing::{info, warn};

use crate::error::Error;
use crate::files::cold_segment::{ColdSegment, ColdSegments};
use crate::files::data_dir::DirListing;
use crate::files::open_files::OpenFiles;
use crate::files::open_segment::{open_segment, read_directory, read_trailer};
use crate::format::layout::cold_name;
use crate::format::state::{ColdSegmentInfo, PersistedState, StagedSegments};
use crate::storage::Storage;
use crate::types::LogId;

/// Opens the staged segments, up to the first damaged one; the rest is fetched again.
///
/// Nothing in them is acknowledged before the snapshot is installed.
pub(crate) fn load_staged(
    storage: &Arc<dyn Storage>,
    files: &Arc<OpenFiles>,
    names: &DirListing,
    state: &PersistedState,
) -> Result<(StagedSegments, Option<ColdSegments>), Error> {
    let mut found = Vec::new();
    for name in &state.staged.segments {
        match open_whole(storage, names, state, name) {
            Ok(cold) => {
                cold.segment.open_on_demand(files);
                found.push(cold);
            }
            Err(Error::Damaged { file, what, .. }) => {
                warn!(file, what, "staged segment is damaged, fetching the rest again");
                break;
            }
            Err(error) => return Err(error),
        }
    }
    if found.is_empty() {
        return Ok((StagedSegments::default(), None));
    }
    let segments = found.iter().map(ColdSegment::info).collect();
    let received = StagedSegments { after: state.staged.after, segments };
    let found = ColdSegments::of(found);
    let (after, last) = (received.after, found.last());
    info!(directory = storage.describe(), after, last, "found staged segments");
    Ok((received, Some(found)))
}

fn open_whole(
    storage: &Arc<dyn Storage>,
    names: &DirListing,
    state: &PersistedState,
    name: &ColdSegmentInfo,
) -> Result<ColdSegment, Error> {
    let file = cold_name(name.id);
    if !names.cold.contains(&name.id) {
        return Err(Error::Damaged { file, bytes: 0..0, what: "is missing".to_owned() });
    }
    let segment = Arc::new(open_segment(storage.as_ref(), name.id, &file)?);
    let entries: Option<(u64, LogId)> = Some((name.first, name.last));
    let identity_crc = crc32fast::hash(&state.identity);
    let fits = |it: &crate::format::footer::Trailer| {
        (it.entries, it.identity_crc) == (entries, identity_crc)
    };
    let trailer = read_trailer(&segment)?.filter(fits);
    let trailer =
        trailer.ok_or_else(|| segment.damaged(0..segment.len, "has no matching trailer"))?;
    let directory = read_directory(&segment, &trailer)?;
    segment.set_trailer(trailer.clone());
    Ok(ColdSegment::named(Arc::clone(storage), file, segment, trailer, directory))
}
