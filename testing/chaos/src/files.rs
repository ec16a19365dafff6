//! The files of a node's logs, as somebody has them who does them harm: bits that turn over,
//! segments that are lost, and segments that are put back as they were at an earlier time.
//!
//! All of it is damage that a replica must notice and get over by itself. Three things it cannot
//! notice, says docs/wal-format.md, and so they are not done here: its last group, not marked yet,
//! looks torn when it is damaged; a newest segment that is gone was never there, unless the one
//! before it is sealed; and a newest segment as it was earlier is a log that ends earlier.

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
pub(crate) enum Damage {
    /// Bits are flipped in what has been written, here and there.
    FlippedBits,
    /// A segment is not there any more.
    LostSegment,
}

/// Bits that are flipped at once.
const FLIPS: usize = 24;

const BLOCK: usize = 4096;
const GROUP_MAGIC: &[u8] = b"HLXG";
const TRAILER_MAGIC: &[u8] = b"HLXTRAIL";

/// A file of a log.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct LogFile {
    folder: PathBuf,
    kind: Kind,
}

/// What it is, from its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Segment(u64),
    Cold(u64),
    Ready(u64),
    State,
}

impl Kind {
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
        self.folder.join(self.kind.name())
    }

    /// With its shard, for people.
    fn shown(&self) -> String {
        let shard = self.folder.file_name().unwrap_or_default().to_string_lossy();
        format!("{shard}/{}", self.kind.name())
    }
}

