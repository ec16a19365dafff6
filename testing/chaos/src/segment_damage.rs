//! Damages the log files of a node: flips bits, deletes segments, or restores older copies of
//! segments.
//!
//! A replica must detect and repair all of this damage. docs/wal-format.md lists three cases that
//! it cannot detect, so they are not injected: damage to the last group before its sync marker is
//! written, which looks like a torn write; loss of the newest segment, unless the previous one is
//! sealed; and an older copy of the newest segment, which looks like a shorter log.

use std::io::SeekFrom;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use tokio::fs::File;
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

/// Damage to one node's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SegmentFileDamage {
    /// Flips bits in written data.
    FlippedBits,
    /// Deletes a segment.
    LostSegment,
}

/// Bits flipped at once.
const FLIPS: usize = 24;

const BLOCK: usize = 4096;
const GROUP_MAGIC: &[u8] = b"HLXG";
const TRAILER_MAGIC: &[u8] = b"HLXTRAIL";

/// File of a log.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct LogFile {
    dir: PathBuf,
    kind: LogFileKind,
}

/// Kind of a log file, from its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum LogFileKind {
    Segment(u64),
    Cold(u64),
    Ready(u64),
    State,
}

impl LogFileKind {
    fn of(name: &str) -> Option<Self> {
        let id = |hex: &str| (hex.len() == 16).then(|| u64::from_str_radix(hex, 16).ok())?;
        match name.split_once('.') {
            Some((hex, "seg")) => id(hex).map(Self::Segment),
            Some((hex, "cold")) => id(hex).map(Self::Cold),
            None if name == "state" => Some(Self::State),
            _ => Some(Self::Ready(name.strip_prefix("ready-")?.parse().ok()?)),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Segment(id) => format!("{id:016x}.seg"),
            Self::Cold(id) => format!("{id:016x}.cold"),
            Self::Ready(number) => format!("ready-{number}"),
            Self::State => "state".to_owned(),
        }
    }
}

impl LogFile {
    fn path(&self) -> PathBuf {
        self.dir.join(self.kind.name())
    }

    /// Returns the name with its shard, for messages.
    fn shown(&self) -> String {
        let shard = self.dir.file_name().unwrap_or_default().to_string_lossy();
        format!("{shard}/{}", self.kind.name())
    }
}

