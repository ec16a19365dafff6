//! Durations in results. In JSON they have the form of the API: seconds with a fraction, as in
//! protobuf's JSON. In tables they have a form for people.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Duration;

use helix_proto::time;
use prost_types::Duration as WireDuration;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::units;

/// Durations of at least this long are shown without their fraction.
const WHOLE_SECONDS_MIN: Duration = Duration::from_secs(60);

/// A duration of the API: `43200s`, `0.000340s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ApiDuration(WireDuration);

impl ApiDuration {
    /// Returns the duration. A negative one counts as unset.
    pub(crate) fn new(wire: WireDuration) -> Option<Self> {
        time::duration(wire).ok().map(|_| Self(wire))
    }

    pub(crate) fn is_zero(self) -> bool {
        time::duration(self.0).is_ok_and(|time| time.is_zero())
    }
}

impl Serialize for ApiDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl JsonSchema for ApiDuration {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        // The mark by which `show` finds the durations of a result.
        json_schema!({
            "type": "string",
            "pattern": r"^[0-9]+(\.[0-9]{3,9})?s$",
            "x-duration": true,
        })
    }
}

/// Puts the durations of a result, whose fields have these names, into the form for people.
pub(crate) fn humanize(result: &mut Value, names: &BTreeSet<String>) {
    match result {
        Value::Array(items) => items.iter_mut().for_each(|item| humanize(item, names)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if names.contains(name) => *text = human(text),
                    inner => humanize(inner, names),
                }
            }
        }
        _ => {}
    }
}

fn human(text: &str) -> String {
    let parsed = text.parse::<WireDuration>().ok().and_then(|wire| time::duration(wire).ok());
    match parsed {
        Some(time) if time >= WHOLE_SECONDS_MIN => {
            units::duration(Duration::from_secs(time.as_secs()))
        }
        Some(time) if time.subsec_nanos() == 0 => units::duration(time),
        Some(time) => units::measured(time),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;

    #[derive(Serialize, JsonSchema)]
    struct Row {
        retention_time: Option<ApiDuration>,
        #[schemars(extend("x-wide" = true))]
        sync_p50: Option<ApiDuration>,
        name: &'static str,
    }

    #[test]
    fn json_has_the_form_of_the_api_and_tables_a_form_for_people() {
        for (seconds, nanos, json, people) in [
            (0, 0, "0s", "0s"),
            (43_200, 0, "43200s", "12h"),
            (0, 340_000, "0.000340s", "0.34 ms"),
            (1, 500_000_000, "1.500s", "1.50 s"),
            (3_725, 1, "3725.000000001s", "1h2m5s"),
        ] {
            let duration = ApiDuration::new(WireDuration { seconds, nanos });
            assert_eq!(serde_json::to_value(duration).unwrap(), json);
            assert_eq!(human(json), people);
        }
        assert_eq!(ApiDuration::new(WireDuration { seconds: -1, nanos: 0 }), None);
    }

    #[test]
    fn only_durations_of_a_result_are_changed() {
        let schema = schema::of::<Row>();
        assert_eq!(schema["properties"]["sync_p50"]["type"][1], "null", "{schema}");
        let names = schema::duration_fields(&schema);
        assert_eq!(names.iter().collect::<Vec<_>>(), ["retention_time", "sync_p50"]);
        let retention_time = ApiDuration::new(WireDuration { seconds: 90, nanos: 0 });
        let row = Row { retention_time, sync_p50: None, name: "90s" };
        let mut shown = serde_json::json!([row]);
        humanize(&mut shown, &names);
        let expected =
            serde_json::json!([{"retention_time": "1m30s", "sync_p50": null, "name": "90s"}]);
        assert_eq!(shown, expected);
    }
}
