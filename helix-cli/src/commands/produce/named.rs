//! Runs of `helix produce --producer NAME`, which `--resume` continues.
//!
//! A file keeps the producer's identity. The service counts the records of an identity on each
//! partition, so a resumed run skips that many records of its input there. For this the partition
//! of each record must be the same in both runs: it follows from the key or the line number.

use std::collections::HashMap;
use std::path::PathBuf;

use anyhow::Context;
use helix_client::proto::log::v1::{ProducerIdentity, Record, Topic};
use helix_client::{Error, Producer, partitioner};
use serde::{Deserialize, Serialize};

use crate::exit::{CliError, Exit};
use crate::files;

/// Consecutive lines without a key that go to one partition.
const LINES_PER_TURN: u64 = 1000;

/// Maximum length of the name; the file has it too.
const NAME_BYTES_MAX: usize = 100;

/// A run of a named producer.
#[derive(Debug)]
pub(super) struct NamedRun {
    saved: SavedProducer,
    /// Records to skip, by partition, as far as they are known. None in a first run.
    appended: Option<HashMap<u32, u64>>,
}

/// The file of a named producer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedProducer {
    producer_id: u64,
    epoch: u32,
    topic: String,
    topic_id: u64,
    partition_count: u32,
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
        };
        let path = path(name)?;
        let directory = path.parent().unwrap_or(&path);
        let text = toml::to_string(&saved).context("format the producer's file")?;
        files::create_directory(directory)
            .and_then(|()| files::replace(&path, text.as_bytes()))
            .with_context(|| format!("write {}", path.display()))?;
        Ok(Self { saved, appended: None })
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
        Ok(Self { saved, appended: Some(HashMap::new()) })
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
                u32::try_from(turn % u64::from(count.max(1))).unwrap_or(0)
            }
        }
    }

    /// Returns true if an earlier run has appended the next record of a partition.
    pub(super) async fn has_appended(
        &mut self,
        producer: &Producer,
        topic: &str,
        partition: u32,
    ) -> Result<bool, Error> {
        let Some(appended) = &mut self.appended else { return Ok(false) };
        let left = match appended.get_mut(&partition) {
            Some(left) => left,
            None => {
                let count = producer.next_sequence(topic, partition).await?;
                appended.entry(partition).or_insert(count)
            }
        };
        let has_more = *left > 0;
        *left = left.saturating_sub(1);
        Ok(has_more)
    }
}

impl SavedProducer {
    fn check(&self, name: &str, topic: &Topic) -> Result<(), CliError> {
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
        let hint = format!("helix produce {} --producer {name}   starts a new run", topic.name);
        Err(CliError::new(Exit::Precondition, what).why(why).hint(hint))
    }
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
        SavedProducer { producer_id: 5, epoch: 1, topic, topic_id: 7, partition_count: 3 }
    }

    #[test]
    fn partition_follows_from_key_or_line() {
        let run = NamedRun { saved: saved(), appended: None };
        let bare = Record::default();
        let lines = [1, 1000, 1001, 2001, 3001];
        assert_eq!(lines.map(|line| run.partition(line, &bare)), [0, 0, 1, 2, 0]);
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
