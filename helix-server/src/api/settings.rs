//! Converts topic settings and durabilities between the wire and the server.
//! Pure; `log/` and `shard/` apply the settings.

use helix_proto::compression::BatchCodec;
use helix_proto::kafka::KafkaCodec;
use helix_proto::log::v1::{self as wire, AllowedCompression, BatchFormat, CleanupPolicy};

use super::time;
use crate::error::{Error, Result};
use crate::limits::BATCH_BYTES_MAX;
use crate::log::{PartitionSettings, SettingsMask};
use crate::quote::quote;
use crate::shard::Durability;

/// Returns the durability that an append's ack waits for.
///
/// The requested one, or the topic's default, raised to the topic's minimum.
pub(super) fn durability_to_reach(
    requested: i32,
    settings: &PartitionSettings,
) -> Result<Durability> {
    let requested = from_wire_durability("durability", requested)?;
    let weakest = from_number(settings.min_durability, Durability::None);
    let default = from_number(settings.default_durability, Durability::QuorumSynced);
    // The smaller value is the stronger durability.
    Ok(requested.unwrap_or(default).min(weakest))
}

/// Converts a stored durability, which is the wire's number.
fn from_number(number: i32, unset: Durability) -> Durability {
    // This version stores no unknown number; the strongest durability is safe for one.
    let known = from_wire_durability("durability", number);
    known.map_or(Durability::QuorumSynced, |known| known.unwrap_or(unset))
}

pub(super) fn to_wire_durability(durability: Durability) -> wire::Durability {
    match durability {
        Durability::QuorumSynced => wire::Durability::QuorumSynced,
        Durability::QuorumWritten => wire::Durability::QuorumWritten,
        Durability::LeaderWritten => wire::Durability::LeaderWritten,
        Durability::None => wire::Durability::None,
    }
}

fn from_wire_durability(field: &'static str, value: i32) -> Result<Option<Durability>> {
    match wire::Durability::try_from(value) {
        Ok(wire::Durability::Unspecified) => Ok(None),
        Ok(wire::Durability::QuorumSynced) => Ok(Some(Durability::QuorumSynced)),
        Ok(wire::Durability::QuorumWritten) => Ok(Some(Durability::QuorumWritten)),
        Ok(wire::Durability::LeaderWritten) => Ok(Some(Durability::LeaderWritten)),
        Ok(wire::Durability::None) => Ok(Some(Durability::None)),
        Err(_) => Err(Error::InvalidArgument {
            field,
            what: format!("{value} is unknown to this version"),
        }),
    }
}

/// Returns the setting of a topic; a number that this version does not know is the strictest one.
fn allowed_compression(settings: &PartitionSettings) -> AllowedCompression {
    match AllowedCompression::try_from(settings.allowed_compression) {
        Ok(AllowedCompression::Unspecified) => AllowedCompression::Any,
        Ok(known) => known,
        Err(_) => AllowedCompression::None,
    }
}

/// Returns the numbers of the compressions that a topic allows; `None` stands for no topic, and for
/// uncompressed batches only.
pub(super) fn allowed_compressions(settings: Option<&PartitionSettings>) -> &'static [i32] {
    const NONE: i32 = wire::Compression::None as i32;
    const LZ4: i32 = wire::Compression::Lz4 as i32;
    const ZSTD: i32 = wire::Compression::Zstd as i32;
    match settings.map_or(AllowedCompression::None, allowed_compression) {
        AllowedCompression::Unspecified | AllowedCompression::Any => &[NONE, LZ4, ZSTD],
        AllowedCompression::None => &[NONE],
        AllowedCompression::Lz4 => &[NONE, LZ4],
        AllowedCompression::Zstd => &[NONE, ZSTD],
    }
}