/// The files of all logs of a node, those of a log by age.
async fn list(data: &Path) -> anyhow::Result<Vec<LogFile>> {
    let mut found = Vec::new();
    let mut folders = tokio::fs::read_dir(data).await?;
    while let Some(folder) = folders.next_entry().await? {
        if !folder.file_name().to_string_lossy().starts_with("shard-") {
            continue;
        }
        let mut files = tokio::fs::read_dir(folder.path()).await?;
        while let Some(file) = files.next_entry().await? {
            if let Some(kind) = Kind::of(&file.file_name().to_string_lossy()) {
                found.push(LogFile { folder: folder.path(), kind });
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The segments of each log but for the newest one.
fn followed(files: &[LogFile]) -> Vec<LogFile> {
    let is_segment = |file: &&LogFile| matches!(file.kind, Kind::Segment(_));
    let segments: Vec<_> = files.iter().filter(is_segment).collect();
    let pairs = segments.windows(2).filter(|pair| pair[0].folder == pair[1].folder);
    pairs.map(|pair| pair[0].clone()).collect()
}

/// Damages files of a node's data, and says which, and where.
pub(crate) async fn damage(data: &Path, what: Damage, rng: &mut StdRng) -> anyhow::Result<String> {
    let files = list(data).await?;
    match what {
        Damage::LostSegment => lose(&files, rng).await,
        Damage::FlippedBits => {
            let files: Vec<_> =
                files.into_iter().filter(|file| !matches!(file.kind, Kind::Ready(_))).collect();
            let mut flipped = Vec::new();
            for _ in 0..FLIPS {
                let file = files.choose(rng).context("the node has no logs")?;
                // One may have been freed since, or have nothing in it.
                if let Ok(Some(at)) = flip(file, rng).await {
                    flipped.push(format!("{} at {at}", file.shown()));
                }
            }
            ensure!(!flipped.is_empty(), "nothing to damage was found");
            Ok(format!("{} bits are flipped: {}", flipped.len(), flipped.join(", ")))
        }
    }
}

/// Deletes a segment, if it is one that will be missed.
async fn lose(files: &[LogFile], rng: &mut StdRng) -> anyhow::Result<String> {
    let mut may_go = followed(files);
    for file in files.iter().filter(|file| !may_go.contains(file)).cloned().collect::<Vec<_>>() {
        let will_be_missed = match file.kind {
            Kind::Cold(_) => true,
            Kind::Segment(id) => {
                let before = files.iter().rev().find(|it| {
                    it.folder == file.folder && matches!(it.kind, Kind::Segment(it) if it < id)
                });
                is_sealed(before).await
            }
            Kind::Ready(_) | Kind::State => false,
        };
        if will_be_missed {
            may_go.push(file);
        }
    }
    let Some(file) = may_go.choose(rng) else {
        return Ok("nothing: no log has a segment that would be missed".to_owned());
    };
    tokio::fs::remove_file(file.path()).await.context("delete a segment")?;
    Ok(format!("{} is gone", file.shown()))
}

/// Whether there is a segment and it has its footer.
async fn is_sealed(file: Option<&LogFile>) -> bool {
    match file {
        Some(file @ LogFile { kind: Kind::Segment(id), .. }) => {
            tokio::fs::read(file.path()).await.is_ok_and(|bytes| has_trailer(&bytes, *id))
        }
        _ => false,
    }
}

fn has_trailer(bytes: &[u8], id: u64) -> bool {
    let trailer = bytes.len().checked_sub(BLOCK).and_then(|at| bytes.get(at..));
    // A recycled file may have one of an earlier life.
    trailer.is_some_and(|it| it.starts_with(TRAILER_MAGIC) && u64_at(it, 16) == Some(id))
}

/// Flips a bit where there is something else than zeros, if such a place is found soon.
async fn flip(file: &LogFile, rng: &mut StdRng) -> anyhow::Result<Option<usize>> {
    let bytes = tokio::fs::read(file.path()).await?;
    let end = match file.kind {
        Kind::Segment(id) if !has_trailer(&bytes, id) => last_group(&bytes, id),
        _ => bytes.len(),
    };
    ensure!(end > 0, "an empty file");
    for _ in 0..1000 {
        let at = rng.random_range(0..end);
        let Some(byte) = bytes.get(at).filter(|byte| **byte != 0) else { continue };
        let mut written = File::options().write(true).open(file.path()).await?;
        written.seek(SeekFrom::Start(at as u64)).await?;
        written.write_u8(byte ^ 1 << rng.random_range(0..8_u8)).await?;
        written.sync_data().await?;
        return Ok(Some(at));
    }
    Ok(None)
}

/// Where the last group begins in a segment that is written to, marks not counted.
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

/// Copies of segments, as they were when they were taken, of all nodes.
#[derive(Debug)]
pub(crate) struct Shelf {
    folder: PathBuf,
    copies: Vec<Copied>,
}

#[derive(Debug, Clone)]
struct Copied {
    /// The file that it was, and where the copy is.
    of: LogFile,
    path: PathBuf,
}

/// What a copy is put in place of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The segment itself, which has been written to since.
    Itself,
    /// Nothing: the segment has been freed since.
    Freed,
    /// Another segment: what its file held in an earlier life, where it was recycled.
    Another,
    /// A file that stands ready to become a segment.
    Ready,
}

impl Shelf {
    pub(crate) fn new(folder: PathBuf) -> Self {
        Self { folder, copies: Vec::new() }
    }

    /// Takes a copy of the segment that each log is written to, in place of earlier ones.
    pub(crate) async fn refill(&mut self, nodes: &[PathBuf]) -> anyhow::Result<()> {
        tokio::fs::create_dir_all(&self.folder).await.context("a folder for copies")?;
        for copied in std::mem::take(&mut self.copies) {
            tokio::fs::remove_file(&copied.path).await.context("remove an old copy")?;
        }
        for data in nodes {
            let files = list(data).await?;
            let older = followed(&files);
            let newest = files
                .into_iter()
                .filter(|file| matches!(file.kind, Kind::Segment(_)) && !older.contains(file));
            for of in newest {
                let path = self.folder.join(self.copies.len().to_string());
                // One that was just freed is no loss.
                if tokio::fs::copy(of.path(), &path).await.is_ok() {
                    self.copies.push(Copied { of, path });
                }
            }
        }
        Ok(())
    }

    /// Puts one of the copies of a node that is down back, and says which, and where; `None` where
    /// each of its logs still ends in the segment that was copied, and nothing else is there.
    pub(crate) async fn put_back(
        &self,
        data: &Path,
        rng: &mut StdRng,
    ) -> anyhow::Result<Option<String>> {
        let files = list(data).await?;
        let older = followed(&files);
        let mut ways = Vec::new();
        for copied in self.copies.iter().filter(|it| it.of.folder.starts_with(data)) {
            let of = &copied.of;
            let in_folder = |it: &&LogFile| it.folder == of.folder;
            if older.contains(of) {
                ways.push((Place::Itself, copied, of.clone()));
            }
            // It is not to look like the newest.
            let follows = |it: &LogFile| matches!(it.kind, Kind::Segment(_)) && it.kind > of.kind;
            let is_older = files.iter().filter(in_folder).any(follows);
            if is_older && !files.contains(of) {
                ways.push((Place::Freed, copied, of.clone()));
            }
            let others = older.iter().filter(in_folder).filter(|it| *it != of);
            ways.extend(others.map(|other| (Place::Another, copied, other.clone())));
            let ready = files.iter().filter(in_folder);
            let ready = ready.filter(|it| matches!(it.kind, Kind::Ready(_)));
            ways.extend(ready.map(|ready| (Place::Ready, copied, ready.clone())));
        }
        // Each kind of place is as likely as the other, however many there are of it.
        let mut places = [Place::Itself, Place::Freed, Place::Another, Place::Ready];
        places.shuffle(rng);
        let at = |place| ways.iter().filter(|it| it.0 == place).collect::<Vec<_>>();
        let Some(at) = places.into_iter().map(at).find(|ways| !ways.is_empty()) else {
            return Ok(None);
        };
        let Some((place, copied, file)) = at.choose(rng) else { return Ok(None) };
        // As a restore does it: a file of its own, and then in the other's place.
        let fresh = file.folder.join("restored.tmp");
        tokio::fs::copy(&copied.path, &fresh).await.context("put a copy back")?;
        File::open(&fresh).await?.sync_all().await?;
        tokio::fs::rename(&fresh, file.path()).await.context("put a copy back")?;
        let what = match place {
            Place::Itself => "it has been written to since",
            Place::Freed => "it has been freed since",
            Place::Another => "that is another segment",
            Place::Ready => "that is to become a segment",
        };
        let (of, at) = (copied.of.shown(), file.kind.name());
        Ok(Some(format!("an older copy of {of} is put back as {at}: {what}")))
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn file(shard: u64, kind: Kind) -> LogFile {
        LogFile { folder: PathBuf::from(format!("data/shard-{shard}")), kind }
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
        for kind in [Kind::Segment(26), Kind::Cold(3), Kind::Ready(7), Kind::State] {
            assert_eq!(Kind::of(&kind.name()), Some(kind));
        }
        for other in ["lock", "state.tmp", "aside-1-0000000000000001.seg", "1.seg", "repair"] {
            assert_eq!(Kind::of(other), None, "{other}");
        }
    }

    #[test]
    fn the_newest_segment_of_each_log_is_known() {
        let files = [
            file(1, Kind::Segment(3)),
            file(1, Kind::Segment(9)),
            file(1, Kind::Cold(12)),
            file(2, Kind::Segment(4)),
        ];
        assert_eq!(followed(&files), [file(1, Kind::Segment(3))]);
    }

    #[test]
    fn a_log_ends_before_its_last_group_with_something_in_it() {
        let mut bytes = vec![1; BLOCK];
        bytes.extend(group(4096, 5, 5000, 2));
        bytes.extend(group(12_288, 5, 200, 1));
        bytes.extend(group(16_384, 5, 128, 0));
        // What an earlier life left behind.
        bytes.extend(group(20_480, 4, 200, 1));
        assert_eq!(last_group(&bytes, 5), 12_288);
        assert_eq!(last_group(&bytes, 6), BLOCK);
        assert_eq!(last_group(&bytes[..4100], 5), BLOCK);
    }

    #[tokio::test]
    async fn a_copy_never_comes_back_as_the_newest_segment() {
        let data = tempfile::tempdir().unwrap();
        let copies = tempfile::tempdir().unwrap();
        let folder = data.path().join("shard-1");
        tokio::fs::create_dir(&folder).await.unwrap();
        let write = async |kind: Kind, bytes: &'static str| {
            tokio::fs::write(folder.join(kind.name()), bytes).await.unwrap();
        };
        write(Kind::Segment(1), "one").await;
        write(Kind::Segment(2), "two").await;
        let mut shelf = Shelf::new(copies.path().to_owned());
        shelf.refill(&[data.path().to_owned()]).await.unwrap();
        write(Kind::Segment(2), "two and more").await;
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..40 {
            let mut rng = StdRng::seed_from_u64(seed);
            write(Kind::Segment(1), "one").await;
            let said = shelf.put_back(data.path(), &mut rng).await.unwrap().unwrap();
            assert!(said.ends_with("another segment"), "{said}");
        }
        write(Kind::Segment(3), "three").await;
        write(Kind::Ready(1), "ready").await;
        for seed in 0..40 {
            let mut rng = StdRng::seed_from_u64(seed);
            write(Kind::Segment(2), "two and more").await;
            seen.insert(shelf.put_back(data.path(), &mut rng).await.unwrap().unwrap());
            let newest = tokio::fs::read_to_string(folder.join(Kind::Segment(3).name())).await;
            assert_eq!(newest.unwrap(), "three");
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    }
}
