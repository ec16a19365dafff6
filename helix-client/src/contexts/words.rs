//! The cluster of a command line that is being written, for the completion of live names.

use std::ffi::OsStr;
use std::path::PathBuf;

use helix_proto::address;

use super::ClusterChoice;

impl ClusterChoice {
    /// Returns the choice in the words of a command line, without the program: `--addr`,
    /// `--context`, `--token-file`, and the options of TLS. `None` if one of them has no valid
    /// value: a completion must not ask another cluster than the command would use.
    ///
    /// Shells hand over words as they are written, so a value with quotes or variables is not
    /// valid.
    pub fn of_words<W: AsRef<OsStr>>(words: impl IntoIterator<Item = W>) -> Option<Self> {
        let mut choice = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(word) = word.as_ref().to_str() else { continue };
            // Behind it there are no options.
            if word == "--" {
                break;
            }
            let (name, joined) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word, None),
            };
            let is_known = matches!(
                name,
                "--addr"
                    | "--context"
                    | "--token-file"
                    | "--tls-ca"
                    | "--tls-cert"
                    | "--tls-key"
                    | "--tls-server-name"
            );
            if !is_known {
                continue;
            }
            let value = match joined {
                Some(value) => value,
                None => words.next()?.as_ref().to_str()?.to_owned(),
            };
            if value.is_empty() || value.starts_with('-') {
                return None;
            }
            let path = || Some(PathBuf::from(&value));
            match name {
                "--addr" => {
                    let port = Some(address::PORT_DEFAULT);
                    choice.addr.extend(address::parse_list(&value, port).ok()?);
                }
                "--context" => choice.context = Some(value),
                "--token-file" => choice.token_file = path(),
                "--tls-ca" => choice.tls.ca = path(),
                "--tls-cert" => choice.tls.cert = path(),
                "--tls-key" => choice.tls.key = path(),
                _ => choice.tls.server_name = Some(value),
            }
        }
        Some(choice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<ClusterChoice> {
        ClusterChoice::of_words(line.split(' '))
    }

    #[test]
    fn options_are_taken_in_both_forms_and_at_any_place() {
        let choice =
            of("--addr n1,n2:7 topic describe --context=prod --tls-ca=/ca --token-file /t ")
                .unwrap();
        assert_eq!(choice.addr, ["n1:9092", "n2:7"]);
        assert_eq!(choice.context.as_deref(), Some("prod"));
        assert_eq!(choice.tls.ca, Some(PathBuf::from("/ca")));
        assert_eq!(choice.token_file, Some(PathBuf::from("/t")));
        assert_eq!(of("topic describe -o json").unwrap(), ClusterChoice::default());
        assert_eq!(of("produce -- --addr n1").unwrap(), ClusterChoice::default());
        let all = of("--tls-cert /c --tls-key /k --tls-server-name n").unwrap().tls;
        assert!(all.cert.is_some() && all.key.is_some() && all.server_name.is_some());
    }

    #[test]
    fn a_value_that_is_not_valid_chooses_no_cluster() {
        for line in [
            "topic describe --addr",
            "--addr= topic describe",
            "--addr $B topic describe",
            "--addr \"n1:9092\" topic describe",
            "--addr n1:99999",
            "--context",
            "--token-file --addr",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