/// Returns the codec of a Kafka batch; `None` if it is uncompressed.
///
/// # Errors
/// [`Error::UnsupportedCompression`] if the topic does not allow it, or other readers than Kafka's
/// could not decode it.
pub(super) fn allowed_kafka_codec(
    codec: KafkaCodec,
    settings: &PartitionSettings,
) -> Result<Option<BatchCodec>> {
    match codec.as_batch_codec() {
        Some(None) => Ok(None),
        Some(Some(codec)) => allowed_codec(codec.to_wire().into(), settings),
        None => {
            let (what, allowed) = rejected(
                &format!("compression {} is not allowed by the topic", codec.name()),
                settings,
            );
            Err(Error::UnsupportedCompression { what, allowed })
        }
    }
}

/// Returns the text of a rejected compression, and the numbers of those that the topic allows.
fn rejected(rejected: &str, settings: &PartitionSettings) -> (String, &'static [i32]) {
    let allowed = allowed_compressions(Some(settings));
    let known = |number: &i32| BatchCodec::from_wire(*number).ok().flatten();
    let names: Vec<_> = allowed.iter().map(|it| known(it).map_or("none", |it| it.name())).collect();
    (format!("{rejected}; it accepts {}", names.join(", ")), allowed)
}

/// Returns the codec of a batch; `None` if it is uncompressed.
///
/// # Errors
/// [`Error::UnsupportedCompression`] if the topic does not allow it, or it is unknown.
pub(super) fn allowed_codec(
    compression: i32,
    settings: &PartitionSettings,
) -> Result<Option<BatchCodec>> {
    let codec = BatchCodec::from_wire(compression);
    let allowed = allowed_compressions(Some(settings));
    let name = |codec: BatchCodec| codec.name().to_owned();
    let why = match codec {
        Ok(None) => return Ok(None),
        Ok(Some(codec)) if allowed.contains(&codec.to_wire().into()) => return Ok(Some(codec)),
        Ok(Some(codec)) => format!("compression {} is not allowed by the topic", name(codec)),
        Err(unknown) => unknown.to_string(),
    };
    let (what, allowed) = rejected(&why, settings);
    Err(Error::UnsupportedCompression { what, allowed })
}

/// Converts settings to the wire; every field is set.
pub(super) fn to_config(settings: &PartitionSettings) -> wire::TopicConfig {
    let min = from_number(settings.min_durability, Durability::None);
    let default = from_number(settings.default_durability, Durability::QuorumSynced);
    wire::TopicConfig {
        retention_time: Some(time::to_duration(settings.retention_us.unwrap_or(0))),
        retention_bytes: Some(settings.retention_bytes.unwrap_or(0)),
        max_batch_bytes: Some(settings.max_batch_bytes),
        max_record_bytes: Some(settings.max_record_bytes),
        min_durability: to_wire_durability(min).into(),
        default_durability: to_wire_durability(default).into(),
        allowed_compression: allowed_compression(settings).into(),
        validate_records: Some(!settings.takes_any_records),
        cleanup: match settings.cleanup {
            0 => CleanupPolicy::Delete.into(),
            other => other,
        },
        tombstone_retention_time: Some(time::to_duration(settings.tombstones_kept_us())),
        batch_format: to_wire_format(settings),
    }
}

/// Returns the number of the topic's `BatchFormat`.
pub(super) fn to_wire_format(settings: &PartitionSettings) -> i32 {
    match settings.batch_format {
        0 => BatchFormat::Helix.into(),
        other => other,
    }
}

