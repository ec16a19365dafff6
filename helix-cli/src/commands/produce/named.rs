//! Runs of `helix produce --producer NAME`, which `--resume` continues.
//!
//! A file keeps the producer's identity. The service counts the records of an identity on each
//! partition, so a resumed run skips that many records of its input there. For this the partition
//! of each record must be the same in both runs: it follows from the key or the line number.
//! Skipped records are compared with those that were sent (`journal.rs`), before anything is
//! appended. A run that ended well has nothing to resume.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};

use anyhow::Context;
use helix_client::proto::log::v1::{ProducerIdentity, Record, Topic};
use helix_client::{Producer, partitioner};
use prost::Message;
use serde::{Deserialize, Serialize};

use super::journal::{RecordJournal, path_beside, record_hash};
use super::summary::LineTarget;

use crate::exit::{CliError, Exit};
use crate::files;

/// Consecutive lines without a key that go to one partition.
const LINES_PER_TURN: u64 = 1000;

/// Maximum length of the name; the file has it too.
const NAME_BYTES_MAX: usize = 100;

/// Bytes of records that wait for the end of the comparison. A run has fewer of them in flight.
const HELD_BYTES_MAX: usize = 128 << 20;

/// A run of a named producer.
#[derive(Debug)]
pub(super) struct NamedRun {
    name: String,
    path: PathBuf,
    saved: SavedProducer,
    /// `None` until the comparison of a resumed run has ended.
    journal: Option<RecordJournal>,
    comparison: Comparison,
}

/// Comparison of the input with what the last run has appended.
#[derive(Debug, Default)]
struct Comparison {
    /// Hashes of all appended records, by partition.
    appended: HashMap<u32, VecDeque<u32>>,
    /// Number of records of each partition that are compared.
    compared: HashMap<u32, usize>,
    /// Records of the whole input that are still to be compared.
    left: usize,
    /// Records behind the appended ones of their partition.
    held: Vec<(LineTarget, Record)>,
    held_bytes: usize,
}

/// Decision on the next record of the input.
#[derive(Debug)]
pub(super) enum NextRecord {
    /// The last run has appended it.
    Appended,
    /// It waits until all that was appended is compared.
    Held,
    /// Send these records.
    Send(Vec<(LineTarget, Record)>),
}

/// The file of a named producer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedProducer {
    producer_id: u64,
    epoch: u32,
    topic: String,
    topic_id: u64,
    partition_count: u32,
    /// Partition of the first records without a key. Runs of earlier versions began at 0.
    #[serde(default)]
    first_partition: u32,
    /// All records of its input were appended.
    #[serde(default)]
    has_ended: bool,
}

impl NamedRun {
    /// Saves the identity of a first run.
    pub(super) async fn start(
        name: &str,
        producer: &Producer,
        topic: &Topic,
    ) -> anyhow::Result<Self> {
        let identity = producer.identity().await;
        let identity = identity.with_context(|| format!("register the producer {name}"))?;
        let ProducerIdentity { producer_id, epoch } = identity.unwrap_or_default();
        let saved = SavedProducer {
            producer_id,
            epoch,
            topic: topic.name.clone(),
            topic_id: topic.topic_id,
            partition_count: partition_count(topic),
            first_partition: u32::try_from(producer_id % u64::from(partition_count(topic).max(1)))
                .unwrap_or(0),
            has_ended: false,
        };
        let path = path(name)?;
        let directory = path.parent().unwrap_or(&path);
        files::create_directory(directory)
            .with_context(|| format!("create {}", directory.display()))?;
        // The records of an earlier run are not of this identity.
        let comparison = Comparison::default();
        let journal = begin_journal(&path, &comparison.appended)?;
        saved.write(&path)?;
        Ok(Self { name: name.to_owned(), path, saved, journal: Some(journal), comparison })
    }

