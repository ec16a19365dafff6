//! Workload: the validated contents of a workload file.
//!
//! Keys and defaults are those of the OpenMessaging Benchmark. Minutes and GB may have decimals.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::yaml::{YamlEntry, flat_mapping};
use crate::load::COUNT_MAX;
use crate::messages::{KeyDistribution, MESSAGE_BYTES_MAX};

/// Keys of a workload file.
const KEYS: [&str; 17] = [
    "name",
    "topics",
    "partitionsPerTopic",
    "keyDistributor",
    "messageSize",
    "useRandomizedPayloads",
    "randomBytesRatio",
    "randomizedPayloadPoolSize",
    "payloadFile",
    "subscriptionsPerTopic",
    "producersPerTopic",
    "consumerPerSubscription",
    "producerRate",
    "consumerBacklogSizeGB",
    "backlogDrainRatio",
    "testDurationMinutes",
    "warmupDurationMinutes",
];

/// Most bytes of a workload file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Most partitions of all topics.
const PARTITIONS_MAX: u64 = 1 << 20;
/// Most messages per second.
const RATE_MAX: u64 = 1_000_000_000;
/// Most messages in the pool of random values.
const POOL_MESSAGES_MAX: u64 = 1 << 20;
/// Largest backlog in GiB.
const BACKLOG_GIB_MAX: f64 = 1_048_576.0;
/// Longest phase in minutes: 30 days.
const MINUTES_MAX: f64 = 30.0 * 24.0 * 60.0;
/// Warm-up in minutes of a file that states none.
const WARMUP_MINUTES_DEFAULT: f64 = 1.0;

/// Load that a workload file describes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OmbWorkload {
    pub(super) name: String,
    pub(super) topics: usize,
    pub(super) partitions_per_topic: u32,
    pub(super) message_size: usize,
    pub(super) payload: OmbPayload,
    pub(super) keys: KeyDistribution,
    pub(super) producers_per_topic: usize,
    pub(super) subscriptions_per_topic: usize,
    pub(super) consumers_per_subscription: usize,
    /// Messages per second over all producers; `None` finds the highest one.
    pub(super) rate: Option<f64>,
    /// Bytes that consumers leave before they start; 0 lets them read from the start.
    pub(super) backlog_bytes: u64,
    /// Share of the backlog that must be read before the test goes on.
    pub(super) backlog_drain_ratio: f64,
    pub(super) duration: Duration,
    pub(super) warmup: Duration,
}

/// Source of the messages' values.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum OmbPayload {
    File(PathBuf),
    Random { ratio: f64, pool_size: usize },
}

