//! docs/cli.md, made from the command line's definitions and the schemas of the results, so that it
//! cannot say anything else than the program does. `HELIX_BLESS=1` writes it anew.

use std::collections::BTreeSet;
use std::fmt::Write;

use clap::{Arg, ArgAction, Command, CommandFactory};
use helix_proto::FILE_DESCRIPTOR_SET;
use prost_types::FileDescriptorSet;
use serde_json::Value;

use crate::args::Cli;
use crate::commands::{explain, results};
use crate::{context, exit, position, schema, template};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");

/// Keys of results that are no field of a message: they name what only this program knows.
const OWN_KEYS: &str = "\
acked_behind acked_records addr backup_start_offset caught_up_ms changed check checkpoint_bytes \
checkpoint_index cpus crash damaged default dir displaced doubled dropped entries failed_line \
failover_all_ms failover_ms failure file file_bytes files findings first_byte first_index flag \
frame_bytes gaps grpc_code has_vote help hint in_flight_records is_current is_damaged \
is_reachable kept_index key_base64 last_term later_files led_shards leftovers logs mb_per_sec \
meaning missing new_records next_byte node_count out_of_order partition_id partitions_led pid \
reachable_nodes read ready_segments record_bytes records_per_sec records_read reported_by \
restart_ms role says_healthy seconds segments shard_count shards_led state status streams \
sync_p50_us sync_p99_us topic_count torn_bytes uptime_seconds used_bytes value_base64 variable \
wanted what why write write_after";

const INTRODUCTION: &str = "\
# The command line

One program, `helix`, whose commands are a noun and a verb: `helix topic create`. `helix cheat`
shows examples of everything, `helix COMMAND --help` what is below, and `helix explain REASON` what
an error means. Results go to standard output, everything else to standard error; progress is shown
at a terminal only. This page is made from the program, and a test holds it there.

## Output

`-o` chooses how results are printed, for every command alike:

| | |
|---|---|
| `table` | for people, the default; sizes are rounded |
| `wide` | the same with the columns that are marked *wide* below |
| `json` | one document. Keys are the names of the fields in the API's messages, and stay |
| `jsonl` | a line for each element, for `jq`, `grep` and friends |

`consume`, `tail` and `cluster health --watch` print as long as there is something to print, so
theirs is one document after the other. `--schema` prints the JSON Schema of what a command prints
and does nothing else; below, a `?` stands behind what may be null or absent. `-q` leaves out what
is said beside results and errors. Colours are used at a terminal only, and not at all where
`NO_COLOR` is set.
";

const KEYS: &str = "\
## Keys and partitions

