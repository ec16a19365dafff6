//! The manifest of a backup: a JSON file with a checksum, replaced atomically.
//! Unlisted files, and bytes past a listed length, do not belong to the backup.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use helix_client::proto::log::v1 as proto;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::batches::{FileDamage, FilePrefix};
use crate::batch_format::{format_name, parse_format};
use crate::cleanup::{cleanup_name, parse_cleanup};
use crate::compression::{allowed_name, parse_allowed};
use crate::durability::durability_name;
use crate::exit::{CliError, Exit};
use crate::{files, units};

/// Version of the layout of the manifest and the batch files.
///
/// Format 2 has gaps, partial topics, and partitions without a file. Format 3 has partitions that
/// were copied again as a whole.
const FORMAT: u32 = 3;

/// Format of a backup in which every partition is the first copy.
const FORMAT_WITHOUT_COPIES: u32 = 2;

/// Oldest format that can be read and extended.
const FORMAT_MIN: u32 = 1;

const NAME: &str = "manifest.json";

/// The content of the file: the manifest and the checksum of its compact form.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedManifest {
    crc32: u32,
    manifest: Manifest,
}

/// A backup of some topics of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: u32,
    /// Version of the program that wrote the manifest.
    version: String,
    pub(crate) cluster_id: String,
    /// Start time of the run that wrote the manifest; records acknowledged earlier are included.
    pub(crate) begun_at: String,
    /// False until the first run has finished.
    pub(crate) is_complete: bool,
    pub(crate) topics: Vec<SavedTopic>,
}

/// A topic in the backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedTopic {
    pub(crate) name: String,
    /// Id of the topic in the cluster; 0 in backups of earlier versions.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) topic_id: u64,
    pub(crate) replication_factor: u32,
    pub(crate) config: SavedTopicConfig,
    /// True if a run ended before the whole topic was copied, and no later run has copied the rest.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) is_partial: bool,
    /// All partitions, by number.
    pub(crate) partitions: Vec<SavedPartition>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Settings of a topic, in human-readable form. None means unlimited or the cluster's default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedTopicConfig {
    retention_time: Option<String>,
    retention_bytes: Option<u64>,
    max_batch_bytes: Option<u32>,
    max_record_bytes: Option<u32>,
    min_durability: String,
    default_durability: String,
    /// Absent in backups from before compression.
    #[serde(default = "any_compression", skip_serializing_if = "is_any_compression")]
    allowed_compression: String,
    /// Absent where it is true, as in backups from before the setting.
    #[serde(default = "validated", skip_serializing_if = "is_validated")]
    validate_records: bool,
    /// Absent in backups from before compaction by key.
    #[serde(default = "delete_policy", skip_serializing_if = "is_delete_policy")]
    cleanup: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tombstone_retention_time: Option<String>,
    /// Absent where it is that of Helix, as in backups from before the setting.
    #[serde(default = "helix_format", skip_serializing_if = "is_helix_format")]
    batch_format: String,
}

fn helix_format() -> String {
    "helix".to_owned()
}

fn is_helix_format(format: &str) -> bool {
    format == "helix"
}

fn validated() -> bool {
    true
}

fn is_validated(validates: &bool) -> bool {
    *validates
}

fn delete_policy() -> String {
    "delete".to_owned()
}

fn is_delete_policy(name: &str) -> bool {
    name == "delete"
}

fn any_compression() -> String {
    "any".to_owned()
}

fn is_any_compression(name: &str) -> bool {
    name == "any"
}

/// The backed-up part of a partition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedPartition {
    /// First offset of the backup; the first batch may start below it.
    pub(crate) log_start_offset: u64,
    /// One past the last offset.
    pub(crate) next_offset: u64,
    pub(crate) record_count: u64,
    pub(crate) batch_count: u64,
    /// Payload size of the largest batch, or its size before compression if that is larger.
    pub(crate) batch_bytes_max: u32,
    /// Length of the batch file; 0 without a file.
    pub(crate) file_bytes: u64,
    /// Checksum of the first `file_bytes` bytes of the batch file.
    pub(crate) crc32: u32,
    /// Ranges that were deleted in the cluster before they were copied, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) gaps: Vec<SavedGap>,
    /// Whole copies before this one, each in a file of its own; absent for the first.
    #[serde(default, skip_serializing_if = "is_first_copy")]
    pub(crate) copy: u32,
}

