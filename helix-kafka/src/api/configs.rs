//! DescribeConfigs and IncrementalAlterConfigs: Kafka's names of Helix's topic settings.

use std::time::Duration;

use futures_util::future::join_all;
use helix_client::proto::log::v1::{BatchFormat, CleanupPolicy, TopicConfig};
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::describe_configs_response::{
    DescribeConfigsResourceResult, DescribeConfigsResult,
};
use kafka_protocol::messages::incremental_alter_configs_request::AlterConfigsResource;
use kafka_protocol::messages::incremental_alter_configs_response::AlterConfigsResourceResponse;
use kafka_protocol::messages::{
    DescribeConfigsRequest, DescribeConfigsResponse, IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
};

use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Kinds of resources.
const TOPIC: i8 = 2;
const BROKER: i8 = 4;

/// Operations on a setting.
const SET: i8 = 0;
const DELETE: i8 = 1;

/// Sources of a value: the topic, and the gateway.
const TOPIC_SOURCE: i8 = 1;
const DEFAULT_SOURCE: i8 = 5;

/// First version of DescribeConfigs with types.
const TYPES_SINCE: i16 = 3;

/// Types of settings.
const STRING_TYPE: i8 = 2;
const INT_TYPE: i8 = 3;
const LONG_TYPE: i8 = 5;
const LIST_TYPE: i8 = 7;

/// Reason why a setting is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConfigRefusal {
    #[error("setting {0:?} has no counterpart; leave it out")]
    Unknown(String),
    #[error("{name} is {value:?}; it must be {expected}")]
    Value { name: String, value: String, expected: &'static str },
}

impl ConfigRefusal {
    pub(crate) fn into_code(self) -> (ResponseError, String) {
        (ResponseError::InvalidConfig, self.to_string())
    }
}

/// A setting with a counterpart: Kafka's name, the field of `TopicConfig`, and its type.
struct MappedConfig {
    name: &'static str,
    field: &'static str,
    kind: i8,
}

const MAPPED: [MappedConfig; 6] = [
    MappedConfig { name: "cleanup.policy", field: "cleanup", kind: LIST_TYPE },
    MappedConfig {
        name: "delete.retention.ms",
        field: "tombstone_retention_time",
        kind: LONG_TYPE,
    },
    MappedConfig { name: BATCH_FORMAT, field: "batch_format", kind: STRING_TYPE },
    MappedConfig { name: "max.message.bytes", field: "max_batch_bytes", kind: INT_TYPE },
    MappedConfig { name: "retention.bytes", field: "retention_bytes", kind: LONG_TYPE },
    MappedConfig { name: "retention.ms", field: "retention_time", kind: LONG_TYPE },
];

/// Setting of Helix without a counterpart in Kafka.
const BATCH_FORMAT: &str = "helix.batch.format";

/// Settings with one value, which Helix always has.
const FIXED: [(&str, &str); 3] = [
    ("compression.type", "producer"),
    ("message.timestamp.type", "CreateTime"),
    ("unclean.leader.election.enable", "false"),
];

/// Setting for which every value up to a majority is less than what Helix promises.
const MIN_IN_SYNC: &str = "min.insync.replicas";

fn refused(name: &str, value: &str, expected: &'static str) -> ConfigRefusal {
    ConfigRefusal::Value { name: name.to_owned(), value: value.to_owned(), expected }
}

/// Reads a number of milliseconds or bytes; -1 means no limit, which is 0 in Helix.
fn limit(name: &str, value: &str) -> Result<u64, ConfigRefusal> {
    match value.trim() {
        "-1" => Ok(0),
        number => match number.parse::<u64>() {
            // 0 would be no limit.
            Ok(0) => Ok(1),
            Ok(number) => Ok(number),
            Err(_) => Err(refused(name, value, "a number, or -1 for no limit")),
        },
    }
}

fn duration(millis: u64) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(Duration::from_millis(millis)).ok()
}