`helix produce --key-separator :` takes what is before the first `:` of a line as the record's key.
A record with a key goes to partition `crc32(key) mod partitions`, CRC-32 as in zlib, in every
client ([api.md](api.md#partitions-of-keys) has vectors to test with). Records without a key go to
one partition until a batch is full, and then to the next. `--partition` overrides both.
";

fn manual() -> String {
    let mut text = INTRODUCTION.to_owned();
    let mut section = |title: &str, before: &str, block: &str| {
        let _ = write!(text, "\n## {title}\n\n{before}```\n{block}\n```\n");
    };
    section("Clusters and contexts", "", context::HELP);
    let ranges = "Where `consume`, `offsets` and `topic trim` begin, in each partition:\n\n";
    section("Positions", ranges, position::HELP);
    text += "\n`--from A..B` begins at A and stops before B; either may be left out.\n";
    let mut section = |title: &str, before: &str, block: &str| {
        let _ = write!(text, "\n## {title}\n\n{before}```\n{block}\n```\n");
    };
    let forms = "`consume -f FORMAT` and `tail -F FORMAT` print records in a form of your own, as \
                 `'%p %o %t %k %v\\n'`:\n\n";
    section("Format strings", forms, template::HELP);
    let _ = write!(text, "\n{KEYS}");
    let _ = write!(text, "\n## Exit codes\n\n```\n{}\n```\n", exit::CODES);
    text += "\n## Errors\n\n\
             An error has three parts: what failed, with its reason in brackets; why it may be; \
             and what to try.\n`helix explain REASON` prints the page of one.\n\n\
             | reason | gRPC code | says |\n|---|---|---|\n";
    for page in explain::pages() {
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
    // Clap's own, with the help of the others.
    if command.get_name() == "help" {
        return;
    }
    let path = [before, &[command.get_name()]].concat();
    let words = path.join(" ");
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let has_commands = command.get_subcommands().any(|it| it.get_name() != "help");
    if !has_commands || results::schema(&words).is_some() {
        let _ = write!(text, "\n### helix {words}\n\n{about}.\n");
        let own = command.get_arguments().filter(|arg| !arg.is_global_set());
        let own: Vec<_> = own.filter(|arg| !arg.is_hide_set() && arg.get_id() != "help").collect();
        if words == "server" {
            *text +=
                "\nIts options are the settings of a node: [configuration.md](configuration.md).\n";
        } else if !own.is_empty() {
            let _ = write!(text, "\n{}", options(own.into_iter()));
        }
        if let Some(schema) = results::schema(&words) {
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
        let is_said = arg.is_hide_default_value_set() || defaults.concat().is_empty();
        if takes_value && !is_said {
            let _ = write!(help, " [default: {}]", defaults.join(","));
        }
        let _ = writeln!(text, "| `{}` | {} |", name.trim(), help.replace('|', "\\|"));
    }
    text
}

/// The fields of a result in words: nested ones in brackets.
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

/// What a field holds when it is there, and whether it may be null.
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

/// Commands that print a result, by their words.
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
fn the_manual_is_the_programs() {
    let manual = manual();
    assert!(manual.contains("### helix topic create"), "{manual}");
    if std::env::var_os("HELIX_BLESS").is_some() {
        crate::files::replace(PATH.as_ref(), manual.as_bytes()).unwrap();
    }
    let written = crate::files::read_text(PATH.as_ref()).unwrap().unwrap_or_default();
    let differs = written.lines().zip(manual.lines()).find(|(written, made)| written != made);
    assert!(
        written == manual,
        "docs/cli.md is not what the program says; HELIX_BLESS=1 cargo test -p helix-cli --bins \
         manual writes it anew. First line that differs: {differs:?}"
    );
}

#[test]
fn keys_are_names_of_the_api() {
    let files: FileDescriptorSet = prost::Message::decode(FILE_DESCRIPTOR_SET).unwrap();
    let messages = files.file.iter().filter(|file| file.package() == "helix.log.v1");
    let messages = messages.flat_map(|file| &file.message_type);
    let fields = messages.flat_map(|message| &message.field);
    let of_the_api: BTreeSet<&str> = fields.map(|field| field.name()).collect();
    assert!(of_the_api.contains("high_watermark"));
    let own: BTreeSet<&str> = OWN_KEYS.split_whitespace().collect();
    assert!(own.is_disjoint(&of_the_api), "{:?}", own.intersection(&of_the_api));
    let mut keys = BTreeSet::new();
    for command in commands(&[], &Cli::command()) {
        if let Some(found) = results::schema(&command) {
            schema::visit(&found, &mut |name, _| {
                keys.insert(name.to_owned());
            });
        }
    }
    let known: BTreeSet<&str> = of_the_api.union(&own).copied().collect();
    let strange: Vec<_> = keys.iter().filter(|key| !known.contains(key.as_str())).collect();
    assert!(strange.is_empty(), "neither of the API nor of our own: {strange:?}");
    let unused: Vec<_> = own.iter().filter(|key| !keys.contains(**key)).collect();
    assert!(unused.is_empty(), "no result has these: {unused:?}");
}

#[test]
fn every_result_is_of_a_command() {
    let all = commands(&[], &Cli::command());
    let printing: Vec<_> = all.iter().filter(|it| results::schema(it).is_some()).collect();
    assert!(printing.len() > 20, "{printing:?}");
    assert!(results::schema("server").is_none());
}