    /// Loads the identity of an earlier run.
    ///
    /// # Errors
    /// Fails if there is none, or if the topic is not the same as then.
    pub(super) fn load(name: &str, topic: &Topic) -> anyhow::Result<Self> {
        let path = path(name)?;
        let text = files::read_text(&path).with_context(|| format!("read {}", path.display()))?;
        let Some(text) = text else {
            let what = format!("no run of the producer {name} is known here");
            let failure = CliError::new(Exit::NotFound, what);
            let why = format!("{} does not exist", path.display());
            let hint = format!("helix produce {} --producer {name}   starts a run", topic.name);
            return Err(failure.why(why).hint(hint).into());
        };
        let saved: SavedProducer =
            toml::from_str(&text).with_context(|| format!("read {}", path.display()))?;
        saved.check(name, topic)?;
        let hashes = RecordJournal::read(&path_beside(&path));
        let hashes = hashes.with_context(|| format!("read {}", path_beside(&path).display()))?;
        let Some(appended) = hashes else {
            let what = format!("the producer {name} cannot be resumed for {}", topic.name);
            let failure = CliError::new(Exit::Precondition, what);
            let missing = path_beside(&path);
            let why = format!(
                "{} is missing, so the input cannot be compared with what was appended",
                missing.display()
            );
            return Err(failure.why(why).hint(new_run(name, topic)).into());
        };
        let comparison = Comparison { appended, ..Comparison::default() };
        Ok(Self { name: name.to_owned(), path, saved, journal: None, comparison })
    }

    /// Asks how many records the last run has appended, and begins to compare them.
    pub(super) async fn compare(&mut self, producer: &Producer, topic: &str) -> anyhow::Result<()> {
        for (partition, hashes) in &mut self.comparison.appended {
            let count = producer.next_sequence(topic, *partition).await;
            let count = count.with_context(|| format!("look up producer {}", self.name))?;
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            if count > hashes.len() {
                let what = format!("the producer {} cannot be resumed for {topic}", self.name);
                let why = format!(
                    "partition {partition} has {count} records of it, and only {} are known here",
                    hashes.len()
                );
                return Err(CliError::new(Exit::Precondition, what).why(why).into());
            }
            hashes.truncate(count);
            self.comparison.left += count;
        }
        if self.comparison.left == 0 {
            self.journal = Some(begin_journal(&self.path, &self.comparison.appended)?);
        }
        Ok(())
    }

    /// Decides on the next record of the input.
    ///
    /// # Errors
    /// Fails if the last run has appended another record in its place.
    pub(super) fn next(
        &mut self,
        target: LineTarget,
        record: Record,
    ) -> anyhow::Result<NextRecord> {
        if self.journal.is_some() {
            return self.release(vec![(target, record)]);
        }
        let comparison = &mut self.comparison;
        let at = comparison.compared.entry(target.partition).or_default();
        let appended = comparison.appended.get(&target.partition).and_then(|all| all.get(*at));
        let Some(appended) = appended else {
            comparison.held_bytes += record.encoded_len();
            comparison.held.push((target, record));
            if comparison.held_bytes > HELD_BYTES_MAX {
                return Err(self.other_input("it lacks records of the last run's input").into());
            }
            return Ok(NextRecord::Held);
        };
        if *appended != record_hash(&record) {
            let why = format!("line {} is another record than then", target.line);
            return Err(self.other_input(&why).into());
        }
        *at += 1;
        comparison.left -= 1;
        if comparison.left == 0 {
            self.journal = Some(begin_journal(&self.path, &comparison.appended)?);
        }
        Ok(NextRecord::Appended)
    }

    /// Returns the records that waited for the end of the comparison, once it has ended.
    ///
    /// # Errors
    /// At the end of the input, fails if it lacks records that were appended.
    pub(super) fn held(&mut self, is_end: bool) -> anyhow::Result<Vec<(LineTarget, Record)>> {
        if self.journal.is_none() {
            let left = self.comparison.left;
            return match is_end {
                true => {
                    let why = format!("{left} records of the last run are not in it");
                    Err(self.other_input(&why).into())
                }
                false => Ok(Vec::new()),
            };
        }
        let held = std::mem::take(&mut self.comparison.held);
        match self.release(held)? {
            NextRecord::Send(records) => Ok(records),
            NextRecord::Appended | NextRecord::Held => Ok(Vec::new()),
        }
    }

    /// Records that all of the input was appended.
    pub(super) fn finish(&mut self) -> anyhow::Result<()> {
        self.saved.has_ended = true;
        self.saved.write(&self.path)
    }

