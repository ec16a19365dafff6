//! Settings of a topic in a form: the names and values of the command line. Pure.

use helix_proto::log::v1::{
    AllowedCompression, BatchFormat, CleanupPolicy, Durability, TopicConfig,
};
use helix_proto::units;

use super::form::FormFields;
use super::page::{argument, duration};
use super::topics::cleanup_name;

/// Value that resets a setting to the cluster's default.
const DEFAULT: &str = "default";

/// Word for a limit of 0.
const UNLIMITED: &str = "unlimited";

const DURABILITIES: [(&str, Durability); 4] = [
    ("quorum-synced", Durability::QuorumSynced),
    ("quorum-written", Durability::QuorumWritten),
    ("leader-written", Durability::LeaderWritten),
    ("none", Durability::None),
];

const COMPRESSIONS: [(&str, AllowedCompression); 4] = [
    ("any", AllowedCompression::Any),
    ("none", AllowedCompression::None),
    ("lz4", AllowedCompression::Lz4),
    ("zstd", AllowedCompression::Zstd),
];

const CLEANUPS: [(&str, CleanupPolicy); 3] = [
    ("delete", CleanupPolicy::Delete),
    ("compact", CleanupPolicy::Compact),
    ("compact+delete", CleanupPolicy::CompactAndDelete),
];

const FORMATS: [(&str, BatchFormat); 3] =
    [("helix", BatchFormat::Helix), ("kafka", BatchFormat::Kafka), ("any", BatchFormat::Any)];

/// A setting of a topic, as a row of a page and as a field of a form.
#[derive(Debug)]
pub(super) struct SettingField {
    /// Name of the flag, without the dashes.
    pub(super) flag: &'static str,
    pub(super) title: &'static str,
    /// Value in the form of the command line.
    pub(super) value: String,
    /// Valid values; empty for a text.
    pub(super) choices: Vec<&'static str>,
    /// Forms of a text.
    pub(super) hint: &'static str,
}

/// Changes of settings, as a call and as arguments of the command line.
#[derive(Debug, Default)]
pub(super) struct SettingChanges {
    pub(super) config: TopicConfig,
    pub(super) mask: Vec<String>,
    /// Begins with a blank, unless it is empty.
    pub(super) arguments: String,
}

/// Returns the settings of a topic. An empty configuration has no values.
pub(super) fn fields(config: Option<&TopicConfig>) -> Vec<SettingField> {
    let text = |of: &dyn Fn(&TopicConfig) -> String| config.map_or_else(String::new, of);
    let field =
        |flag, title, value, choices, hint| SettingField { flag, title, value, choices, hint };
    let time = |it: Option<prost_types::Duration>| match duration(it) {
        Some(time) if !time.is_zero() => units::duration(time),
        _ => "0s".to_owned(),
    };
    let named = |names: &[&'static str], at: Option<usize>| {
        at.and_then(|at| names.get(at)).map_or_else(String::new, |name| (*name).to_owned())
    };
    let durabilities: Vec<_> = DURABILITIES.iter().map(|(name, _)| *name).collect();
    let durability = |number: i32| {
        let at = DURABILITIES.iter().position(|(_, it)| i32::from(*it) == number);
        named(&durabilities, at)
    };
    let compressions: Vec<_> = COMPRESSIONS.iter().map(|(name, _)| *name).collect();
    let formats: Vec<_> = FORMATS.iter().map(|(name, _)| *name).collect();
    let size = "512MiB, 10GB";
    vec![
        field(
            "retention-time",
            "Retention time",
            text(&|it| match duration(it.retention_time) {
                Some(time) if !time.is_zero() => units::duration(time),
                _ => UNLIMITED.to_owned(),
            }),
            vec![],
            "12h, 7d; 0s for unlimited",
        ),
        field(
            "retention-bytes",
            "Retention size of a partition",
            text(&|it| match it.retention_bytes {
                Some(bytes) if bytes > 0 => units::bytes(bytes),
                _ => UNLIMITED.to_owned(),
            }),
            vec![],
            "512MiB, 10GB; 0 for unlimited",
        ),
        field(
            "cleanup",
            "Cleanup of old records",
            text(&|it| cleanup_name(it.cleanup).to_owned()),
            CLEANUPS.iter().map(|(name, _)| *name).collect(),
            "",
        ),
        field(
            "tombstone-retention-time",
            "Time to see deletions of keys",
            text(&|it| time(it.tombstone_retention_time)),
            vec![],
            "12h, 7d",
        ),
        field(
            "max-batch-bytes",
            "Maximum size of a batch",
            text(&|it| units::bytes(it.max_batch_bytes.unwrap_or(0).into())),
            vec![],
            size,
        ),
        field(
            "max-record-bytes",
            "Maximum size of a record",
            text(&|it| units::bytes(it.max_record_bytes.unwrap_or(0).into())),
            vec![],
            size,
        ),
        field(
            "min-durability",
            "Minimum durability",
            text(&|it| durability(it.min_durability)),
            durabilities.clone(),
            "",
        ),
        field(
            "default-durability",
            "Default durability",
            text(&|it| durability(it.default_durability)),
            durabilities.clone(),
            "",
        ),
        field(
            "compression",
            "Compressions that appends may use",
            text(&|it| {
                let number = it.allowed_compression;
                let at = COMPRESSIONS.iter().position(|(_, it)| i32::from(*it) == number);
                named(&compressions, at)
            }),
            compressions.clone(),
            "",
        ),
        field(
            "validate-records",
            "Reject batches whose content is no records",
            text(&|it| (if it.validate_records.unwrap_or(true) { "on" } else { "off" }).to_owned()),
            vec!["on", "off"],
            "",
        ),
        field(
            "batch-format",
            "Batches that appends may send",
            text(&|it| {
                let number = it.batch_format;
                named(&formats, FORMATS.iter().position(|(_, it)| i32::from(*it) == number))
            }),
            formats.clone(),
            "",
        ),
    ]
}