/// Puts a setting into `config`; `None` unsets it. Returns the changed field, if there is one.
///
/// # Errors
/// The setting has no counterpart, or its value none.
pub(crate) fn apply_config(
    config: &mut TopicConfig,
    name: &str,
    value: Option<&str>,
    nodes: usize,
) -> Result<Option<&'static str>, ConfigRefusal> {
    if let Some((_, only)) = FIXED.iter().find(|(fixed, _)| *fixed == name) {
        return match value {
            None => Ok(None),
            Some(value) if value.eq_ignore_ascii_case(only) => Ok(None),
            Some(value) => Err(refused(name, value, only)),
        };
    }
    if name == MIN_IN_SYNC {
        let majority = nodes / 2 + 1;
        return match value.map(|value| (value, value.parse::<usize>())) {
            None => Ok(None),
            Some((_, Ok(count))) if (1..=majority).contains(&count) => Ok(None),
            Some((value, _)) => Err(refused(name, value, "at most a majority of the nodes")),
        };
    }
    let Some(mapped) = MAPPED.iter().find(|mapped| mapped.name == name) else {
        return Err(ConfigRefusal::Unknown(name.to_owned()));
    };
    match mapped.field {
        "retention_time" => {
            let millis = value.map(|value| limit(name, value)).transpose()?;
            config.retention_time = millis.and_then(duration);
        }
        "retention_bytes" => {
            config.retention_bytes = value.map(|value| limit(name, value)).transpose()?;
        }
        "tombstone_retention_time" => {
            let number = |value: &str| {
                value.trim().parse().map_err(|_| refused(name, value, "a number of milliseconds"))
            };
            config.tombstone_retention_time = value.map(number).transpose()?.and_then(duration);
        }
        "max_batch_bytes" => {
            let number = |value: &str| {
                value.trim().parse().map_err(|_| refused(name, value, "a number of bytes"))
            };
            config.max_batch_bytes = value.map(number).transpose()?;
        }
        "batch_format" => {
            let format = match value {
                None => BatchFormat::Unspecified,
                Some("helix") => BatchFormat::Helix,
                Some("kafka") => BatchFormat::Kafka,
                Some("any") => BatchFormat::Any,
                Some(value) => return Err(refused(name, value, "helix, kafka or any")),
            };
            config.batch_format = format.into();
        }
        _ => {
            let mut words: Vec<_> = match value {
                None => Vec::new(),
                Some(value) => value.split(',').map(str::trim).collect(),
            };
            words.sort_unstable();
            let policy = match &words[..] {
                [] => CleanupPolicy::Unspecified,
                ["delete"] => CleanupPolicy::Delete,
                ["compact"] => CleanupPolicy::Compact,
                ["compact", "delete"] => CleanupPolicy::CompactAndDelete,
                _ => {
                    let value = value.unwrap_or_default();
                    return Err(refused(name, value, "delete, compact, or both"));
                }
            };
            config.cleanup = policy.into();
        }
    }
    Ok(Some(mapped.field))
}

/// Returns the value of a mapped setting.
fn shown(config: &TopicConfig, field: &str) -> String {
    let millis = |time: &Option<prost_types::Duration>| {
        let time = time.as_ref().and_then(|time| helix_proto::time::duration(*time).ok());
        time.unwrap_or_default().as_millis()
    };
    let unlimited = |number: u128| match number {
        0 => "-1".to_owned(),
        number => number.to_string(),
    };
    match field {
        "retention_time" => unlimited(millis(&config.retention_time)),
        "retention_bytes" => unlimited(u128::from(config.retention_bytes())),
        "tombstone_retention_time" => millis(&config.tombstone_retention_time).to_string(),
        "max_batch_bytes" => config.max_batch_bytes().to_string(),
        "batch_format" => match config.batch_format() {
            BatchFormat::Kafka => "kafka",
            BatchFormat::Any => "any",
            BatchFormat::Helix | BatchFormat::Unspecified => "helix",
        }
        .to_owned(),
        _ => match config.cleanup() {
            CleanupPolicy::Compact => "compact",
            CleanupPolicy::CompactAndDelete => "compact,delete",
            CleanupPolicy::Delete | CleanupPolicy::Unspecified => "delete",
        }
        .to_owned(),
    }
}

/// Answers a request for settings.
pub(crate) async fn describe_configs(
    context: &RequestContext,
    request: DescribeConfigsRequest,
) -> DescribeConfigsResponse {
    let results = request.resources.into_iter().map(|resource| async move {
        let result = DescribeConfigsResult::default()
            .with_resource_type(resource.resource_type)
            .with_resource_name(resource.resource_name.clone());
        match configs_of(context, &resource).await {
            Ok(configs) => {
                let keys = resource.configuration_keys;
                let is_wanted = |config: &DescribeConfigsResourceResult| {
                    keys.as_ref().is_none_or(|keys| keys.is_empty() || keys.contains(&config.name))
                };
                result.with_configs(configs.into_iter().filter(is_wanted).collect())
            }
            Err((code, what)) => {
                result.with_error_code(code.code()).with_error_message(Some(text(what)))
            }
        }
    });
    DescribeConfigsResponse::default().with_results(join_all(results).await)
}

