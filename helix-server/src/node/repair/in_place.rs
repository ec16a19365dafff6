//! Repairs damaged sealed segments in place: fetches the damaged entries from any replica that has
//! them, and swaps them in. The replica keeps its log, its votes, and its leadership.

use std::collections::BTreeMap;

use helix_wal::{Entry, Error, LogId, Placement, SegmentDamage, Wal};

use crate::peer::Hub;
use crate::raft::{DiskReads, ReplicaId, node_of};

/// Outcome of one attempt to repair a file.
#[derive(Debug)]
pub(in crate::node) enum InPlaceOutcome {
    /// Everything in the file verifies, or the log no longer needs the file.
    Repaired,
    /// Another attempt may succeed. The reason is for operators.
    Later(String),
    /// This node lacks disk space, file descriptors or memory for it.
    Shortage(Error),
    /// The damage is not in entries and cannot be repaired in place.
    Unrepairable(String),
}

/// An open log with damage. Its replica need not run.
#[derive(Clone, Copy)]
pub(in crate::node) struct DamagedLog<'a> {
    pub(in crate::node) hub: &'a Hub,
    pub(in crate::node) shard_id: u64,
    pub(in crate::node) own: ReplicaId,
    pub(in crate::node) wal: &'a Wal,
    pub(in crate::node) reads: &'a DiskReads,
}

/// Fetches entries from several replicas, and keeps asking the replica that served last.
struct EntrySources<'a> {
    hub: &'a Hub,
    shard_id: u64,
    own: ReplicaId,
    from: &'a [ReplicaId],
    current: usize,
    /// A request has failed, so that replica may have the missing entries.
    has_failed: bool,
}

impl DamagedLog<'_> {
    /// Repairs one file with entries of the replicas in `from`. Reports progress for operators.
    pub(in crate::node) async fn repair_file(
        &self,
        file: &str,
        from: &[ReplicaId],
        on_progress: &(dyn Fn(String) + Sync),
    ) -> InPlaceOutcome {
        let Self { wal, reads, .. } = *self;
        let (examined, name) = (wal.clone(), file.to_owned());
        let damage = match reads.wait(move || examined.examine_segment(&name)).await {
            Err(error) => return InPlaceOutcome::Later(error.to_string()),
            Ok(Err(Error::Damaged { .. })) if !wal.has_file(file) => {
                reads.forget_damage(file);
                return InPlaceOutcome::Repaired;
            }
            Ok(Err(error @ Error::Damaged { .. })) => {
                return InPlaceOutcome::Unrepairable(error.to_string());
            }
            Ok(Err(_)) if wal.is_open() && !wal.has_file(file) => {
                reads.forget_damage(file);
                return InPlaceOutcome::Repaired;
            }
            Ok(Err(error)) => return later(error),
            Ok(Ok(damage)) => damage,
        };
        match self.fetch_and_repair(file, damage, from, on_progress).await {
            Ok(()) => {
                reads.forget_damage(file);
                InPlaceOutcome::Repaired
            }
            Err(outcome) => outcome,
        }
    }

    /// Tries the replicas in turn until the bytes of one fit. Compaction by key may leave other
    /// bytes under the same id on each replica, but only the bytes that were damaged here fit.
    async fn fetch_and_repair(
        &self,
        file: &str,
        mut damage: SegmentDamage,
        from: &[ReplicaId],
        on_progress: &(dyn Fn(String) + Sync),
    ) -> Result<(), InPlaceOutcome> {
        let (hub, shard_id, own) = (self.hub, self.shard_id, self.own);
        let mut sources = EntrySources { hub, shard_id, own, from, current: 0, has_failed: false };
        let mut refused = None;
        for first in 0..from.len().max(1) {
            sources.current = first;
            let found = fetch(file, &damage, &mut sources, on_progress).await;
            let (entries, placements) = match (found, refused.take()) {
                (Ok(found), _) => found,
                // The entries of an earlier replica did not fit, which is the better reason.
                (Err(_), Some(refused)) => return Err(does_not_fit(refused, &sources)),
                (Err(why), None) => return Err(InPlaceOutcome::Later(why)),
            };
            let (bytes, count) = (damage.bytes(), entries.len());
            // An earlier attempt may have repaired the file, but had no space to make it durable.
            let is_clean = damage.is_clean();
            let repair = move || {
                let repaired = damage.repair(&entries, &placements);
                (repaired, damage)
            };
            let repaired = self.reads.wait(repair).await;
            let (repaired, tried) =
                repaired.map_err(|error| InPlaceOutcome::Later(error.to_string()))?;
            match repaired {
                Ok(()) if is_clean => return Ok(()),
                Ok(()) => {
                    let entries = count;
                    tracing::info!(shard_id, file, entries, bytes, "repaired a segment in place");
                    return Ok(());
                }
                Err(error @ Error::Damaged { .. }) if count > 0 => {
                    refused = Some(error.to_string());
                }
                Err(error @ Error::Damaged { .. }) => {
                    return Err(InPlaceOutcome::Unrepairable(error.to_string()));
                }
                Err(error) => return Err(later(error)),
            }
            damage = tried;
        }
        Err(does_not_fit(refused.unwrap_or_default(), &sources))
    }
}

