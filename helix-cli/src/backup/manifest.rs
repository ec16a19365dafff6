//! What a backup holds: its manifest, a JSON file that is replaced as a whole and checks itself.
//! A file that is not in it, and what is behind the end that it names, is no part of the backup.

use std::path::{Path, PathBuf};

use anyhow::Context;
use helix_client::proto::log::v1 as proto;
use serde::{Deserialize, Serialize};

use super::batches::{Damage, Extent};
use crate::commands::produce::durability_name;
use crate::exit::{Exit, Failure};
use crate::{files, units};

/// Version of the layout of manifest and files.
const FORMAT: u32 = 1;

const NAME: &str = "manifest.json";

/// What is in the file: the manifest, and the checksum of its compact form.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    crc32: u32,
    manifest: Manifest,
}

/// A backup of some topics of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: u32,
    /// Of the program that wrote it.
    version: String,
    pub(crate) cluster_id: String,
    /// When the run that wrote it began: what was acknowledged before that is in it.
    pub(crate) begun_at: String,
    /// False: the first run has not come to its end yet.
    pub(crate) is_complete: bool,
    pub(crate) topics: Vec<Topic>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Topic {
    pub(crate) name: String,
    pub(crate) replication_factor: u32,
    pub(crate) config: Config,
    /// Of every partition, in order.
    pub(crate) partitions: Vec<Partition>,
}

/// Settings as people write them. None: unlimited, or the cluster's default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    retention_time: Option<String>,
    retention_bytes: Option<u64>,
    max_batch_bytes: Option<u32>,
    max_record_bytes: Option<u32>,
    min_durability: String,
    default_durability: String,
}

/// What is there of a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Partition {
    /// First offset that belongs to it; the first batch may begin before.
    pub(crate) log_start_offset: u64,
    /// One past the last.
    pub(crate) next_offset: u64,
    pub(crate) record_count: u64,
    pub(crate) batch_count: u64,
    /// Payload of the largest batch.
    pub(crate) batch_bytes_max: u32,
    pub(crate) file_bytes: u64,
    /// Of the first `file_bytes` bytes of its file.
    pub(crate) crc32: u32,
}

impl Manifest {
    pub(crate) fn new(cluster_id: &str, begun_at: String) -> Self {
        Self {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            cluster_id: cluster_id.to_owned(),
            begun_at,
            is_complete: false,
            topics: Vec::new(),
        }
    }

    /// The manifest of the backup in a folder. None: there is none.
    ///
    /// # Errors
    /// It is damaged, or of a later version.
    pub(crate) fn load(folder: &Path) -> anyhow::Result<Option<Self>> {
        let path = folder.join(NAME);
        let bytes = files::read(&path).with_context(|| format!("read {}", path.display()))?;
        bytes.map(|bytes| Self::unseal(&path, &bytes)).transpose()
    }

    fn unseal(path: &Path, bytes: &[u8]) -> anyhow::Result<Self> {
        let damaged = |what: String| {
            let all = 0..bytes.len() as u64;
            let damage = Damage { file: path.to_owned(), bytes: all, what };
            let failure = Failure::new(Exit::VerificationFailed, damage.to_string());
            failure.hint("a copy of the file, or another backup")
        };
        let sealed: Sealed =
            serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        // A change that leaves the meaning as it was is still one that nobody has made.
        if seal(&sealed.manifest)? != bytes {
            return Err(damaged("its checksum does not fit".to_owned()).into());
        }
        if sealed.manifest.format != FORMAT {
            let format = sealed.manifest.format;
            let failure = Failure::new(Exit::Error, format!("the backup has format {format}"));
            return Err(failure.why(format!("this program knows format {FORMAT}")).into());
        }
        Ok(sealed.manifest)
    }

    pub(crate) fn save(&self, folder: &Path) -> anyhow::Result<()> {
        let path = folder.join(NAME);
        files::replace(&path, &seal(self)?).with_context(|| format!("write {}", path.display()))
    }

    pub(crate) fn topic(&self, name: &str) -> Option<&Topic> {
        self.topics.iter().find(|topic| topic.name == name)
    }

    /// Puts a topic in its place, by name.
    pub(crate) fn put(&mut self, topic: Topic) {
        match self.topics.binary_search_by(|known| known.name.cmp(&topic.name)) {
            Ok(place) => self.topics[place] = topic,
            Err(place) => self.topics.insert(place, topic),
        }
    }
}

fn seal(manifest: &Manifest) -> anyhow::Result<Vec<u8>> {
    let crc32 = crc32fast::hash(&serde_json::to_vec(manifest)?);
    let mut bytes = serde_json::to_vec_pretty(&Sealed { crc32, manifest: manifest.clone() })?;
    bytes.push(b'\n');
    Ok(bytes)
}