    /// Notes records before they are sent.
    fn release(&mut self, records: Vec<(LineTarget, Record)>) -> anyhow::Result<NextRecord> {
        if let Some(journal) = &mut self.journal {
            for (target, record) in &records {
                let added = journal.add(target.partition, record);
                added.with_context(|| format!("write {}", path_beside(&self.path).display()))?;
            }
        }
        Ok(NextRecord::Send(records))
    }

    fn other_input(&self, why: &str) -> CliError {
        let what = format!("the input is not that of the last run of the producer {}", self.name);
        let hint = format!(
            "helix produce {} --producer {}   starts a new run; nothing was appended now",
            self.saved.topic, self.name
        );
        CliError::new(Exit::Precondition, what).why(why).hint(hint)
    }

    pub(super) fn identity(&self) -> ProducerIdentity {
        let SavedProducer { producer_id, epoch, .. } = self.saved;
        ProducerIdentity { producer_id, epoch }
    }

    /// Returns the partition of a record, which is the same in every run with this input.
    pub(super) fn partition(&self, line: u64, record: &Record) -> u32 {
        let count = self.saved.partition_count;
        match &record.key {
            Some(key) => partitioner::of_key(key, count),
            None => {
                let turn = line.saturating_sub(1) / LINES_PER_TURN;
                let turn = turn.wrapping_add(self.saved.first_partition.into());
                u32::try_from(turn % u64::from(count.max(1))).unwrap_or(0)
            }
        }
    }
}

impl SavedProducer {
    fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = toml::to_string(self).context("format the producer's file")?;
        files::replace(path, text.as_bytes()).with_context(|| format!("write {}", path.display()))
    }

    fn check(&self, name: &str, topic: &Topic) -> Result<(), CliError> {
        if self.has_ended {
            let what = format!("the producer {name} has nothing to resume");
            let why = "its last run has appended all of its input";
            return Err(CliError::new(Exit::Precondition, what)
                .why(why)
                .hint(new_run(name, topic)));
        }
        let why = if self.topic != topic.name {
            format!("its last run was for the topic {}", self.topic)
        } else if self.topic_id != topic.topic_id {
            "the topic was deleted and created again since its last run".to_owned()
        } else if self.partition_count != partition_count(topic) {
            let (before, now) = (self.partition_count, partition_count(topic));
            format!("the topic had {before} partitions then, and has {now} now")
        } else {
            return Ok(());
        };
        let what = format!("the producer {name} cannot be resumed for {}", topic.name);
        Err(CliError::new(Exit::Precondition, what).why(why).hint(new_run(name, topic)))
    }
}

fn begin_journal(
    path: &Path,
    hashes: &HashMap<u32, VecDeque<u32>>,
) -> anyhow::Result<RecordJournal> {
    let path = path_beside(path);
    RecordJournal::begin(&path, hashes).with_context(|| format!("write {}", path.display()))
}

fn new_run(name: &str, topic: &Topic) -> String {
    format!("helix produce {} --producer {name}   starts a new run", topic.name)
}

fn partition_count(topic: &Topic) -> u32 {
    u32::try_from(topic.partitions.len()).unwrap_or(u32::MAX)
}