/// Fetches everything that a repair needs, from the current source if it has it.
async fn fetch(
    file: &str,
    damage: &SegmentDamage,
    sources: &mut EntrySources<'_>,
    on_progress: &(dyn Fn(String) + Sync),
) -> Result<(BTreeMap<u64, Entry>, BTreeMap<u64, Placement>), String> {
    let total = damage.missing().len() + damage.unplaced().len();
    let mut entries = BTreeMap::new();
    for run in runs(damage.missing()) {
        sources.fetch(run, &mut entries).await?;
        let done = entries.len();
        on_progress(format!("fetched {done} of {total} damaged entries of {file}"));
    }
    let mut placements = BTreeMap::new();
    for run in runs(damage.unplaced()) {
        sources.fetch_placements(run, &mut placements).await?;
    }
    Ok((entries, placements))
}

/// Returns the outcome if no replica that responded has the bytes that were damaged here.
fn does_not_fit(why: String, sources: &EntrySources<'_>) -> InPlaceOutcome {
    if sources.has_failed { InPlaceOutcome::Later(why) } else { InPlaceOutcome::Unrepairable(why) }
}

/// Returns the outcome of a failure that may not occur again.
fn later(error: Error) -> InPlaceOutcome {
    match error.is_shortage() {
        true => InPlaceOutcome::Shortage(error),
        false => InPlaceOutcome::Later(error.to_string()),
    }
}

/// Splits ids in log order into runs of consecutive indexes.
fn runs(ids: &[LogId]) -> impl Iterator<Item = &[LogId]> {
    ids.chunk_by(|a, b| a.index + 1 == b.index)
}

impl EntrySources<'_> {
    /// Fetches entries with consecutive indexes. Asks the next replica if one refuses, lacks
    /// entries or is damaged there as well.
    async fn fetch(
        &mut self,
        run: &[LogId],
        found: &mut BTreeMap<u64, Entry>,
    ) -> Result<(), String> {
        let mut refusals = Vec::new();
        let mut rest = run;
        while let (Some(first), Some(last)) = (rest.first(), rest.last()) {
            let theirs = self.theirs(first.index, &refusals)?;
            let range = first.index..=last.index;
            let mut refused = format!("node {} does not have it", node_of(theirs));
            let fetching = self.hub.fetch_entries(self.shard_id, self.own, theirs, range);
            match fetching.await {
                Ok(entries) => {
                    for entry in entries {
                        // Compaction by key may have left other bytes under this id there. The
                        // repair checks the bytes against the checksum of the group.
                        if run.contains(&entry.id) {
                            found.insert(entry.id.index, entry);
                        }
                    }
                }
                Err(why) => (refused, self.has_failed) = (why, true),
            }
            rest = self.rest_of(rest, found, refused, &mut refusals);
        }
        Ok(())
    }

    async fn fetch_placements(
        &mut self,
        run: &[LogId],
        found: &mut BTreeMap<u64, Placement>,
    ) -> Result<(), String> {
        let mut refusals = Vec::new();
        let mut rest = run;
        while let (Some(first), Some(last)) = (rest.first(), rest.last()) {
            let theirs = self.theirs(first.index, &refusals)?;
            let (after, upto) = (first.index.saturating_sub(1), last.index);
            let mut refused = format!("node {} does not have it", node_of(theirs));
            let fetching = self.hub.fetch_placements(self.shard_id, self.own, theirs, after, upto);
            match fetching.await {
                Ok(placements) => found.extend(placements),
                Err(why) => (refused, self.has_failed) = (why, true),
            }
            rest = self.rest_of(rest, found, refused, &mut refusals);
        }
        Ok(())
    }

    /// Returns the entries still to fetch. Moves on to the next replica if this one sent none.
    fn rest_of<'a, T>(
        &mut self,
        run: &'a [LogId],
        found: &BTreeMap<u64, T>,
        refused: String,
        refusals: &mut Vec<String>,
    ) -> &'a [LogId] {
        let fetched = run.iter().take_while(|id| found.contains_key(&id.index)).count();
        if fetched == 0 {
            self.next();
            refusals.push(refused);
        } else {
            refusals.clear();
        }
        run.get(fetched..).unwrap_or_default()
    }

    /// Returns the replica to ask, or the reasons of all once each has refused.
    fn theirs(&self, index: u64, refusals: &[String]) -> Result<ReplicaId, String> {
        let theirs = self.from.get(self.current).filter(|_| refusals.len() < self.from.len());
        theirs.copied().ok_or_else(|| {
            format!(
                "no replica sends entry {index}, which is damaged here: {}",
                refusals.join("; ")
            )
        })
    }

    fn next(&mut self) {
        self.current = (self.current + 1) % self.from.len().max(1);
    }
}
