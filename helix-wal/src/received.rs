//! Segments that came from elsewhere and wait for their snapshot. The state file names them, so
//! that what was fetched outlives the process; they are no part of the log before [`Wal::install`].

use std::sync::{Arc, PoisonError};

use tracing::{info, warn};

use crate::cold::{Cold, ColdSegments};
use crate::files::Files;
use crate::install::name_of;
use crate::layout::cold_name;
use crate::recovery::{Names, open_segment, read_directory, read_trailer};
use crate::state_file::{ColdName, Received, State};
use crate::storage::Storage;
use crate::wal::Wal;
use crate::{Error, LogId};

impl Wal {
    /// Has these segments outlive the process: the next open gives them back. They hold every live
    /// entry above `after`, up to their last. Takes the place of what was retained before, which
    /// should be among them. Blocks. After `DiskFull` all is as it was.
    pub fn retain(&self, after: u64, segments: &mut ColdSegments) -> Result<(), Error> {
        let Some(storage) = &self.shared.storage else { return self.shared.lock().check_open() };
        let received = Received { after, segments: segments.made.iter().map(name_of).collect() };
        let mut file = self.shared.state_file.lock().unwrap_or_else(PoisonError::into_inner);
        let named = {
            let core = self.shared.lock();
            core.check_open()?;
            let state = core.state(self.shared.identity.clone(), file.checkpoint.clone());
            State { received: received.clone(), ..state }
        };
        let written = file.write(storage.as_ref(), &named);
        if !matches!(written, Err(Error::DiskFull { .. })) {
            // Also where it failed: perhaps it names them, and only an open can tell.
            segments.made.iter_mut().for_each(Cold::outlive);
        }
        match written {
            Ok(()) => self.shared.lock().received = received,
            Err(error @ Error::DiskFull { .. }) => return Err(error),
            Err(error) => {
                drop(file);
                self.shared.poison(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// What an earlier process has retained, and above which entry; once.
    pub fn take_received(&self) -> Option<(u64, ColdSegments)> {
        let mut core = self.shared.lock();
        let found = core.found.take()?;
        Some((core.received.after, found))
    }
}

/// Opens what the state file says was received, up to the first segment that is not whole: the rest
/// is fetched again. Before the snapshot nothing of it is owed to anybody.
pub(crate) fn load(
    storage: &Arc<dyn Storage>,
    files: &Arc<Files>,
    names: &Names,
    state: &State,
) -> Result<(Received, Option<ColdSegments>), Error> {
    let mut found = Vec::new();
    for name in &state.received.segments {
        match open_whole(storage, names, state, name) {
            Ok(cold) => {
                cold.segment.open_on_demand(files);
                found.push(cold);
            }
            Err(Error::Damaged { file, what, .. }) => {
                warn!(file, what, "what was received is not whole: the rest is fetched again");
                break;
            }
            Err(error) => return Err(error),
        }
    }
    if found.is_empty() {
        return Ok((Received::default(), None));
    }
    let segments = found.iter().map(name_of).collect();
    let received = Received { after: state.received.after, segments };
    let found = ColdSegments::of(found);
    let (after, last) = (received.after, found.last());
    info!(folder = storage.describe(), after, last, "what was received before is here");
    Ok((received, Some(found)))
}

fn open_whole(
    storage: &Arc<dyn Storage>,
    names: &Names,
    state: &State,
    name: &ColdName,
) -> Result<Cold, Error> {
    let file = cold_name(name.id);
    if !names.cold.contains(&name.id) {
        return Err(Error::Damaged { file, bytes: 0..0, what: "is missing".to_owned() });
    }
    let segment = Arc::new(open_segment(storage.as_ref(), name.id, &file)?);
    let entries: Option<(u64, LogId)> = Some((name.first, name.last));
    let identity_crc = crc32fast::hash(&state.identity);
    let fits =
        |it: &crate::footer::Trailer| (it.entries, it.identity_crc) == (entries, identity_crc);
    let trailer = read_trailer(&segment)?.filter(fits);
    let trailer = trailer.ok_or_else(|| segment.damaged(0..segment.len, "has no trailer of it"))?;
    let directory = read_directory(&segment, &trailer)?;
    segment.set_trailer(trailer.clone());
    Ok(Cold::named(Arc::clone(storage), file, segment, trailer, directory))
}