impl Partition {
    pub(crate) fn extent(&self) -> Extent {
        Extent { file_bytes: self.file_bytes, crc32: self.crc32 }
    }
}

/// The file of a partition. Names of topics are names of files, but for `.` and `..`, which the
/// prefix takes care of.
pub(crate) fn file(folder: &Path, topic: &str, partition: usize) -> PathBuf {
    topic_folder(folder, topic).join(format!("partition-{partition}"))
}

pub(crate) fn topic_folder(folder: &Path, topic: &str) -> PathBuf {
    folder.join(format!("topic-{topic}"))
}

impl From<&proto::TopicConfig> for Config {
    fn from(config: &proto::TopicConfig) -> Self {
        // Every field by name: a setting that a later version adds must not be left behind.
        let proto::TopicConfig {
            retention_time,
            retention_bytes,
            max_batch_bytes,
            max_record_bytes,
            min_durability: _,
            default_durability: _,
        } = *config;
        let time = retention_time.and_then(|time| time.try_into().ok());
        Self {
            retention_time: time.map(units::duration),
            retention_bytes,
            max_batch_bytes,
            max_record_bytes,
            min_durability: durability_name(config.min_durability()).to_owned(),
            default_durability: durability_name(config.default_durability()).to_owned(),
        }
    }
}

impl Config {
    /// # Errors
    /// A value is none of those that this program writes.
    pub(crate) fn to_wire(&self) -> anyhow::Result<proto::TopicConfig> {
        let time = self.retention_time.as_deref().map(units::parse_duration).transpose();
        let time = time.map_err(anyhow::Error::msg)?;
        let durability = |name: &str| {
            let found = proto::Durability::from_str_name(&format!("DURABILITY_{name}"));
            found.map(i32::from).with_context(|| format!("{name} is no durability"))
        };
        Ok(proto::TopicConfig {
            retention_time: time.map(prost_types::Duration::try_from).transpose()?,
            retention_bytes: self.retention_bytes,
            max_batch_bytes: self.max_batch_bytes,
            max_record_bytes: self.max_record_bytes,
            min_durability: durability(&self.min_durability)?,
            default_durability: durability(&self.default_durability)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let config = proto::TopicConfig {
            retention_time: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
            max_batch_bytes: Some(4 << 20),
            min_durability: proto::Durability::None.into(),
            default_durability: proto::Durability::QuorumSynced.into(),
            ..proto::TopicConfig::default()
        };
        let mut manifest = Manifest::new("c", "2026-01-31T10:00:00Z".to_owned());
        for name in ["orders", "a", "z"] {
            manifest.put(Topic {
                name: name.to_owned(),
                replication_factor: 3,
                config: Config::from(&config),
                partitions: vec![Partition { next_offset: 7, ..Partition::default() }; 2],
            });
        }
        manifest
    }

    #[test]
    fn topics_are_kept_by_name_and_settings_come_back() {
        let mut manifest = manifest();
        let names: Vec<_> = manifest.topics.iter().map(|topic| topic.name.as_str()).collect();
        assert_eq!(names, ["a", "orders", "z"]);
        let config = manifest.topic("orders").unwrap().config.to_wire().unwrap();
        assert_eq!(config.retention_time.unwrap().seconds, 90);
        assert_eq!((config.retention_bytes, config.max_batch_bytes), (None, Some(4 << 20)));
        assert_eq!(config.min_durability(), proto::Durability::None);
        let orders = manifest.topic("orders").unwrap().clone();
        manifest.put(Topic { replication_factor: 1, ..orders });
        assert_eq!(manifest.topics.len(), 3);
    }

    #[test]
    fn every_damaged_byte_of_a_manifest_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert_eq!(Manifest::load(folder).unwrap(), None);
        manifest().save(folder).unwrap();
        assert_eq!(Manifest::load(folder).unwrap(), Some(manifest()));
        let path = folder.join(NAME);
        let good = files::read(&path).unwrap().unwrap();
        for place in 0..good.len() {
            let mut bad = good.clone();
            bad[place] ^= 1;
            let error = Manifest::unseal(&path, &bad).unwrap_err();
            assert_eq!(crate::exit::of(&error), Exit::VerificationFailed, "byte {place}");
        }
        assert!(Manifest::unseal(&path, &good[..good.len() - 1]).is_err());
    }

    #[test]
    fn a_manifest_of_a_later_format_is_not_guessed_at() {
        let later = Manifest { format: FORMAT + 1, ..manifest() };
        let error = Manifest::unseal(Path::new(NAME), &seal(&later).unwrap()).unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::Error);
    }
}