/// Reads the settings of a form. Empty fields stay as they are.
///
/// # Errors
/// A text with the setting, the value and the valid ones.
pub(super) fn parse(form: &FormFields) -> Result<SettingChanges, String> {
    let mut changes = SettingChanges::default();
    for (flag, path) in [
        ("retention-time", "retention_time"),
        ("retention-bytes", "retention_bytes"),
        ("cleanup", "cleanup"),
        ("tombstone-retention-time", "tombstone_retention_time"),
        ("max-batch-bytes", "max_batch_bytes"),
        ("max-record-bytes", "max_record_bytes"),
        ("min-durability", "min_durability"),
        ("default-durability", "default_durability"),
        ("compression", "allowed_compression"),
        ("validate-records", "validate_records"),
        ("batch-format", "batch_format"),
    ] {
        let text = form.get(flag);
        if text.is_empty() {
            continue;
        }
        if text != DEFAULT {
            let read = set(&mut changes.config, flag, text);
            read.map_err(|what| format!("{}: {what}", flag.replace('-', " ")))?;
        }
        changes.mask.push(path.to_owned());
        changes.arguments += &format!(" --{flag} {}", argument(text));
    }
    Ok(changes)
}

fn set(config: &mut TopicConfig, flag: &str, text: &str) -> Result<(), String> {
    match flag {
        "retention-time" => config.retention_time = Some(wire_duration(text)?),
        "retention-bytes" => config.retention_bytes = Some(units::parse_bytes(text)?),
        "cleanup" => config.cleanup = choice(&CLEANUPS, text)?.into(),
        "tombstone-retention-time" => {
            config.tombstone_retention_time = Some(wire_duration(text)?);
        }
        "max-batch-bytes" => config.max_batch_bytes = Some(small_bytes(text)?),
        "max-record-bytes" => config.max_record_bytes = Some(small_bytes(text)?),
        "min-durability" => config.min_durability = choice(&DURABILITIES, text)?.into(),
        "default-durability" => config.default_durability = choice(&DURABILITIES, text)?.into(),
        "compression" => config.allowed_compression = choice(&COMPRESSIONS, text)?.into(),
        "validate-records" => {
            config.validate_records = Some(choice(&[("on", true), ("off", false)], text)?);
        }
        _ => config.batch_format = choice(&FORMATS, text)?.into(),
    }
    Ok(())
}

fn choice<T: Copy>(choices: &[(&str, T)], text: &str) -> Result<T, String> {
    let found = choices.iter().find(|(name, _)| *name == text);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        format!("{} is not one of {}", crate::quote::quote(text), names.join(", "))
    })
}

fn wire_duration(text: &str) -> Result<prost_types::Duration, String> {
    let time = units::parse_duration(text)?;
    prost_types::Duration::try_from(time).map_err(|_| format!("{text} is too long"))
}

fn small_bytes(text: &str) -> Result<u32, String> {
    let bytes = units::parse_bytes(text)?;
    u32::try_from(bytes).map_err(|_| format!("{text} is over the limit of 4 GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_read_as_the_command_line_reads_flags() {
        let form = FormFields::parse(
            "retention-time=7d&cleanup=compact%2Bdelete&max-batch-bytes=default&\
             validate-records=off",
        );
        let changes = parse(&form).unwrap();
        let paths = ["retention_time", "cleanup", "max_batch_bytes", "validate_records"];
        assert_eq!(changes.mask, paths);
        assert_eq!(changes.config.retention_time.unwrap().seconds, 604_800);
        assert_eq!(changes.config.cleanup(), CleanupPolicy::CompactAndDelete);
        assert_eq!(changes.config.max_batch_bytes, None, "reset");
        assert_eq!(
            changes.arguments,
            " --retention-time 7d --cleanup compact+delete --max-batch-bytes default \
             --validate-records off"
        );
        assert!(parse(&FormFields::default()).unwrap().mask.is_empty());
    }

    #[test]
    fn wrong_values_are_named() {
        for (form, part) in [
            ("retention-time=7", "retention time: invalid duration"),
            ("retention-bytes=x", "retention bytes: invalid size"),
            ("cleanup=burn", "\"burn\" is not one of delete, compact, compact+delete"),
            ("max-record-bytes=5GiB", "over the limit of 4 GiB"),
            ("validate-records=yes", "not one of on, off"),
        ] {
            let error = parse(&FormFields::parse(form)).unwrap_err();
            assert!(error.contains(part), "{form}: {error}");
        }
    }

    #[test]
    fn values_of_a_topic_are_valid_in_its_form() {
        let config = TopicConfig {
            retention_bytes: Some(1 << 30),
            max_batch_bytes: Some(8 << 20),
            max_record_bytes: Some(1 << 20),
            min_durability: Durability::None.into(),
            default_durability: Durability::QuorumSynced.into(),
            allowed_compression: AllowedCompression::Any.into(),
            batch_format: BatchFormat::Helix.into(),
            ..TopicConfig::default()
        };
        let is_value = |field: &SettingField| field.value != UNLIMITED;
        for field in fields(Some(&config)).into_iter().filter(is_value) {
            let form = format!("{}={}", field.flag, super::super::form::encode(&field.value));
            let read = parse(&FormFields::parse(&form));
            assert_eq!(read.unwrap().mask.len(), 1, "{form}");
        }
        assert!(fields(None).iter().all(|field| field.value.is_empty()));
    }
}