/// For `skip_serializing_if`.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_first_copy(copy: &u32) -> bool {
    *copy == 0
}

/// A range of offsets without records in the backup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedGap {
    pub(crate) first_offset: u64,
    /// One past the last offset.
    pub(crate) next_offset: u64,
    pub(crate) cause: GapCause,
}

/// Cause of a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GapCause {
    /// Retention or a trim deleted the records.
    Trimmed,
    /// The topic was deleted.
    TopicDeleted,
}

impl fmt::Display for SavedGap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first_offset, next_offset, cause } = self;
        let why = match cause {
            GapCause::Trimmed => "retention or a trim deleted them before they were copied",
            GapCause::TopicDeleted => "the topic was deleted before they were copied",
        };
        write!(formatter, "offsets {first_offset}..{next_offset} are missing: {why}")
    }
}

/// For `skip_serializing_if`.
fn is_false(value: &bool) -> bool {
    !value
}

impl SavedTopicConfig {
    /// Returns whether the topic is compacted by key.
    pub(super) fn is_compacted(&self) -> bool {
        !is_delete_policy(&self.cleanup)
    }
}

impl Manifest {
    pub(crate) fn new(cluster_id: &str, begun_at: String) -> Self {
        Self {
            format: FORMAT_WITHOUT_COPIES,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            cluster_id: cluster_id.to_owned(),
            begun_at,
            is_complete: false,
            topics: Vec::new(),
        }
    }

    /// Loads the manifest of the backup in a directory; None if there is none.
    ///
    /// # Errors
    /// Fails if the manifest is damaged or has an unsupported format.
    pub(crate) fn load(directory: &Path) -> anyhow::Result<Option<Self>> {
        let path = directory.join(NAME);
        let bytes = files::read(&path).with_context(|| format!("read {}", path.display()))?;
        bytes.map(|bytes| Self::unseal(&path, &bytes)).transpose()
    }

    fn unseal(path: &Path, bytes: &[u8]) -> anyhow::Result<Self> {
        let damaged = |what: String| {
            let all = 0..bytes.len() as u64;
            let damage = FileDamage { file: path.to_owned(), bytes: all, what };
            let failure = CliError::new(Exit::VerificationFailed, damage.to_string());
            failure.hint("replace the file with a copy, or use another backup")
        };
        let sealed: SealedManifest =
            serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        // Compares bytes, so that damage which leaves the parsed value equal is found too.
        if seal(&sealed.manifest)? != bytes {
            return Err(damaged("the checksum does not match".to_owned()).into());
        }
        if !(FORMAT_MIN..=FORMAT).contains(&sealed.manifest.format) {
            let format = sealed.manifest.format;
            let failure =
                CliError::new(Exit::Error, format!("backup format {format} is not supported"));
            let failure =
                failure.why(format!("this program supports the formats {FORMAT_MIN} to {FORMAT}"));
            let hint = format!("use helix {} or later", sealed.manifest.version);
            return Err(failure.hint(hint).into());
        }
        Ok(sealed.manifest)
    }

    pub(crate) fn save(&self, directory: &Path) -> anyhow::Result<()> {
        let path = directory.join(NAME);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let manifest = Self { format: self.needed_format(), version, ..self.clone() };
        files::replace(&path, &seal(&manifest)?)
            .with_context(|| format!("write {}", path.display()))
    }

    /// Returns the oldest format that has all of the manifest, so that earlier versions of the
    /// program read what they can.
    fn needed_format(&self) -> u32 {
        let partitions = self.topics.iter().flat_map(|topic| &topic.partitions);
        let has_later_copies = partitions.into_iter().any(|it| it.copy > 0);
        if has_later_copies { FORMAT } else { FORMAT_WITHOUT_COPIES }
    }

    pub(crate) fn topic(&self, name: &str) -> Option<&SavedTopic> {
        self.topics.iter().find(|topic| topic.name == name)
    }

    /// Inserts or replaces a topic; topics are sorted by name.
    pub(crate) fn put(&mut self, topic: SavedTopic) {
        match self.topics.binary_search_by(|known| known.name.cmp(&topic.name)) {
            Ok(index) => self.topics[index] = topic,
            Err(index) => self.topics.insert(index, topic),
        }
    }
}