impl OmbWorkload {
    /// Reads a workload file.
    ///
    /// # Errors
    /// The file cannot be read, or see [`OmbWorkload::parse`].
    pub(super) fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let file = OpenOptions::new().read(true).open(path);
        let file = file.with_context(|| format!("open {name}"))?;
        let mut text = String::new();
        let read = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text);
        read.with_context(|| format!("read {name}"))?;
        ensure!(
            text.len() as u64 <= FILE_BYTES_MAX,
            "{name} has more than {FILE_BYTES_MAX} bytes, the limit of a workload file"
        );
        let name_default = path.file_stem().unwrap_or_default().to_string_lossy();
        Self::parse(&text, &name_default).with_context(|| name.to_string())
    }

    /// Parses the text of a workload file.
    ///
    /// # Errors
    /// A key is unknown, missing or out of range; the message names it and its line.
    fn parse(text: &str, name_default: &str) -> Result<Self> {
        let keys = WorkloadKeys::new(flat_mapping(text)?)?;
        let topics = keys.count("topics", 1..=COUNT_MAX as u64)?;
        let message_size = keys.required("messageSize", 1..=MESSAGE_BYTES_MAX as u64)?;
        let workload = Self {
            name: keys.text("name").unwrap_or(name_default).to_owned(),
            topics,
            partitions_per_topic: u32::try_from(
                keys.required("partitionsPerTopic", 1..=PARTITIONS_MAX)?,
            )?,
            message_size: usize::try_from(message_size)?,
            payload: keys.payload()?,
            keys: keys.distribution()?,
            producers_per_topic: keys.count("producersPerTopic", 1..=COUNT_MAX as u64)?,
            subscriptions_per_topic: keys.count("subscriptionsPerTopic", 0..=COUNT_MAX as u64)?,
            consumers_per_subscription: keys
                .count("consumerPerSubscription", 1..=COUNT_MAX as u64)?,
            rate: match keys.required("producerRate", 0..=RATE_MAX)? {
                0 => None,
                rate => Some(rate as f64),
            },
            backlog_bytes: keys.backlog_bytes()?,
            backlog_drain_ratio: keys.optional("backlogDrainRatio", 0.0..=1.0)?.unwrap_or(1.0),
            duration: minutes(keys.required("testDurationMinutes", 0.0..=MINUTES_MAX)?)?,
            warmup: minutes(
                keys.optional("warmupDurationMinutes", 0.0..=MINUTES_MAX)?
                    .unwrap_or(WARMUP_MINUTES_DEFAULT),
            )?,
        };
        workload.check()?;
        Ok(workload)
    }

    /// Checks values that belong together.
    fn check(&self) -> Result<()> {
        ensure!(!self.duration.is_zero(), "testDurationMinutes must be above 0");
        let partitions = self.topics as u64 * u64::from(self.partitions_per_topic);
        ensure!(
            partitions <= PARTITIONS_MAX,
            "topics times partitionsPerTopic is {partitions}; the limit is {PARTITIONS_MAX}"
        );
        let (producers, consumers) = (self.producers(), self.consumers());
        ensure!(
            producers <= COUNT_MAX,
            "topics times producersPerTopic is {producers}; the limit is {COUNT_MAX}"
        );
        ensure!(
            consumers <= COUNT_MAX,
            "topics times subscriptionsPerTopic times consumerPerSubscription is {consumers}; the \
             limit is {COUNT_MAX}"
        );
        if self.backlog_bytes > 0 {
            ensure!(
                self.rate.is_some(),
                "consumerBacklogSizeGB needs a producerRate above 0: no rate can be found while a \
                 backlog is built"
            );
            ensure!(consumers > 0, "consumerBacklogSizeGB needs subscriptionsPerTopic above 0");
        }
        Ok(())
    }

    /// Returns the producers of all topics.
    pub(super) fn producers(&self) -> usize {
        self.topics.saturating_mul(self.producers_per_topic)
    }

    /// Returns the consumers of all topics.
    pub(super) fn consumers(&self) -> usize {
        let groups = self.topics.saturating_mul(self.subscriptions_per_topic);
        groups.saturating_mul(self.consumers_per_subscription)
    }
}

fn minutes(minutes: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(minutes * 60.0).context("a number of minutes")
}

/// Entries of a workload file, all with known keys.
struct WorkloadKeys(Vec<YamlEntry>);

impl WorkloadKeys {
    fn new(entries: Vec<YamlEntry>) -> Result<Self> {
        let unknown = entries.iter().find(|entry| !KEYS.contains(&entry.key.as_str()));
        if let Some(YamlEntry { key, line, .. }) = unknown {
            bail!("line {line}: {key} is not supported; the keys are {}", KEYS.join(", "));
        }
        Ok(Self(entries))
    }

    /// Returns the value of a key with its line.
    fn find(&self, key: &str) -> Option<(&str, usize)> {
        let entry = self.0.iter().find(|entry| entry.key == key)?;
        Some((entry.value.as_deref()?, entry.line))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.find(key).map(|(value, _)| value)
    }

