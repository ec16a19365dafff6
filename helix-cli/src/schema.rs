//! JSON Schemas of results, generated from the Rust types.
//! The table format hides the fields that a schema marks as wide.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

/// Marks a field shown only by `-o wide` and JSON: `#[schemars(extend("x-wide" = true))]`.
const WIDE: &str = "x-wide";

/// Marks a field that is a duration of the API.
const DURATION: &str = "x-duration";

/// Returns the schema of `T`, without references.
pub(crate) fn of<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let settings = settings.with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    // Type names are internal.
    schema.remove("title");
    schema.into()
}

/// Returns the names of the fields that a table hides. A name has one meaning in a whole result.
pub(crate) fn wide_fields(schema: &Value) -> BTreeSet<String> {
    marked_fields(schema, WIDE)
}

/// Returns the names of the fields that are durations.
pub(crate) fn duration_fields(schema: &Value) -> BTreeSet<String> {
    marked_fields(schema, DURATION)
}

fn marked_fields(schema: &Value, mark: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    visit(schema, &mut |name, field| {
        if field[mark] == Value::Bool(true) {
            names.insert(name.to_owned());
        }
    });
    names
}

/// Calls `on_field` with every field of every object in a schema.
pub(crate) fn visit(schema: &Value, on_field: &mut impl FnMut(&str, &Value)) {
    match schema {
        Value::Object(keywords) => {
            for (keyword, value) in keywords {
                match (keyword.as_str(), value) {
                    ("properties", Value::Object(fields)) => {
                        for (name, field) in fields {
                            on_field(name, field);
                            visit(field, on_field);
                        }
                    }
                    _ => visit(value, on_field),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| visit(value, on_field)),
        _ => {}
    }
}
