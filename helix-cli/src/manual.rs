//! Generates docs/cli.md from the clap definitions and the result schemas, and tests that the file
//! is current. `HELIX_BLESS=1` writes the file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use clap::{Arg, ArgAction, Command, CommandFactory};
use helix_proto::FILE_DESCRIPTOR_SET;
use prost_types::FileDescriptorSet;
use serde_json::Value;

use crate::args::Cli;
use crate::{context, exit, output, position, reason_pages, result_schemas, schema, template};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");

/// Keys of results that are not fields of an API message.
const OWN_KEYS: &str = "\
acked_behind acked_records addr allocated_segments backup_start_offset caught_up_ms cause \
certificate changed check checkpoint_bytes checkpoint_index codec codecs commit compacted \
compacted_batches compressed_batches connections_max context cpus crash damaged default dir \
displaced doubled dropped entries explanation failed_line failover_all_ms failover_ms failure \
file file_bytes files findings first_byte first_index flag frame_bytes gaps grpc_code has_vote \
help hint in_flight_records is_current is_reachable is_unread kafka kept_index key_base64 \
killed_at_seconds last_term later_files led_shards leftovers logs mb_per_sec meaning missing \
missing_offsets missing_parts moves_back_to new_records next_byte node_count obstacles \
out_of_order owned_count partition_id partitions_led pid ratio reachable_nodes read \
ready_segments record_bytes records_per_sec records_read reported_by restart_ms resumed_records \
revoked rule sampled_batches says_healthy seconds segments shard_count shards_led stored_bytes \
streams sync_p50_us sync_p99_us target_count throttled timeline tls token_file tombstones_below \
torn_bytes uncertain_records unwritten_bytes used_bytes value_base64 variable wanted warnings \
what why write write_after";

const INTRODUCTION: &str = "\
# The command line

For users of `helix`: output, exit codes, errors, and each command with its options and results.
Most commands are a noun and a verb, such as `helix topic create`. `helix cheat` prints examples of
every command, `helix COMMAND --help` the options below, and `helix explain REASON` the explanation
of an error. Results go to standard output, messages to standard error. Progress is shown only on a
terminal. This page is generated from the program, and a test checks that it is current.

## Output

`-o` selects the output format of every command:

| | |
|---|---|
| `table` | for people, the default; sizes are rounded |
| `wide` | like `table`, plus the columns marked *wide* below |
| `json` | one document. Keys are the field names of the API messages and are stable |
| `jsonl` | a line for each element, for `jq`, `grep` and similar tools |

Durations are as in protobuf's JSON, `\"43200s\"` or `\"0.000340s\"`, unless their name has a unit.
`consume`, `tail` and `cluster health --watch` print one JSON document after the other. `--schema`
prints the JSON Schema of a command's results, with that of errors under `$defs`, and exits. Below,
a `?` marks fields that may be null or absent. `-q` prints only results and errors. Colours are used
only on a terminal, and never if `NO_COLOR` is set.

With `-o json` an error is one line of JSON on standard error:
`{\"error\": {\"reason\", \"code\", \"may_have_applied\", \"message\", \"hint\"}}`.
`reason` is null if the service gave none; `code` is the gRPC code.

Tables show no column without values, and on a terminal they cut long texts to its width; `-o wide`
shows everything. `consume` and `tail` print partition, offset, time, key and value on a terminal,
and values only into a pipe or file.

Text of other users, such as names of clients, metadata and messages, is escaped in tables, texts
and errors: characters that control a terminal, break a line or change the direction of writing are
shown as `\\u{1b}`. JSON has the text as it is. Records are escaped where a terminal shows them in
columns; a pipe, a file and `--format` get the bytes as they are.

After a second of waiting for the service, standard error says what a command waits for, unless
`--quiet` or, without a terminal, `-o json` is given. `--timeout` bounds every command; for
`produce` it is the time for each batch.
";

const KEYS: &str = "\
## Keys and partitions

