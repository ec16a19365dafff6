//! What the commands print, as JSON Schemas that are made from the types that are printed.
//! `--schema` shows one, the table leaves out what one marks, and docs/cli.md lists them all.

use std::collections::BTreeSet;

use anyhow::Context;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::commands::results;
use crate::exit::{Exit, Failure};
use crate::output;

/// Marks a field that only `-o wide` and JSON show: `#[schemars(extend("x-wide" = true))]`.
const WIDE: &str = "x-wide";

/// Schema of what is printed for a `T`, without references.
pub(crate) fn of<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let settings = settings.with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    // Names of types are nobody's business.
    schema.remove("title");
    schema.into()
}

/// Names of the fields that a table leaves out. One name stands for one thing in all of a result.
pub(crate) fn wide_fields(schema: &Value) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    visit(schema, &mut |name, field| {
        if field[WIDE] == Value::Bool(true) {
            names.insert(name.to_owned());
        }
    });
    names
}

/// Calls with every field of every object in a schema.
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

/// Prints the schema of a command's results, `path` being its words: `["topic", "list"]`.
///
/// # Errors
/// It prints none.
pub(crate) fn show(path: &[&str]) -> anyhow::Result<()> {
    let command = path.join(" ");
    let Some(schema) = results::schema(&command) else {
        let failure = Failure::new(Exit::Usage, format!("helix {command} prints no JSON"));
        return Err(failure.hint("helix --help").into());
    };
    output::write(format!("{schema:#}\n").as_bytes()).context("print the schema")
}