/// Lists the log files of a node; those of each log are sorted by age.
async fn list(data: &Path) -> anyhow::Result<Vec<LogFile>> {
    let mut found = Vec::new();
    let mut dirs = tokio::fs::read_dir(data).await?;
    while let Some(dir) = dirs.next_entry().await? {
        if !dir.file_name().to_string_lossy().starts_with("shard-") {
            continue;
        }
        let mut files = tokio::fs::read_dir(dir.path()).await?;
        while let Some(file) = files.next_entry().await? {
            if let Some(kind) = LogFileKind::of(&file.file_name().to_string_lossy()) {
                found.push(LogFile { dir: dir.path(), kind });
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns the segments of each log except the newest one.
fn older_segments(files: &[LogFile]) -> Vec<LogFile> {
    let is_segment = |file: &&LogFile| matches!(file.kind, LogFileKind::Segment(_));
    let segments: Vec<_> = files.iter().filter(is_segment).collect();
    let pairs = segments.windows(2).filter(|pair| pair[0].dir == pair[1].dir);
    pairs.map(|pair| pair[0].clone()).collect()
}

/// Damages files of a node and describes the damage.
pub(crate) async fn damage(
    data: &Path,
    what: SegmentFileDamage,
    rng: &mut StdRng,
) -> anyhow::Result<String> {
    let files = list(data).await?;
    match what {
        SegmentFileDamage::LostSegment => lose(&files, rng).await,
        SegmentFileDamage::FlippedBits => {
            let files: Vec<_> = files
                .into_iter()
                .filter(|file| !matches!(file.kind, LogFileKind::Ready(_)))
                .collect();
            let mut flipped = Vec::new();
            for _ in 0..FLIPS {
                let file = files.choose(rng).context("the node has no logs")?;
                // The file may have been deleted since, or be empty.
                if let Ok(Some(at)) = flip(file, rng).await {
                    flipped.push(format!("{} at {at}", file.shown()));
                }
            }
            ensure!(!flipped.is_empty(), "nothing to damage was found");
            Ok(format!("flipped {} bits: {}", flipped.len(), flipped.join(", ")))
        }
    }
}

/// Flips a bit in the payload of an entry of a sealed segment; `age` counts from the oldest one.
pub(crate) async fn flip_sealed(
    data: &Path,
    shard: u32,
    age: usize,
    rng: &mut StdRng,
) -> anyhow::Result<String> {
    let dir = data.join(format!("shard-{shard}"));
    let mut sealed = Vec::new();
    for file in list(data).await?.into_iter().filter(|file| file.dir == dir) {
        if is_sealed(Some(&file)).await {
            sealed.push(file);
        }
        if sealed.len() > age {
            break;
        }
    }
    let file = sealed.get(age).context("there are too few sealed segments")?;
    let bytes = tokio::fs::read(file.path()).await?;
    for _ in 0..1000 {
        let at = rng.random_range(BLOCK..bytes.len());
        // Payloads of the fill are runs of one byte.
        let run = bytes.get(at..at + 1000).unwrap_or_default();
        if let Some(byte) =
            run.first().filter(|byte| **byte != 0 && run.iter().all(|it| it == *byte))
        {
            write_byte(file, at, byte ^ 1 << rng.random_range(0..8_u8)).await?;
            return Ok(format!("{} at {at}", file.shown()));
        }
    }
    anyhow::bail!("{} has no payload", file.shown())
}

/// Deletes a segment whose loss can be detected.
async fn lose(files: &[LogFile], rng: &mut StdRng) -> anyhow::Result<String> {
    let mut may_go = older_segments(files);
    for file in files.iter().filter(|file| !may_go.contains(file)).cloned().collect::<Vec<_>>() {
        let will_be_missed = match file.kind {
            LogFileKind::Cold(_) => true,
            LogFileKind::Segment(id) => {
                let before = files.iter().rev().find(|it| {
                    it.dir == file.dir && matches!(it.kind, LogFileKind::Segment(it) if it < id)
                });
                is_sealed(before).await
            }
            LogFileKind::Ready(_) | LogFileKind::State => false,
        };
        if will_be_missed {
            may_go.push(file);
        }
    }
    let Some(file) = may_go.choose(rng) else {
        return Ok("nothing deleted: no segment whose loss can be detected".to_owned());
    };
    tokio::fs::remove_file(file.path()).await.context("delete a segment")?;
    Ok(format!("deleted {}", file.shown()))
}

/// Reports whether the segment exists and has its footer.
async fn is_sealed(file: Option<&LogFile>) -> bool {
    match file {
        Some(file @ LogFile { kind: LogFileKind::Segment(id), .. }) => {
            tokio::fs::read(file.path()).await.is_ok_and(|bytes| has_trailer(&bytes, *id))
        }
        _ => false,
    }
}

fn has_trailer(bytes: &[u8], id: u64) -> bool {
    let trailer = bytes.len().checked_sub(BLOCK).and_then(|at| bytes.get(at..));
    // A recycled file may have the trailer of an earlier segment.
    trailer.is_some_and(|it| it.starts_with(TRAILER_MAGIC) && u64_at(it, 16) == Some(id))
}

/// Flips a bit in a byte that is not zero, if one is found soon.
async fn flip(file: &LogFile, rng: &mut StdRng) -> anyhow::Result<Option<usize>> {
    let bytes = tokio::fs::read(file.path()).await?;
    let end = match file.kind {
        LogFileKind::Segment(id) if !has_trailer(&bytes, id) => last_group(&bytes, id),
        _ => bytes.len(),
    };
    ensure!(end > 0, "the file is empty");
    for _ in 0..1000 {
        let at = rng.random_range(0..end);
        let Some(byte) = bytes.get(at).filter(|byte| **byte != 0) else { continue };
        write_byte(file, at, byte ^ 1 << rng.random_range(0..8_u8)).await?;
        return Ok(Some(at));
    }
    Ok(None)
}

async fn write_byte(file: &LogFile, at: usize, byte: u8) -> anyhow::Result<()> {
    let mut written = File::options().write(true).open(file.path()).await?;
    written.seek(SeekFrom::Start(at as u64)).await?;
    written.write_u8(byte).await?;
    Ok(written.sync_data().await?)
}

/// Returns the start of the last group with frames in an active segment; sync markers have none.
fn last_group(bytes: &[u8], id: u64) -> usize {
    let (mut at, mut last) = (BLOCK, BLOCK);
    while let Some(group) = bytes.get(at..at + 128).filter(|it| it.starts_with(GROUP_MAGIC)) {
        let is_own = u64_at(group, 16) == Some(id) && u64_at(group, 24) == Some(at as u64);
        let (Some(length), Some(frames)) = (u32_at(group, 12), u32_at(group, 32)) else { break };
        if !is_own || length == 0 {
            break;
        }
        if frames > 0 {
            last = at;
        }
        at += (length as usize).next_multiple_of(BLOCK);
    }
    last
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Earlier copies of segments of all nodes.
#[derive(Debug)]
pub(crate) struct SegmentBackup {
    dir: PathBuf,
    copies: Vec<SegmentCopy>,
}

#[derive(Debug, Clone)]
struct SegmentCopy {
    /// The original file, and the path of the copy.
    of: LogFile,
    path: PathBuf,
}

/// Target of a restored copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RestoreTarget {
    /// The same segment, which has been written to since.
    Itself,
    /// No file: the segment has been freed since.
    Freed,
    /// Another segment, as if its file had been recycled and reverted.
    Another,
    /// A preallocated file that will become a segment.
    Ready,
}

impl SegmentBackup {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, copies: Vec::new() }
    }

    /// Replaces all copies with copies of the active segment of each log.
    pub(crate) async fn refresh(&mut self, nodes: &[PathBuf]) -> anyhow::Result<()> {
        tokio::fs::create_dir_all(&self.dir).await.context("create a directory for copies")?;
        for copied in std::mem::take(&mut self.copies) {
            tokio::fs::remove_file(&copied.path).await.context("remove an old copy")?;
        }
        for data in nodes {
            let files = list(data).await?;
            let older = older_segments(&files);
            let newest = files.into_iter().filter(|file| {
                matches!(file.kind, LogFileKind::Segment(_)) && !older.contains(file)
            });
            for of in newest {
                let path = self.dir.join(self.copies.len().to_string());
                // A segment that was just freed can be skipped.
                if tokio::fs::copy(of.path(), &path).await.is_ok() {
                    self.copies.push(SegmentCopy { of, path });
                }
            }
        }
        Ok(())
    }

    /// Restores one of the copies of a node that is down, and describes it.
    ///
    /// Returns `None` if there is no suitable target.
    pub(crate) async fn restore(
        &self,
        data: &Path,
        rng: &mut StdRng,
    ) -> anyhow::Result<Option<String>> {
        let files = list(data).await?;
        let older = older_segments(&files);
        let mut ways = Vec::new();
        for copied in self.copies.iter().filter(|it| it.of.dir.starts_with(data)) {
            let of = &copied.of;
            let in_dir = |it: &&LogFile| it.dir == of.dir;
            if older.contains(of) {
                ways.push((RestoreTarget::Itself, copied, of.clone()));
            }
            // The copy must not become the newest segment.
            let follows =
                |it: &LogFile| matches!(it.kind, LogFileKind::Segment(_)) && it.kind > of.kind;
            let is_older = files.iter().filter(in_dir).any(follows);
            if is_older && !files.contains(of) {
                ways.push((RestoreTarget::Freed, copied, of.clone()));
            }
            let others = older.iter().filter(in_dir).filter(|it| *it != of);
            ways.extend(others.map(|other| (RestoreTarget::Another, copied, other.clone())));
            let ready = files.iter().filter(in_dir);
            let ready = ready.filter(|it| matches!(it.kind, LogFileKind::Ready(_)));
            ways.extend(ready.map(|ready| (RestoreTarget::Ready, copied, ready.clone())));
        }
        // Each kind of target is equally likely, regardless of their number.
        let mut all_partitions = [
            RestoreTarget::Itself,
            RestoreTarget::Freed,
            RestoreTarget::Another,
            RestoreTarget::Ready,
        ];
        all_partitions.shuffle(rng);
        let at = |target| ways.iter().filter(|it| it.0 == target).collect::<Vec<_>>();
        let Some(at) = all_partitions.into_iter().map(at).find(|ways| !ways.is_empty()) else {
            return Ok(None);
        };
        let Some((target, copied, file)) = at.choose(rng) else { return Ok(None) };
        // Writes a new file and renames it over the target, as a restore does.
        let fresh = file.dir.join("restored.tmp");
        tokio::fs::copy(&copied.path, &fresh).await.context("restore a copy")?;
        File::open(&fresh).await?.sync_all().await?;
        tokio::fs::rename(&fresh, file.path()).await.context("restore a copy")?;
        let what = match target {
            RestoreTarget::Itself => "the same segment, written to since",
            RestoreTarget::Freed => "the same segment, freed since",
            RestoreTarget::Another => "another segment",
            RestoreTarget::Ready => "a preallocated file",
        };
        let (of, at) = (copied.of.shown(), file.kind.name());
        Ok(Some(format!("restored an older copy of {of} as {at}: {what}")))
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn file(shard: u64, kind: LogFileKind) -> LogFile {
        LogFile { dir: PathBuf::from(format!("data/shard-{shard}")), kind }
    }

    fn group(at: usize, id: u64, length: u32, frames: u32) -> Vec<u8> {
        let mut bytes = vec![0; (length as usize).next_multiple_of(BLOCK)];
        bytes[..4].copy_from_slice(GROUP_MAGIC);
        bytes[12..16].copy_from_slice(&length.to_le_bytes());
        bytes[16..24].copy_from_slice(&id.to_le_bytes());
        bytes[24..32].copy_from_slice(&(at as u64).to_le_bytes());
        bytes[32..36].copy_from_slice(&frames.to_le_bytes());
        bytes
    }

    #[test]
    fn names_say_what_a_file_is() {
        for kind in [
            LogFileKind::Segment(26),
            LogFileKind::Cold(3),
            LogFileKind::Ready(7),
            LogFileKind::State,
        ] {
            assert_eq!(LogFileKind::of(&kind.name()), Some(kind));
        }
        for other in ["lock", "state.tmp", "aside-1-0000000000000001.seg", "1.seg", "repair"] {
            assert_eq!(LogFileKind::of(other), None, "{other}");
        }
    }

    #[test]
    fn the_newest_segment_of_each_log_is_known() {
        let files = [
            file(1, LogFileKind::Segment(3)),
            file(1, LogFileKind::Segment(9)),
            file(1, LogFileKind::Cold(12)),
            file(2, LogFileKind::Segment(4)),
        ];
        assert_eq!(older_segments(&files), [file(1, LogFileKind::Segment(3))]);
    }

    #[test]
    fn a_log_ends_before_its_last_group_with_something_in_it() {
        let mut bytes = vec![1; BLOCK];
        bytes.extend(group(4096, 5, 5000, 2));
        bytes.extend(group(12_288, 5, 200, 1));
        bytes.extend(group(16_384, 5, 128, 0));
        // Left over from an earlier segment in the same file.
        bytes.extend(group(20_480, 4, 200, 1));
        assert_eq!(last_group(&bytes, 5), 12_288);
        assert_eq!(last_group(&bytes, 6), BLOCK);
        assert_eq!(last_group(&bytes[..4100], 5), BLOCK);
    }

    #[tokio::test]
    async fn restored_copy_never_becomes_the_newest_segment() {
        let data = tempfile::tempdir().unwrap();
        let copies = tempfile::tempdir().unwrap();
        let dir = data.path().join("shard-1");
        tokio::fs::create_dir(&dir).await.unwrap();
        let write = async |kind: LogFileKind, bytes: &'static str| {
            tokio::fs::write(dir.join(kind.name()), bytes).await.unwrap();
        };
        write(LogFileKind::Segment(1), "one").await;
        write(LogFileKind::Segment(2), "two").await;
        let mut backup = SegmentBackup::new(copies.path().to_owned());
        backup.refresh(&[data.path().to_owned()]).await.unwrap();
        write(LogFileKind::Segment(2), "two and more").await;
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..40 {
            let mut rng = StdRng::seed_from_u64(seed);
            write(LogFileKind::Segment(1), "one").await;
            let said = backup.restore(data.path(), &mut rng).await.unwrap().unwrap();
            assert!(said.ends_with("another segment"), "{said}");
        }
        write(LogFileKind::Segment(3), "three").await;
        write(LogFileKind::Ready(1), "ready").await;
        for seed in 0..40 {
            let mut rng = StdRng::seed_from_u64(seed);
            write(LogFileKind::Segment(2), "two and more").await;
            seen.insert(backup.restore(data.path(), &mut rng).await.unwrap().unwrap());
            let newest = tokio::fs::read_to_string(dir.join(LogFileKind::Segment(3).name())).await;
            assert_eq!(newest.unwrap(), "three");
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    }
}