/// Returns the file of a named producer.
fn path(name: &str) -> anyhow::Result<PathBuf> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_name = !name.starts_with('.') && name.chars().all(is_allowed);
    if !is_name || name.is_empty() || name.len() > NAME_BYTES_MAX {
        let failure = CliError::new(Exit::Usage, format!("invalid producer name {name:?}"));
        let why = "use up to 100 letters, digits, '.', '_' and '-', not '.' first";
        return Err(failure.why(why).into());
    }
    let directory = files::state_directory().ok_or_else(|| {
        let failure = CliError::new(Exit::Error, "no directory for the producer's file");
        failure.why("neither XDG_STATE_HOME nor HOME is set").hint("export HOME=DIRECTORY")
    })?;
    Ok(directory.join("producers").join(format!("{name}.toml")))
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::PartitionInfo;

    use super::*;

    fn topic(partitions: usize) -> Topic {
        Topic {
            name: "orders".to_owned(),
            topic_id: 7,
            partitions: vec![PartitionInfo::default(); partitions],
            ..Topic::default()
        }
    }

    fn saved() -> SavedProducer {
        let topic = "orders".to_owned();
        let (partition_count, first_partition) = (3, 0);
        SavedProducer {
            producer_id: 5,
            epoch: 1,
            topic,
            topic_id: 7,
            partition_count,
            first_partition,
            has_ended: false,
        }
    }

    fn run_of(saved: SavedProducer) -> NamedRun {
        let (journal, comparison) = Default::default();
        NamedRun { name: "p".to_owned(), path: PathBuf::new(), saved, journal, comparison }
    }

    #[test]
    fn input_is_compared_before_anything_is_sent() {
        let directory = tempfile::tempdir().unwrap();
        let record =
            |value: &'static str| Record { value: Some(value.into()), ..Record::default() };
        let target = |line, partition| LineTarget { line, partition };
        let begin = || {
            let appended: HashMap<u32, VecDeque<u32>> = [
                (0, [record_hash(&record("a"))].into()),
                (1, [record_hash(&record("b")), record_hash(&record("c"))].into()),
            ]
            .into();
            let comparison = Comparison { appended, left: 3, ..Comparison::default() };
            let path = directory.path().join("p.toml");
            NamedRun { path, comparison, ..run_of(saved()) }
        };
        let mut run = begin();
        assert!(matches!(run.next(target(1, 0), record("a")).unwrap(), NextRecord::Appended));
        assert!(matches!(run.next(target(2, 0), record("x")).unwrap(), NextRecord::Held));
        assert!(matches!(run.next(target(3, 1), record("b")).unwrap(), NextRecord::Appended));
        assert!(run.held(false).unwrap().is_empty());
        let missing = run.held(true).unwrap_err().to_string();
        assert!(missing.contains("not that of the last run"), "{missing}");
        assert!(matches!(run.next(target(4, 1), record("c")).unwrap(), NextRecord::Appended));
        let held = run.held(false).unwrap();
        assert_eq!(held.iter().map(|(target, _)| target.line).collect::<Vec<_>>(), [2]);
        let next = run.next(target(5, 1), record("y")).unwrap();
        assert!(matches!(next, NextRecord::Send(records) if records.len() == 1));
        // Another input fails at its first other record.
        let mut run = begin();
        assert!(run.next(target(1, 0), record("d")).is_err());
    }

    #[test]
    fn a_run_that_ended_has_nothing_to_resume() {
        let ended = SavedProducer { has_ended: true, ..saved() };
        let refused = ended.check("p", &topic(3)).unwrap_err();
        assert!(refused.to_string().contains("nothing to resume"), "{refused}");
    }

    #[test]
    fn partition_follows_from_key_or_line() {
        let run = run_of(saved());
        let bare = Record::default();
        let lines = [1, 1000, 1001, 2001, 3001];
        assert_eq!(lines.map(|line| run.partition(line, &bare)), [0, 0, 1, 2, 0]);
        let saved = SavedProducer { first_partition: 2, ..saved() };
        let later = run_of(saved);
        assert_eq!(lines.map(|line| later.partition(line, &bare)), [2, 2, 0, 1, 2]);
        let keyed = Record { key: Some("customer-7".into()), ..Record::default() };
        assert_eq!(run.partition(1, &keyed), run.partition(5000, &keyed));
    }

    #[test]
    fn resumes_only_for_the_same_topic() {
        assert!(saved().check("p", &topic(3)).is_ok());
        let other = |change: fn(&mut Topic)| {
            let mut topic = topic(3);
            change(&mut topic);
            saved().check("p", &topic).unwrap_err().why
        };
        assert!(other(|it| it.name = "sales".to_owned()).contains("orders"));
        assert!(other(|it| it.topic_id = 8).contains("created again"));
        assert!(other(|it| it.partitions.clear()).contains("had 3 partitions"));
    }

    #[test]
    fn producer_file_round_trips() {
        let text = toml::to_string(&saved()).unwrap();
        assert_eq!(toml::from_str::<SavedProducer>(&text).unwrap(), saved());
    }

    #[test]
    fn rejects_names_that_are_paths() {
        for name in ["", "a/b", "..", ".a", "a b"] {
            assert!(path(name).is_err(), "{name:?}");
        }
    }
}