With `helix produce --key-separator :`, the text before the first `:` of a line is the record's key.
A record with a key goes to partition `crc32(key) mod partitions`, with the CRC-32 of zlib, in every
client ([clients.md](clients.md#test-vectors) has test vectors). Records without a key go to one
partition until a batch is full, then to the next. `--partition` overrides both.
";

const OUTPUT_AND_INTERRUPTS: &str = "\
## Closed output

If the reader of standard output has gone (`helix consume orders | head`), the exit code is 0 only
if everything else succeeded. A failure keeps its exit code, and a command does all of its work.
Commands without an end (`--follow`, `--watch`, `top`) stop as soon as the reader has gone, also
while they have nothing to print; a member of a group commits and leaves.

## Interrupts

Ctrl-C, SIGTERM and the end of the terminal stop a command within a second, whatever takes its
output. `produce` first waits for the acks of what it sent, `dev` stops its nodes and `demo` removes
its data: at most 35 s, or 1 s after another signal. What an interrupted command had asked for may
still be done.
";

fn manual() -> String {
    let mut text = INTRODUCTION.to_owned();
    let mut section = |title: &str, before: &str, block: &str| {
        let _ = write!(text, "\n## {title}\n\n{before}```\n{block}\n```\n");
    };
    section("Clusters and contexts", "", context::HELP);
    let ranges = "Positions of `consume`, `offsets`, `topic trim`, `group seek` and `group reset`, \
                  in each partition:\n\n";
    section("Positions", ranges, position::HELP);
    text += "\n`--from A..B` starts at A and stops before B; either may be omitted.\n";
    let mut section = |title: &str, before: &str, block: &str| {
        let _ = write!(text, "\n## {title}\n\n{before}```\n{block}\n```\n");
    };
    let forms = "`consume -f FORMAT` and `tail -f FORMAT` print records in a custom format, like \
                 `'%p %o %t %k %v\\n'`. `produce -f FORMAT` reads lines of such a format:\n\n";
    section("Format strings", forms, template::HELP);
    let _ = write!(text, "\n{KEYS}");
    let _ = write!(text, "\n## Exit codes\n\n```\n{}\n```\n", exit::CODES);
    let _ = write!(text, "\n{OUTPUT_AND_INTERRUPTS}");
    text += "\n## Errors\n\n\
             An error has three parts: the failed action with its reason in brackets, the likely \
             cause,\nand what to try. `helix explain REASON` explains a reason.\n\n\
             | reason | gRPC code | meaning |\n|---|---|---|\n";
    for page in reason_pages::pages() {
        let page = serde_json::to_value(page).unwrap();
        let word = |key: &str| page[key].as_str().unwrap_or("").to_owned();
        let _ =
            writeln!(text, "| {} | {} | {} |", word("reason"), word("grpc_code"), word("meaning"));
    }
    let mut command = Cli::command();
    command.build();
    text += "\n## Options of every command\n\n";
    text += &options(command.get_arguments().filter(|arg| arg.is_global_set()));
    text += "\n## Commands\n";
    for command in command.get_subcommands() {
        describe(&mut text, &[], command);
    }
    text
}

fn describe(text: &mut String, before: &[&str], command: &Command) {
    // The help command is clap's.
    if command.get_name() == "help" {
        return;
    }
    let path = [before, &[command.get_name()]].concat();
    let words = path.join(" ");
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    // The long help repeats the short one as its first paragraph.
    let long_about = command.get_long_about().map(ToString::to_string);
    let details =
        long_about.and_then(|long| long.split_once("\n\n").map(|(_, details)| details.to_owned()));
    let has_commands = command.get_subcommands().any(|it| it.get_name() != "help");
    if !has_commands || result_schemas::schema(&words).is_some() {
        let _ = write!(text, "\n### helix {words}\n\n{about}.\n");
        if let Some(details) = &details {
            let _ = write!(text, "\n{details}\n");
        }
        let own = command.get_arguments().filter(|arg| !arg.is_global_set());
        let own: Vec<_> = own.filter(|arg| !arg.is_hide_set() && arg.get_id() != "help").collect();
        if words == "server" {
            *text +=
                "\nThe options are the settings of a node: [configuration.md](configuration.md).\n";
        } else if !own.is_empty() {
            let _ = write!(text, "\n{}", options(own.into_iter()));
        }
        if let Some(schema) = result_schemas::schema(&words) {
            let _ = write!(text, "\nPrints {}.\n", shape(&schema));
        }
    }
    for command in command.get_subcommands() {
        describe(text, &path, command);
    }
}

fn options<'a>(args: impl Iterator<Item = &'a Arg>) -> String {
    let mut text = "| | |\n|---|---|\n".to_owned();
    for arg in args {
        let names = arg.get_value_names().unwrap_or_default();
        let mut value = names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
        if !takes_value {
            value.clear();
        }
        let short = arg.get_short().map(|it| format!("-{it}, ")).unwrap_or_default();
        let name = match arg.get_long() {
            Some(long) => format!("{short}--{long} {value}"),
            None => value,
        };
        let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let values: Vec<_> =
            arg.get_possible_values().iter().map(|it| it.get_name().to_owned()).collect();
        if takes_value && !values.is_empty() {
            let _ = write!(help, ": {}", values.join(", "));
        }
        let defaults: Vec<_> =
            arg.get_default_values().iter().map(|it| it.to_string_lossy()).collect();
        let is_in_help = arg.is_hide_default_value_set() || defaults.concat().is_empty();
        if takes_value && !is_in_help {
            let _ = write!(help, " [default: {}]", defaults.join(","));
        }
        let _ = writeln!(text, "| `{}` | {} |", name.trim(), help.replace('|', "\\|"));
    }
    text
}

/// Describes the fields of a result, with nested fields in brackets.
fn shape(schema: &Value) -> String {
    if schema["type"] == "array" {
        return format!("a list of {}", fields(&schema["items"]));
    }
    fields(schema)
}

fn fields(schema: &Value) -> String {
    let Some(properties) = schema["properties"].as_object() else { return kind(schema) };
    let is_required = |name: &str| {
        schema["required"].as_array().is_some_and(|required| required.contains(&name.into()))
    };
    let fields = properties.iter().map(|(name, of)| field(name, of, is_required(name)));
    format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
}

fn field(name: &str, field: &Value, is_required: bool) -> String {
    let wide = if field["x-wide"] == true { " (wide)" } else { "" };
    let (object, may_be_null) = not_null(field);
    let null = if may_be_null || !is_required { "?" } else { "" };
    if object["properties"].is_object() {
        format!("`{name}`{null}{wide} {}", fields(object))
    } else if object["items"]["properties"].is_object() {
        format!("`{name}`{null}{wide} [{}]", fields(&object["items"]))
    } else {
        format!("`{name}`{null}{wide}")
    }
}

/// Returns the schema of a present field, and true if the field may be null.
fn not_null(field: &Value) -> (&Value, bool) {
    match field["anyOf"].as_array() {
        Some(forms) => {
            let present = forms.iter().find(|form| form["type"] != "null").unwrap_or(field);
            (present, true)
        }
        None => {
            let types = field["type"].as_array();
            (field, types.is_some_and(|types| types.contains(&"null".into())))
        }
    }
}

fn kind(schema: &Value) -> String {
    schema["type"].as_str().unwrap_or("a value").to_owned()
}

/// Returns the words of every command.
fn commands(before: &[&str], command: &Command) -> Vec<String> {
    let mut all = Vec::new();
    for inner in command.get_subcommands() {
        let path = [before, &[inner.get_name()]].concat();
        all.push(path.join(" "));
        all.extend(commands(&path, inner));
    }
    all
}

#[test]
fn docs_cli_md_is_current() {
    let manual = manual();
    assert!(manual.contains("### helix topic create"), "{manual}");
    if std::env::var_os("HELIX_BLESS").is_some() {
        crate::files::replace(PATH.as_ref(), manual.as_bytes()).unwrap();
    }
    let written = crate::files::read_text(PATH.as_ref()).unwrap().unwrap_or_default();
    let differs = written.lines().zip(manual.lines()).find(|(written, made)| written != made);
    assert!(
        written == manual,
        "docs/cli.md is out of date; run HELIX_BLESS=1 cargo test -p helix-cli --bins manual. \
         First line that differs: {differs:?}"
    );
}

#[test]
fn result_keys_are_api_field_names_or_listed() {
    let files: FileDescriptorSet = prost::Message::decode(FILE_DESCRIPTOR_SET).unwrap();
    let messages = files.file.iter().filter(|file| file.package() == "helix.log.v1");
    let messages = messages.flat_map(|file| &file.message_type);
    let fields = messages.flat_map(|message| &message.field);
    let api_fields: BTreeSet<&str> = fields.map(|field| field.name()).collect();
    assert!(api_fields.contains("high_watermark"));
    let own: BTreeSet<&str> = OWN_KEYS.split_whitespace().collect();
    assert!(own.is_disjoint(&api_fields), "{:?}", own.intersection(&api_fields));
    let mut keys = BTreeSet::new();
    for command in commands(&[], &Cli::command()) {
        if let Some(found) = result_schemas::schema(&command) {
            schema::visit(&found, &mut |name, _| {
                keys.insert(name.to_owned());
            });
        }
    }
    let known: BTreeSet<&str> = api_fields.union(&own).copied().collect();
    let unknown: Vec<_> = keys.iter().filter(|key| !known.contains(key.as_str())).collect();
    assert!(unknown.is_empty(), "keys that are neither in the API nor listed: {unknown:?}");
    let unused: Vec<_> = own.iter().filter(|key| !keys.contains(**key)).collect();
    assert!(unused.is_empty(), "listed keys without a result: {unused:?}");
}

/// Usual width of a value, as a table shows it.
fn usual_width(name: &str, field: &Value) -> usize {
    let is = |kind: &str| {
        field["type"] == kind
            || field["type"].as_array().is_some_and(|types| types.contains(&kind.into()))
    };
    match name {
        _ if field["x-duration"] == true || name.ends_with("_bytes") => 8,
        "kind" => 8,
        "role" | "state" | "status" => 11,
        "leader" => 4,
        _ if name.ends_with("_id") => 4,
        _ if is("integer") => 7,
        _ if is("boolean") || is("array") => 5,
        // A long text is cut, but not below this width.
        _ => output::CUT_WIDTH_MIN,
    }
}

/// Returns the width of the default table of rows of this schema; `None` if the rows contain lists,
/// which are printed one after the other.
fn table_width(rows: &Value) -> Option<usize> {
    let mut width = 0;
    for (name, field) in rows["properties"].as_object()? {
        let (inner, _) = not_null(field);
        if field["x-wide"] == true {
            continue;
        }
        width += match inner {
            list if list["items"]["properties"].is_object() => return None,
            object if object["properties"].is_object() => table_width(object)?,
            leaf => output::heading(name).len().max(usual_width(name, leaf)),
        };
        width += 2;
    }
    Some(width.saturating_sub(2))
}

#[test]
fn tables_fit_80_columns() {
    let mut count = 0;
    for command in commands(&[], &Cli::command()) {
        let Some(found) = result_schemas::schema(&command) else { continue };
        let mut lists = vec![&found];
        lists
            .extend(found["properties"].as_object().into_iter().flat_map(|fields| fields.values()));
        for rows in lists.into_iter().map(|list| &not_null(list).0["items"]) {
            let Some(width) = table_width(rows) else { continue };
            assert!(width <= 80, "the table of helix {command} has {width} columns: {rows}");
            count += 1;
        }
    }
    assert!(count > 15, "{count}");
}

#[test]
fn short_flags_have_one_meaning() {
    let mut meanings: BTreeMap<char, BTreeSet<String>> = BTreeMap::new();
    let mut commands = vec![Cli::command()];
    while let Some(command) = commands.pop() {
        for arg in command.get_arguments() {
            if let (Some(short), Some(long)) = (arg.get_short(), arg.get_long()) {
                // `produce` writes to one partition, other commands read several.
                let long = if long == "partition" { "partitions" } else { long };
                meanings.entry(short).or_default().insert(long.to_owned());
            }
        }
        commands.extend(command.get_subcommands().cloned());
    }
    let several: Vec<_> = meanings.iter().filter(|(_, longs)| longs.len() > 1).collect();
    assert!(several.is_empty(), "{several:?}");
    assert!(meanings.len() >= 8, "{meanings:?}");
}

#[test]
fn most_commands_have_a_result_schema() {
    let all = commands(&[], &Cli::command());
    let printing: Vec<_> = all.iter().filter(|it| result_schemas::schema(it).is_some()).collect();
    assert!(printing.len() > 20, "{printing:?}");
    assert!(result_schemas::schema("server").is_none());
}