fn seal(manifest: &Manifest) -> anyhow::Result<Vec<u8>> {
    let crc32 = crc32fast::hash(&serde_json::to_vec(manifest)?);
    let mut bytes =
        serde_json::to_vec_pretty(&SealedManifest { crc32, manifest: manifest.clone() })?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Loads the backup in a directory.
///
/// # Errors
/// Fails if there is no backup, or if its first run was interrupted.
pub(super) fn load_complete(directory: &Path) -> anyhow::Result<Manifest> {
    let Some(manifest) = Manifest::load(directory)? else {
        let what = format!("{} contains no backup", directory.display());
        return Err(CliError::new(Exit::NotFound, what).hint("helix backup DIR").into());
    };
    if !manifest.is_complete {
        let what = format!("the backup in {} was interrupted", directory.display());
        let failure = CliError::new(Exit::Precondition, what);
        let hint = format!("helix backup {}   continues it", directory.display());
        return Err(failure.hint(hint).into());
    }
    Ok(manifest)
}

/// Returns the named topics of a backup, or all if no name is given.
///
/// # Errors
/// Fails if the backup does not contain a topic.
pub(super) fn select_topics(
    manifest: &Manifest,
    names: &[String],
) -> anyhow::Result<Vec<SavedTopic>> {
    if names.is_empty() {
        return Ok(manifest.topics.clone());
    }
    let find = |name: &String| {
        let found = manifest.topic(name).cloned();
        found.ok_or_else(|| {
            let what = format!("the backup has no topic {name:?}");
            let known: Vec<_> = manifest.topics.iter().map(|topic| topic.name.as_str()).collect();
            let why = format!("it has the topics {}", known.join(", "));
            CliError::new(Exit::NotFound, what).why(why).hint("--topic NAME   selects one of them")
        })
    };
    let found: Result<_, _> = names.iter().map(find).collect();
    found.context("select topics of the backup")
}

impl SavedPartition {
    /// Returns the valid prefix of the batch file.
    pub(crate) fn file_prefix(&self) -> FilePrefix {
        FilePrefix { file_bytes: self.file_bytes, crc32: self.crc32 }
    }

    /// Returns an empty copy of a partition from an offset on, after `copies` earlier ones.
    pub(super) fn begin(log_start_offset: u64, copies: u32) -> Self {
        let next_offset = log_start_offset;
        Self { log_start_offset, next_offset, copy: copies, ..Self::default() }
    }

    /// Returns the number of offsets in gaps.
    pub(crate) fn missing_offsets(&self) -> u64 {
        self.gaps.iter().map(|gap| gap.next_offset - gap.first_offset).sum()
    }

    /// Records that the offsets from the end of the copy up to `until` cannot be copied.
    pub(super) fn skip(&mut self, until: u64, cause: GapCause) {
        let first_offset = self.next_offset;
        if until <= first_offset {
            return;
        }
        match self.gaps.last_mut() {
            Some(last) if (last.next_offset, last.cause) == (first_offset, cause) => {
                last.next_offset = until;
            }
            _ => self.gaps.push(SavedGap { first_offset, next_offset: until, cause }),
        }
        self.next_offset = until;
        if self.batch_count == 0 {
            // The first copied record is above the gap.
            self.log_start_offset = until;
        }
    }

    /// Shortens the last gap by the offsets from `first_offset` on: a batch at the end of the gap
    /// is copied as a whole.
    pub(super) fn shorten_gap(&mut self, first_offset: u64) {
        if self.batch_count == 0 {
            return;
        }
        if let Some(last) = self.gaps.last_mut().filter(|gap| gap.next_offset == self.next_offset) {
            last.next_offset = last.next_offset.min(first_offset.max(last.first_offset));
        }
        self.gaps.pop_if(|gap| gap.next_offset <= gap.first_offset);
    }
}

/// Returns the file of a copy of a partition. The prefix of the directory name keeps the topic
/// names `.` and `..` valid.
pub(crate) fn batch_file(directory: &Path, topic: &str, partition: usize, copy: u32) -> PathBuf {
    let name = match copy {
        0 => format!("partition-{partition}"),
        _ => format!("partition-{partition}.{copy}"),
    };
    topic_directory(directory, topic).join(name)
}

pub(crate) fn topic_directory(directory: &Path, topic: &str) -> PathBuf {
    directory.join(format!("topic-{topic}"))
}

impl From<&proto::TopicConfig> for SavedTopicConfig {
    fn from(config: &proto::TopicConfig) -> Self {
        // Lists every field, so that a new setting is a compile error here.
        let proto::TopicConfig {
            retention_time,
            retention_bytes,
            max_batch_bytes,
            max_record_bytes,
            min_durability: _,
            default_durability: _,
            allowed_compression: _,
            validate_records,
            cleanup: _,
            tombstone_retention_time,
            batch_format: _,
        } = *config;
        let is_compacted = !is_delete_policy(cleanup_name(config.cleanup()));
        let time = retention_time.and_then(|time| helix_proto::time::duration(time).ok());
        Self {
            retention_time: time.map(units::duration),
            retention_bytes,
            max_batch_bytes,
            max_record_bytes,
            min_durability: durability_name(config.min_durability()).to_owned(),
            default_durability: durability_name(config.default_durability()).to_owned(),
            allowed_compression: match config.allowed_compression() {
                // A server before compression; the backup is restored with the default.
                proto::AllowedCompression::Unspecified => any_compression(),
                allowed => allowed_name(allowed).to_owned(),
            },
            validate_records: validate_records.unwrap_or(true),
            cleanup: cleanup_name(config.cleanup()).to_owned(),
            tombstone_retention_time: tombstone_retention_time
                .filter(|_| is_compacted)
                .and_then(|time| helix_proto::time::duration(time).ok())
                .map(units::duration),
            batch_format: format_name(config.batch_format()).to_owned(),
        }
    }
}

impl SavedTopicConfig {
    /// # Errors
    /// Fails if a value is not valid.
    pub(crate) fn to_wire(&self) -> anyhow::Result<proto::TopicConfig> {
        let time = self.retention_time.as_deref().map(units::parse_duration).transpose();
        let time = time.map_err(anyhow::Error::msg)?;
        let tombstones = self.tombstone_retention_time.as_deref().map(units::parse_duration);
        let tombstones = tombstones.transpose().map_err(anyhow::Error::msg)?;
        let durability = |name: &str| {
            let found = proto::Durability::from_str_name(&format!("DURABILITY_{name}"));
            found.map(i32::from).with_context(|| format!("unknown durability {name}"))
        };
        Ok(proto::TopicConfig {
            retention_time: time.map(prost_types::Duration::try_from).transpose()?,
            retention_bytes: self.retention_bytes,
            max_batch_bytes: self.max_batch_bytes,
            max_record_bytes: self.max_record_bytes,
            min_durability: durability(&self.min_durability)?,
            default_durability: durability(&self.default_durability)?,
            allowed_compression: parse_allowed(&self.allowed_compression)
                .map_err(anyhow::Error::msg)?
                .into(),
            validate_records: Some(self.validate_records),
            cleanup: parse_cleanup(&self.cleanup).map_err(anyhow::Error::msg)?.into(),
            tombstone_retention_time: tombstones
                .map(prost_types::Duration::try_from)
                .transpose()?,
            batch_format: parse_format(&self.batch_format).map_err(anyhow::Error::msg)?.into(),
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
            allowed_compression: proto::AllowedCompression::Lz4.into(),
            validate_records: Some(false),
            batch_format: proto::BatchFormat::Kafka.into(),
            ..proto::TopicConfig::default()
        };
        let mut manifest = Manifest::new("c", "2026-01-31T10:00:00Z".to_owned());
        for name in ["orders", "a", "z"] {
            manifest.put(SavedTopic {
                name: name.to_owned(),
                topic_id: 7,
                replication_factor: 3,
                config: SavedTopicConfig::from(&config),
                is_partial: false,
                partitions: vec![SavedPartition { next_offset: 7, ..SavedPartition::default() }; 2],
            });
        }
        manifest
    }

    #[test]
    fn topics_are_sorted_by_name_and_settings_round_trip() {
        let mut manifest = manifest();
        let names: Vec<_> = manifest.topics.iter().map(|topic| topic.name.as_str()).collect();
        assert_eq!(names, ["a", "orders", "z"]);
        let config = manifest.topic("orders").unwrap().config.to_wire().unwrap();
        assert_eq!(config.retention_time.unwrap().seconds, 90);
        assert_eq!((config.retention_bytes, config.max_batch_bytes), (None, Some(4 << 20)));
        assert_eq!(config.min_durability(), proto::Durability::None);
        assert_eq!(config.allowed_compression(), proto::AllowedCompression::Lz4);
        assert_eq!(config.validate_records, Some(false));
        assert_eq!(config.batch_format(), proto::BatchFormat::Kafka);
        let orders = manifest.topic("orders").unwrap().clone();
        manifest.put(SavedTopic { replication_factor: 1, ..orders });
        assert_eq!(manifest.topics.len(), 3);
    }

    #[test]
    fn finds_every_damaged_byte_of_a_manifest() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        assert_eq!(Manifest::load(directory).unwrap(), None);
        manifest().save(directory).unwrap();
        assert_eq!(Manifest::load(directory).unwrap(), Some(manifest()));
        let path = directory.join(NAME);
        let good = files::read(&path).unwrap().unwrap();
        for index in 0..good.len() {
            let mut bad = good.clone();
            bad[index] ^= 1;
            let error = Manifest::unseal(&path, &bad).unwrap_err();
            assert_eq!(crate::exit::of(&error), Exit::VerificationFailed, "byte {index}");
        }
        assert!(Manifest::unseal(&path, &good[..good.len() - 1]).is_err());
    }

    #[test]
    fn rejects_manifest_of_another_format() {
        let later = Manifest { format: FORMAT + 1, ..manifest() };
        let error = Manifest::unseal(Path::new(NAME), &seal(&later).unwrap()).unwrap_err();
        assert_eq!(crate::exit::of(&error), Exit::Error);
    }

    #[test]
    fn reads_format_1_and_writes_the_current_one() {
        let old = r#"{
  "crc32": CRC,
  "manifest": {
    "format": 1,
    "version": "0.1.0",
    "cluster_id": "c",
    "begun_at": "2026-01-31T10:00:00Z",
    "is_complete": true,
    "topics": [
      {
        "name": "orders",
        "replication_factor": 3,
        "config": {
          "retention_time": null,
          "retention_bytes": null,
          "max_batch_bytes": null,
          "max_record_bytes": null,
          "min_durability": "NONE",
          "default_durability": "QUORUM_SYNCED"
        },
        "partitions": [
          {
            "log_start_offset": 3,
            "next_offset": 7,
            "record_count": 4,
            "batch_count": 1,
            "batch_bytes_max": 9,
            "file_bytes": 50,
            "crc32": 1
          }
        ]
      }
    ]
  }
}
"#;
        // The checksum covers the compact form; no value has a blank in it.
        let compact: String = old.split_whitespace().collect();
        let compact = compact.strip_prefix("{\"crc32\":CRC,\"manifest\":").unwrap();
        let crc32 = crc32fast::hash(&compact.as_bytes()[..compact.len() - 1]);
        let old = old.replace("CRC", &crc32.to_string());
        let loaded = Manifest::unseal(Path::new(NAME), old.as_bytes()).unwrap();
        assert_eq!((loaded.format, loaded.topics[0].partitions[0].next_offset), (1, 7));
        let directory = tempfile::tempdir().unwrap();
        loaded.save(directory.path()).unwrap();
        let written = || Manifest::load(directory.path()).unwrap().unwrap();
        assert_eq!(written().format, FORMAT_WITHOUT_COPIES);
        // Only a later copy needs a program that knows it.
        let mut copied = written();
        copied.topics[0].partitions[0].copy = 1;
        copied.save(directory.path()).unwrap();
        assert_eq!(written().format, FORMAT);
        assert_eq!(written().topics, copied.topics);
    }

    #[test]
    fn gaps_grow_and_end_at_copied_batches() {
        let mut partition =
            SavedPartition { next_offset: 10, batch_count: 1, ..Default::default() };
        partition.skip(10, GapCause::Trimmed);
        assert_eq!(partition.gaps, []);
        partition.skip(20, GapCause::Trimmed);
        partition.skip(30, GapCause::Trimmed);
        let gap =
            |next_offset| SavedGap { first_offset: 10, next_offset, cause: GapCause::Trimmed };
        assert_eq!((partition.gaps.clone(), partition.missing_offsets()), (vec![gap(30)], 20));
        // The batch that contains the new log start begins at 25.
        partition.shorten_gap(25);
        assert_eq!(partition.gaps, [gap(25)]);
        partition.next_offset = 40;
        partition.shorten_gap(5);
        assert_eq!(partition.gaps, [gap(25)], "not at the end of the copy");
        partition.skip(41, GapCause::TopicDeleted);
        partition.shorten_gap(40);
        assert_eq!(partition.gaps, [gap(25)]);
        let mut empty = SavedPartition::default();
        empty.skip(7, GapCause::Trimmed);
        empty.shorten_gap(5);
        assert_eq!((empty.log_start_offset, empty.missing_offsets()), (7, 7));
    }
}