    fn optional<T>(&self, key: &str, range: RangeInclusive<T>) -> Result<Option<T>>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some((text, line)) = self.find(key) else { return Ok(None) };
        let (least, most) = (range.start(), range.end());
        match text.replace('_', "").parse::<T>() {
            Ok(value) if range.contains(&value) => Ok(Some(value)),
            _ => bail!("line {line}: {key} is {text}; it must be a number from {least} to {most}"),
        }
    }

    fn required<T>(&self, key: &str, range: RangeInclusive<T>) -> Result<T>
    where
        T: FromStr + PartialOrd + Display,
    {
        self.optional(key, range)?.with_context(|| format!("{key} is missing"))
    }

    fn count(&self, key: &str, range: RangeInclusive<u64>) -> Result<usize> {
        Ok(usize::try_from(self.required(key, range)?)?)
    }

    fn flag(&self, key: &str) -> Result<bool> {
        match self.find(key) {
            None | Some(("false", _)) => Ok(false),
            Some(("true", _)) => Ok(true),
            Some((value, line)) => bail!("line {line}: {key} is {value}; use true or false"),
        }
    }

    fn backlog_bytes(&self) -> Result<u64> {
        let gib = self.optional("consumerBacklogSizeGB", 0.0..=BACKLOG_GIB_MAX)?;
        Ok((gib.unwrap_or_default() * (1u64 << 30) as f64) as u64)
    }

    fn payload(&self) -> Result<OmbPayload> {
        if self.flag("useRandomizedPayloads")? {
            let pool_size = self.required("randomizedPayloadPoolSize", 1..=POOL_MESSAGES_MAX)?;
            return Ok(OmbPayload::Random {
                ratio: self.optional("randomBytesRatio", 0.0..=1.0)?.unwrap_or(0.0),
                pool_size: usize::try_from(pool_size)?,
            });
        }
        let file = self.text("payloadFile");
        let file = file.context("payloadFile is missing; or set useRandomizedPayloads to true")?;
        Ok(OmbPayload::File(file.into()))
    }

    fn distribution(&self) -> Result<KeyDistribution> {
        match self.find("keyDistributor") {
            None | Some(("NO_KEY", _)) => Ok(KeyDistribution::NoKey),
            Some(("KEY_ROUND_ROBIN", _)) => Ok(KeyDistribution::RoundRobin),
            Some(("RANDOM_NANO", _)) => Ok(KeyDistribution::Random),
            Some((value, line)) => bail!(
                "line {line}: keyDistributor is {value}; use NO_KEY, KEY_ROUND_ROBIN or RANDOM_NANO"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKLOAD: &str = "\
# A workload.
name: 2 topics / 16 partitions / 1 kb

topics: 2
partitionsPerTopic: 16
keyDistributor: \"KEY_ROUND_ROBIN\"
messageSize: 1_024
useRandomizedPayloads: true
randomBytesRatio: 0.5
randomizedPayloadPoolSize: 1000
subscriptionsPerTopic: 3
producersPerTopic: 4
consumerPerSubscription: 5
producerRate: 50000
consumerBacklogSizeGB: 2
testDurationMinutes: 15
warmupDurationMinutes: 0.5
";

    /// Parses the workload with one line replaced.
    fn with(key: &str, line: &str) -> Result<OmbWorkload> {
        let lines = WORKLOAD.lines().map(|it| if it.starts_with(key) { line } else { it });
        OmbWorkload::parse(&lines.collect::<Vec<_>>().join("\n"), "file")
    }

    #[test]
    fn file_gives_a_plan() {
        let workload = OmbWorkload::parse(WORKLOAD, "file").unwrap();
        let expected = OmbWorkload {
            name: "2 topics / 16 partitions / 1 kb".to_owned(),
            topics: 2,
            partitions_per_topic: 16,
            message_size: 1024,
            payload: OmbPayload::Random { ratio: 0.5, pool_size: 1000 },
            keys: KeyDistribution::RoundRobin,
            producers_per_topic: 4,
            subscriptions_per_topic: 3,
            consumers_per_subscription: 5,
            rate: Some(50_000.0),
            backlog_bytes: 2 << 30,
            backlog_drain_ratio: 1.0,
            duration: Duration::from_secs(900),
            warmup: Duration::from_secs(30),
        };
        assert_eq!(workload, expected);
        assert_eq!((workload.producers(), workload.consumers()), (8, 30));
    }

    #[test]
    fn defaults_are_those_of_the_format() {
        let workload = OmbWorkload::parse(
            "topics: 1\npartitionsPerTopic: 1\nmessageSize: 100\npayloadFile: payload/100b.data\n\
             subscriptionsPerTopic: 1\nconsumerPerSubscription: 1\nproducersPerTopic: 1\n\
             producerRate: 0\nconsumerBacklogSizeGB: 0\ntestDurationMinutes: 15\n",
            "file",
        );
        let workload = workload.unwrap();
        assert_eq!((workload.name.as_str(), workload.rate), ("file", None));
        assert_eq!(workload.keys, KeyDistribution::NoKey);
        assert_eq!(workload.payload, OmbPayload::File("payload/100b.data".into()));
        assert_eq!((workload.backlog_bytes, workload.backlog_drain_ratio), (0, 1.0));
        assert_eq!(workload.warmup, Duration::from_secs(60));
    }

    #[test]
    fn refused_keys_and_values_are_named_with_their_line() {
        for (key, line, expected) in [
            ("topics", "topics: 0", "line 4: topics is 0; it must be a number from 1 to 65536"),
            ("topics", "topics: many", "line 4: topics is many"),
            ("topics", "topicCount: 1", "line 4: topicCount is not supported; the keys are name,"),
            ("topics", "Topics: 1", "line 4: Topics is not supported"),
            ("topics", "", "topics is missing"),
            ("partitions", "partitionsPerTopic: 600000", "topics times partitionsPerTopic is"),
            (
                "keyDistributor",
                "keyDistributor: MINE",
                "line 6: keyDistributor is MINE; use NO_KEY",
            ),
            ("messageSize", "messageSize: 16777217", "line 7: messageSize is 16777217"),
            ("messageSize", "messageSize: -1", "line 7: messageSize is -1"),
            ("use", "useRandomizedPayloads: yes", "line 8: useRandomizedPayloads is yes; use true"),
            ("use", "useRandomizedPayloads: false", "payloadFile is missing"),
            ("randomBytes", "randomBytesRatio: 1.5", "line 9: randomBytesRatio is 1.5"),
            ("randomBytes", "randomBytesRatio: NaN", "line 9: randomBytesRatio is NaN"),
            ("randomized", "randomizedPayloadPoolSize: 0", "line 10: randomizedPayloadPoolSize"),
            ("producersPer", "producersPerTopic: 40000", "topics times producersPerTopic is 80000"),
            ("consumerPer", "consumerPerSubscription: 20000", "consumerPerSubscription is 120000"),
            ("producerRate", "producerRate: 1e12", "line 14: producerRate is 1e12"),
            ("producerRate", "producerRate: 0", "consumerBacklogSizeGB needs a producerRate"),
            ("subscriptions", "subscriptionsPerTopic: 0", "needs subscriptionsPerTopic above 0"),
            ("consumerB", "consumerBacklogSizeGB: -1", "line 15: consumerBacklogSizeGB is -1"),
            ("test", "testDurationMinutes: 0", "testDurationMinutes must be above 0"),
            ("test", "testDurationMinutes: 1e300", "line 16: testDurationMinutes is 1e300"),
            ("warmup", "warmupDurationMinutes: -1", "line 17: warmupDurationMinutes is -1"),
        ] {
            let error = format!("{:#}", with(key, line).unwrap_err());
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn shipped_workloads_are_valid() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("workloads");
        let mut names = Vec::new();
        for file in [
            "1-topic-1-partition-100b.yaml",
            "1-topic-16-partitions-1kb.yaml",
            "10-topics-3-partitions-1kb-keyed.yaml",
            "1-topic-6-partitions-1kb-fan-out.yaml",
            "1-topic-16-partitions-1kb-limit.yaml",
            "1-topic-16-partitions-1kb-backlog-8gb.yaml",
        ] {
            let workload = OmbWorkload::read(&dir.join(file)).unwrap();
            assert!(matches!(workload.payload, OmbPayload::Random { .. }), "{file}");
            names.push(workload.name);
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 6);
    }

    #[test]
    fn file_is_bounded_before_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large.yaml");
        crate::figures::write_file(&path, "# a comment\n".repeat(6000).as_bytes()).unwrap();
        let error = format!("{:#}", OmbWorkload::read(&path).unwrap_err());
        assert!(error.contains("the limit of a workload file"), "{error}");
    }
}