async fn configs_of(
    context: &RequestContext,
    resource: &DescribeConfigsResource,
) -> Result<Vec<DescribeConfigsResourceResult>, (ResponseError, String)> {
    let entry = |name: &str, value: String, kind: i8, is_mapped: bool| {
        let source = if is_mapped { TOPIC_SOURCE } else { DEFAULT_SOURCE };
        let entry = DescribeConfigsResourceResult::default()
            .with_name(text(name))
            .with_value(Some(text(value)))
            .with_read_only(!is_mapped)
            .with_config_source(source);
        match context.version >= TYPES_SINCE {
            true => entry.with_config_type(kind),
            false => entry,
        }
    };
    let fixed = FIXED.map(|(name, value)| entry(name, value.to_owned(), STRING_TYPE, false));
    match resource.resource_type {
        TOPIC => {
            let admin = context.upstream.client().admin();
            let topic = admin
                .topic(&resource.resource_name)
                .await
                .map_err(|error| (code_of(&error, CallTarget::Topic), error.message.clone()))?;
            let config = topic.config.unwrap_or_default();
            let mapped = MAPPED
                .iter()
                .map(|mapped| entry(mapped.name, shown(&config, mapped.field), mapped.kind, true));
            let majority = topic.replication_factor / 2 + 1;
            let min_in_sync = entry(MIN_IN_SYNC, majority.to_string(), INT_TYPE, false);
            Ok(mapped.chain(fixed).chain([min_in_sync]).collect())
        }
        BROKER => {
            let is_on = context.state.rules.auto_create_partitions.is_some();
            let limit = context.state.limits.request_bytes;
            let own = [
                entry("auto.create.topics.enable", is_on.to_string(), 1, false),
                entry("message.max.bytes", limit.to_string(), INT_TYPE, false),
            ];
            Ok(own.into_iter().chain(fixed).collect())
        }
        kind => {
            let what = format!("resources of kind {kind} have no settings here");
            Err((ResponseError::InvalidRequest, what))
        }
    }
}

/// Answers a request to change settings.
pub(crate) async fn alter_configs(
    context: &RequestContext,
    request: IncrementalAlterConfigsRequest,
) -> IncrementalAlterConfigsResponse {
    let validate_only = request.validate_only;
    let results = request.resources.into_iter().map(|resource| async move {
        let response = AlterConfigsResourceResponse::default()
            .with_resource_type(resource.resource_type)
            .with_resource_name(resource.resource_name.clone());
        match alter(context, resource, validate_only).await {
            Ok(()) => response,
            Err((code, what)) => {
                response.with_error_code(code.code()).with_error_message(Some(text(what)))
            }
        }
    });
    IncrementalAlterConfigsResponse::default().with_responses(join_all(results).await)
}

async fn alter(
    context: &RequestContext,
    resource: AlterConfigsResource,
    validate_only: bool,
) -> Result<(), (ResponseError, String)> {
    if resource.resource_type != TOPIC {
        let what = "only the settings of topics can be changed; start the gateway with others";
        return Err((ResponseError::InvalidRequest, what.to_owned()));
    }
    let failed =
        |error: helix_client::Error| (code_of(&error, CallTarget::Topic), error.message.clone());
    let admin = context.upstream.client().admin();
    let topic = admin.topic(&resource.resource_name).await.map_err(failed)?;
    let nodes = usize::try_from(topic.replication_factor).unwrap_or(1);
    let mut config = TopicConfig::default();
    let mut fields = Vec::new();
    for change in &resource.configs {
        let value = match change.config_operation {
            SET => Some(change.value.as_deref().unwrap_or_default()),
            DELETE => None,
            operation => {
                let what =
                    format!("operation {operation} on {}; use set or delete", change.name.as_str());
                return Err((ResponseError::InvalidConfig, what));
            }
        };
        let field = apply_config(&mut config, &change.name, value, nodes);
        fields.extend(field.map_err(ConfigRefusal::into_code)?);
    }
    if validate_only || fields.is_empty() {
        return Ok(());
    }
    let name: &str = &resource.resource_name;
    admin.update_topic(name, &config, &fields).await.map(drop).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_the_values_that_they_are_given() {
        for (name, value) in [
            ("retention.ms", "604800000"),
            ("retention.ms", "-1"),
            ("retention.bytes", "1073741824"),
            ("retention.bytes", "-1"),
            ("max.message.bytes", "1000"),
            ("delete.retention.ms", "0"),
            ("cleanup.policy", "compact"),
            ("cleanup.policy", "compact,delete"),
            ("helix.batch.format", "any"),
        ] {
            let mut config = TopicConfig::default();
            let field = apply_config(&mut config, name, Some(value), 3).unwrap().unwrap();
            assert_eq!(shown(&config, field), value, "{name}");
        }
    }

    #[test]
    fn other_settings_are_refused_by_name() {
        let apply = |name: &str, value: &str| {
            apply_config(&mut TopicConfig::default(), name, Some(value), 3)
        };
        for (name, value) in [
            ("segment.bytes", "1"),
            ("retention.ms", "soon"),
            ("cleanup.policy", "none"),
            ("compression.type", "gzip"),
            ("min.insync.replicas", "3"),
            ("max.message.bytes", "-1"),
        ] {
            let error = apply(name, value).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        assert_eq!(apply("min.insync.replicas", "2"), Ok(None));
        assert_eq!(apply("compression.type", "producer"), Ok(None));
    }
}