/// Converts the settings of a new topic; unset fields are as in `default`.
pub(super) fn from_config(
    config: Option<wire::TopicConfig>,
    default: &PartitionSettings,
) -> Result<PartitionSettings> {
    let config = config.unwrap_or_default();
    Ok(PartitionSettings {
        retention_us: retention_us(&config)?.or(default.retention_us),
        retention_bytes: config.retention_bytes.or(default.retention_bytes),
        max_batch_bytes: bytes_max("config.max_batch_bytes", config.max_batch_bytes)?
            .unwrap_or(default.max_batch_bytes),
        max_record_bytes: bytes_max("config.max_record_bytes", config.max_record_bytes)?
            .unwrap_or(default.max_record_bytes),
        min_durability: durability("config.min_durability", config.min_durability)?
            .unwrap_or(default.min_durability),
        default_durability: durability("config.default_durability", config.default_durability)?
            .unwrap_or(default.default_durability),
        version: default.version,
        allowed_compression: compression_setting(config.allowed_compression)?
            .unwrap_or(default.allowed_compression),
        takes_any_records: match config.validate_records {
            Some(validates) => !validates,
            None => default.takes_any_records,
        },
        cleanup: cleanup_setting(config.cleanup)?.unwrap_or(default.cleanup),
        tombstone_retention_us: tombstone_retention_us(&config)?.or(default.tombstone_retention_us),
        batch_format: format_setting(config.batch_format)?.unwrap_or(default.batch_format),
    })
}

/// Returns the fields with values that nodes of earlier protocol versions do not know.
pub(super) fn fields_of_later_versions(settings: &PartitionSettings) -> SettingsMask {
    let given = |is_given, fields| if is_given { fields } else { SettingsMask(0) };
    let has_tombstone_retention = settings.tombstone_retention_us.is_some();
    given(settings.allowed_compression != 0, SettingsMask::ALLOWED_COMPRESSION)
        | given(settings.takes_any_records, SettingsMask::VALIDATE_RECORDS)
        | given(settings.cleanup != 0, SettingsMask::CLEANUP)
        | given(has_tombstone_retention, SettingsMask::TOMBSTONE_RETENTION_TIME)
        | given(settings.batch_format != 0, SettingsMask::BATCH_FORMAT)
}

/// Converts an update: each field in the mask gets its value in `config`, or else in `default`.
pub(super) fn change(
    paths: &[String],
    config: Option<wire::TopicConfig>,
    default: &PartitionSettings,
) -> Result<(PartitionSettings, SettingsMask)> {
    let invalid = |what| Err(Error::InvalidArgument { field: "update_mask", what });
    if paths.is_empty() {
        return invalid("must name at least one field of TopicConfig".to_owned());
    }
    let mut fields = SettingsMask(0);
    for path in paths {
        fields |= match path.as_str() {
            "retention_time" => SettingsMask::RETENTION_TIME,
            "retention_bytes" => SettingsMask::RETENTION_BYTES,
            "max_batch_bytes" => SettingsMask::MAX_BATCH_BYTES,
            "max_record_bytes" => SettingsMask::MAX_RECORD_BYTES,
            "min_durability" => SettingsMask::MIN_DURABILITY,
            "default_durability" => SettingsMask::DEFAULT_DURABILITY,
            "allowed_compression" => SettingsMask::ALLOWED_COMPRESSION,
            "validate_records" => SettingsMask::VALIDATE_RECORDS,
            "cleanup" => SettingsMask::CLEANUP,
            "tombstone_retention_time" => SettingsMask::TOMBSTONE_RETENTION_TIME,
            "batch_format" => SettingsMask::BATCH_FORMAT,
            _ => return invalid(format!("{} is not a field of TopicConfig", quote(path))),
        };
    }
    Ok((from_config(config, default)?, fields))
}

fn retention_us(config: &wire::TopicConfig) -> Result<Option<u64>> {
    let field = "config.retention_time";
    config.retention_time.map(|time| micros(field, time, "for no limit")).transpose()
}

fn tombstone_retention_us(config: &wire::TopicConfig) -> Result<Option<u64>> {
    let field = "config.tombstone_retention_time";
    let zero = "to remove tombstones at once";
    config.tombstone_retention_time.map(|time| micros(field, time, zero)).transpose()
}

