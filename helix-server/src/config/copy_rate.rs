//! The one setting of the file that applies while the node runs: the largest rate of copies.

use std::path::PathBuf;

use super::file::{self, FileValues};
use super::settings::settings;
use super::values::parse_bytes;
use crate::limits::COPY_RATE_LEAST;

/// Key of the setting in the file.
pub(super) const KEY: &str = "copy_rate_max";

/// Advice for a rate below the least one.
pub(super) const TOO_LOW: &str =
    "choose at least 1MiB; `helix cluster pause-moves` stops moves, and recovery always copies";

/// The file of `--config`, where it decides on the largest rate of copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyRateFile(pub(super) PathBuf);

impl CopyRateFile {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Reads the rate, in bytes per second; the default if the file does not set it.
    ///
    /// # Errors
    /// What is wrong with the file or with the value, in words.
    pub fn read(&self) -> Result<u64, String> {
        let settings = settings();
        let FileValues { values, problems } = file::read(&self.0, &settings);
        let Some(value) = values.get(KEY) else {
            // A problem may be with this key, or with the whole file.
            if !problems.is_empty() {
                return Err(problems.join("; "));
            }
            let setting = settings.iter().find(|setting| setting.key() == KEY);
            let default = setting.and_then(|it| it.default_values().first().cloned());
            return parse_bytes(&default.unwrap_or_default());
        };
        let text = value.values.first().and_then(|text| text.to_str()).unwrap_or_default();
        let place = format!("{}:{}: {KEY} = {text}", self.0.display(), value.line);
        match parse_bytes(text) {
            Ok(rate) if rate >= COPY_RATE_LEAST => Ok(rate),
            Ok(_) => Err(format!("{place}: {TOO_LOW}")),
            Err(what) => Err(format!("{place}: {what}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_read_again_and_a_wrong_value_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("helix.toml");
        let file = CopyRateFile::new(&path);
        let read = |text: &str| {
            #[allow(clippy::disallowed_methods)]
            std::fs::write(&path, text).unwrap();
            file.read()
        };
        assert!(file.read().unwrap_err().contains("cannot be read"));
        assert_eq!(read("node_id = 2\n"), Ok(146 << 20), "the default");
        assert_eq!(read("node_id = 2\ncopy_rate_max = '20MiB'\n"), Ok(20 << 20));
        assert_eq!(read("copy_rate_max = 1048576\nnode_id = 'x'\n"), Ok(1 << 20));
        let problem = read("node_id = 2\ncopy_rate_max = 1000\n").unwrap_err();
        assert!(problem.contains("helix.toml:2: copy_rate_max = 1000: choose at least 1MiB"));
        assert!(read("copy_rate_max = 'fast'\n").unwrap_err().contains("copy_rate_max"));
        assert!(read("copy_rate_max = \n").is_err(), "half a file");
    }
}
