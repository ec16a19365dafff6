//! Targets for user input: settings in a file or the environment, positions, sizes, format strings.
//! Accepted values are printed in a form that parses to the same value.

use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{Seek, Write};
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, SystemTime};

use clap::{Args, Command, FromArgMatches};
use helix_client::ConsumedRecord;
use helix_client::proto::log::v1::Header;
use helix_server::config::{Flags, settings};
use tempfile::NamedTempFile;

use crate::input::Input;
use crate::position::{PositionArg, PositionRange};
use crate::template::Template;
use crate::units;

thread_local! {
    static FILE: RefCell<NamedTempFile> = RefCell::new(file());
}

/// Creates a temporary file, in memory if the system has `/dev/shm`.
pub(crate) fn file() -> NamedTempFile {
    let made = NamedTempFile::new_in("/dev/shm").or_else(|_| NamedTempFile::new());
    made.expect("a temporary file")
}

/// Target `config`: a settings file and up to two variables. The resolved settings are printed as a
/// file that resolves to the same settings.
pub(crate) fn config(input: &[u8]) {
    let mut input = Input(input);
    let settings = settings();
    let mut variables = Vec::new();
    for _ in 0..input.below(3) {
        let setting = &settings[input.below(settings.len())];
        let value = OsString::from_vec(input.some_bytes().to_vec());
        variables.push((setting.variable(), value));
    }
    FILE.with_borrow_mut(|file| {
        let bytes = input.0;
        let resolved = resolve(file, bytes, &variables);
        let Ok(printed) = resolved else { return };
        // Paths that are not UTF-8 cannot be printed.
        if variables.iter().any(|(_, value)| value.to_str().is_none()) {
            return;
        }
        let again = resolve(file, printed.as_bytes(), &[]);
        let again = again.unwrap_or_else(|problem| panic!("{problem}\nin\n{printed}"));
        assert_eq!(strip(&again), strip(&printed));
    });
}

/// Removes comments, which include the source of each value.
fn strip(printed: &str) -> Vec<&str> {
    let lines = printed.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.rsplit_once(" # ").map_or(line, |(value, _)| value).trim_end()).collect()
}

fn resolve(
    file: &mut NamedTempFile,
    bytes: &[u8],
    variables: &[(String, OsString)],
) -> Result<String, String> {
    file.as_file_mut().set_len(0).unwrap();
    file.rewind().unwrap();
    file.write_all(bytes).unwrap();
    let command = Flags::augment_args(Command::new("helix-server").no_binary_name(true));
    let path = file.path().as_os_str().to_owned();
    let matches = command.try_get_matches_from([OsString::from("--config"), path]).unwrap();
    let flags = Flags::from_arg_matches(&matches).unwrap();
    let environment = |name: &str| {
        variables.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    };
    let resolved = flags.resolve(&environment).map_err(|error| {
        let text = error.to_string();
        assert!(!text.is_empty(), "an error has a text");
        text
    })?;
    drop(resolved.config.exposed());
    let _ = (resolved.config.shares(), resolved.config.tail_bytes());
    let _ = resolved.config.footer_bytes();
    Ok(resolved.to_string())
}

/// Target `cli`: arguments of the command line.
pub(crate) fn cli(input: &[u8]) {
    let mut input = Input(input);
    let which = input.below(5);
    let Ok(text) = std::str::from_utf8(input.0) else { return };
    match which {
        0 => {
            if let Ok(position) = text.parse::<PositionArg>() {
                let printed = position.to_string();
                assert_eq!(printed.parse(), Ok(position.clone()), "{text:?} printed {printed:?}");
                let _ = position.time(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 31));
            }
        }
        1 => drop(text.parse::<PositionRange>()),
        2 => {
            if let Ok(duration) = units::parse_duration(text) {
                let printed = units::duration(duration);
                assert_eq!(units::parse_duration(&printed), Ok(duration), "{printed:?}");
            }
        }
        3 => drop(units::parse_bytes(text)),
        _ => render(text),
    }
}

fn render(text: &str) {
    let Ok(template) = text.parse::<Template>() else { return };
    let record = ConsumedRecord {
        offset: u64::MAX,
        append_time: SystemTime::UNIX_EPOCH + Duration::from_micros(1),
        key: Some(vec![0, 0xFF, b'"'].into()),
        value: None,
        headers: vec![Header { name: "a,=\n".to_owned(), value: vec![0xC3].into() }],
        event_time: SystemTime::UNIX_EPOCH.checked_sub(Duration::from_secs(1 << 40)),
    };
    let mut once = Vec::new();
    template.render(&mut once, "topic", 7, &record);
    let mut twice = once.clone();
    template.render(&mut twice, "topic", 7, &record);
    assert_eq!(twice.len(), 2 * once.len(), "render appends to the output");
    // A field of two characters renders to at most this many bytes.
    assert!(once.len() <= 80 * (text.len() + 1), "{} bytes of {text:?}", once.len());
}