/// Converts a time. `zero` says what 0 is for.
fn micros(field: &'static str, duration: prost_types::Duration, zero: &str) -> Result<u64> {
    let duration = time::from_duration(field, duration)?;
    // Neither may silently become something else: 0, or a time that never passes.
    match u64::try_from(duration.as_micros()) {
        Ok(0) if !duration.is_zero() => Err(Error::InvalidArgument {
            field,
            what: format!("must be at least a microsecond, or 0 {zero}, not {duration:?}"),
        }),
        Ok(micros) => Ok(micros),
        Err(_) => Err(Error::InvalidArgument {
            field,
            what: format!(
                "must be at most {} seconds, or 0 {zero}, not {}",
                u64::MAX / 1_000_000,
                duration.as_secs()
            ),
        }),
    }
}

fn bytes_max(field: &'static str, bytes: Option<u32>) -> Result<Option<u32>> {
    match bytes {
        Some(bytes) if !(1..=BATCH_BYTES_MAX).contains(&bytes) => Err(Error::InvalidArgument {
            field,
            what: format!("must be in 1..={BATCH_BYTES_MAX}, not {bytes}"),
        }),
        within => Ok(within),
    }
}

/// Converts the setting to its stored number. `ANY` is 0, as in topics that are older than it.
fn compression_setting(value: i32) -> Result<Option<i32>> {
    match AllowedCompression::try_from(value) {
        Ok(AllowedCompression::Unspecified) => Ok(None),
        Ok(AllowedCompression::Any) => Ok(Some(0)),
        Ok(known) => Ok(Some(known.into())),
        Err(_) => Err(Error::InvalidArgument {
            field: "config.allowed_compression",
            what: format!("{value} is unknown to this version"),
        }),
    }
}

/// Converts the policy to its stored number. `DELETE` is 0, as in topics that are older than it.
fn cleanup_setting(value: i32) -> Result<Option<i32>> {
    match CleanupPolicy::try_from(value) {
        Ok(CleanupPolicy::Unspecified) => Ok(None),
        Ok(CleanupPolicy::Delete) => Ok(Some(0)),
        Ok(compacted) => Ok(Some(compacted.into())),
        Err(_) => Err(Error::InvalidArgument {
            field: "config.cleanup",
            what: format!("{value} is unknown to this version"),
        }),
    }
}

/// Converts the format to its stored number. `HELIX` is 0, as in topics that are older than it.
fn format_setting(value: i32) -> Result<Option<i32>> {
    match BatchFormat::try_from(value) {
        Ok(BatchFormat::Unspecified) => Ok(None),
        Ok(BatchFormat::Helix) => Ok(Some(0)),
        Ok(known) => Ok(Some(known.into())),
        Err(_) => Err(Error::InvalidArgument {
            field: "config.batch_format",
            what: format!("{value} is unknown to this version"),
        }),
    }
}

fn durability(field: &'static str, value: i32) -> Result<Option<i32>> {
    Ok(from_wire_durability(field, value)?.map(|durability| to_wire_durability(durability).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: PartitionSettings = PartitionSettings {
        retention_us: Some(60_000_000),
        retention_bytes: Some(1 << 30),
        max_batch_bytes: 1 << 20,
        max_record_bytes: 1 << 16,
        default_durability: 1,
        min_durability: 3,
        version: 5,
        allowed_compression: 3,
        takes_any_records: true,
        cleanup: 2,
        tombstone_retention_us: Some(7_000_000),
        batch_format: 3,
    };

    #[test]
    fn a_weaker_durability_is_raised_to_the_topics_minimum() {
        let reach = |requested: wire::Durability| durability_to_reach(requested.into(), &SETTINGS);
        assert_eq!(reach(wire::Durability::Unspecified).unwrap(), Durability::QuorumSynced);
        assert_eq!(reach(wire::Durability::QuorumSynced).unwrap(), Durability::QuorumSynced);
        assert_eq!(reach(wire::Durability::QuorumWritten).unwrap(), Durability::QuorumWritten);
        assert_eq!(reach(wire::Durability::None).unwrap(), Durability::LeaderWritten);
        assert!(durability_to_reach(99, &SETTINGS).is_err());
    }

    #[test]
    fn settings_round_trip() {
        let default =
            PartitionSettings { retention_bytes: Some(7), takes_any_records: false, ..SETTINGS };
        let config = to_config(&SETTINGS);
        assert_eq!(from_config(Some(config), &default).unwrap(), SETTINGS);
        assert_eq!(from_config(None, &default).unwrap(), default);
    }

    #[test]
    fn topics_accept_uncompressed_batches_and_the_codecs_of_their_setting() {
        use AllowedCompression as A;

        for (setting, accepted) in [
            (A::Any, &[0, 1, 2, 3][..]),
            (A::None, &[0, 1]),
            (A::Lz4, &[0, 1, 2]),
            (A::Zstd, &[0, 1, 3]),
        ] {
            let config =
                wire::TopicConfig { allowed_compression: setting.into(), ..Default::default() };
            let settings = from_config(Some(config), &SETTINGS).unwrap();
            assert_eq!(to_config(&settings).allowed_compression(), setting);
            for compression in -1..6 {
                let codec = allowed_codec(compression, &settings);
                assert_eq!(codec.is_ok(), accepted.contains(&compression), "{setting:?}");
            }
        }
        let error = allowed_codec(3, &SETTINGS).unwrap_err().to_string();
        assert_eq!(error, "compression zstd is not allowed by the topic; it accepts none, lz4");
        let error = allowed_codec(9, &SETTINGS).unwrap_err().to_string();
        assert_eq!(error, "compression 9 is unknown to this version; it accepts none, lz4");
        let unknown = wire::TopicConfig { allowed_compression: 9, ..Default::default() };
        assert!(from_config(Some(unknown), &SETTINGS).is_err());
    }

    #[test]
    fn an_update_changes_what_its_mask_names() {
        let config = wire::TopicConfig { retention_bytes: Some(5), ..Default::default() };
        let paths = ["retention_bytes".to_owned(), "retention_time".to_owned()];
        let (changed, fields) = change(&paths, Some(config), &SETTINGS).unwrap();
        assert_eq!(changed, PartitionSettings { retention_bytes: Some(5), ..SETTINGS });
        assert_eq!(fields, SettingsMask::RETENTION_BYTES | SettingsMask::RETENTION_TIME);
    }

    #[test]
    fn rejects_a_retention_time_that_would_become_unlimited() {
        let retention_us = |seconds, nanos| {
            let retention_time = Some(prost_types::Duration { seconds, nanos });
            retention_us(&wire::TopicConfig { retention_time, ..Default::default() })
        };
        assert_eq!(retention_us(0, 0).unwrap(), Some(0));
        assert_eq!(retention_us(0, 1_000).unwrap(), Some(1));
        assert_eq!(retention_us(18_446_744_073_709, 0).unwrap(), Some(18_446_744_073_709_000_000));
        for (seconds, nanos) in [(0, 1), (0, 999), (18_446_744_073_710, 0), (i64::MAX, 0)] {
            let error = retention_us(seconds, nanos).unwrap_err().to_string();
            assert!(error.contains("or 0 for no limit"), "{seconds} {nanos}: {error}");
            let tombstone_retention_time = Some(prost_types::Duration { seconds, nanos });
            let config = wire::TopicConfig { tombstone_retention_time, ..Default::default() };
            let error = tombstone_retention_us(&config).unwrap_err().to_string();
            assert!(error.contains("or 0 to remove tombstones at once"), "{error}");
        }
    }

    #[test]
    fn rejects_unknown_fields_and_invalid_values() {
        assert!(change(&[], None, &SETTINGS).is_err());
        assert!(change(&["segment_bytes".to_owned()], None, &SETTINGS).is_err());
        let zero = wire::TopicConfig { max_batch_bytes: Some(0), ..Default::default() };
        assert!(from_config(Some(zero), &SETTINGS).is_err());
    }
}
