//! Hides credentials in the lines of a log before they leave the machine: tokens of clusters, JWTs,
//! headers, values with telling names, and private keys. Pure.

/// Text in the place of a credential.
const HIDDEN: &str = "(hidden)";

/// Parts of the names of values that are hidden.
const SECRET_WORDS: [&str; 7] =
    ["token", "secret", "password", "passwd", "authorization", "api_key", "private_key"];

/// Ends of names with those words whose values are no credentials.
const OPEN_ENDS: [&str; 4] = ["_id", "_file", "-file", "_count"];

/// Beginning of a token of a cluster, and of each JWT: an object in base64.
const TOKEN_PREFIX: &str = "helix_";
const JWT_PREFIX: &str = "eyJ";

/// Fewest characters of a credential behind its beginning.
const CREDENTIAL_CHARS_MIN: usize = 16;

/// Returns the text with credentials hidden.
pub(super) fn hide_in_log(text: &str) -> String {
    let mut hidden = String::with_capacity(text.len());
    let mut is_in_key = false;
    for line in text.split_inclusive('\n') {
        let begins = line.contains("-----BEGIN ") && line.contains("PRIVATE KEY-----");
        let ends = line.contains("-----END ");
        if begins || is_in_key {
            hidden += HIDDEN;
            hidden.push('\n');
            is_in_key = !ends;
            continue;
        }
        hidden += &hide_in_line(line);
    }
    hidden
}

/// Hides the words of a line that are credentials.
fn hide_in_line(line: &str) -> String {
    let mut hidden = String::with_capacity(line.len());
    let mut rest = line;
    // True behind a name or a scheme whose value follows.
    let mut is_value = false;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        if word.is_empty() {
            // Quotation marks, blanks and separators stand between a name and its value.
            is_value &= matches!(first, '"' | '\'' | ' ' | ':' | '=' | '\\');
            hidden.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let is = |scheme: &str| word.eq_ignore_ascii_case(scheme) && after.starts_with(' ');
        let is_scheme = is("bearer") || is_value && is("basic");
        hidden += if (is_value && !is_scheme) || is_credential(word) { HIDDEN } else { word };
        is_value = is_scheme || is_secret_name(word) && is_assigned(after);
        rest = after;
    }
    hidden
}

/// Returns true for a character of a token, of base64 and of a name.
fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.' | '+' | '/' | '~')
}

/// Returns true if a value follows a name: `name=value`, `"name":"value"`, `name: value`.
fn is_assigned(after: &str) -> bool {
    after.trim_start_matches(['"', '\'', '\\', ' ']).starts_with(['=', ':'])
}

fn is_secret_name(word: &str) -> bool {
    let name = word.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|secret| name.contains(secret))
        && !OPEN_ENDS.iter().any(|end| name.ends_with(end))
}

fn is_credential(word: &str) -> bool {
    let begins = |prefix: &str| {
        word.match_indices(prefix)
            .any(|(at, _)| word.len() - at - prefix.len() >= CREDENTIAL_CHARS_MIN)
    };
    let is_token = begins(TOKEN_PREFIX)
        && word.rsplit_once(TOKEN_PREFIX).is_some_and(|(_, rest)| {
            rest.bytes().take(CREDENTIAL_CHARS_MIN).all(|byte| byte.is_ascii_hexdigit())
        });
    is_token || begins(JWT_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "helix_0123456789abcdef_00112233445566778899aabbccddeeff";
    const JWT: &str = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhbGljZSJ9.c2lnbmF0dXJl-_A";

    #[test]
    fn credentials_of_every_form_are_hidden() {
        for line in [
            format!("login failed token={TOKEN} peer=1.2.3.4:5"),
            TOKEN.to_owned(),
            format!("said \"{TOKEN}\","),
            format!("path=/t/{TOKEN}.txt"),
            format!("authorization: Bearer {JWT}"),
            format!("Authorization: bearer {JWT}\n"),
            format!("jwt {JWT} expired"),
            "{\"password\":\"hunter2-hunter2\"}".to_owned(),
            "HELIX_TOKEN=hunter2-hunter2".to_owned(),
            "client_secret = 'hunter2-hunter2'".to_owned(),
            "authorization=Basic hunter2-hunter2".to_owned(),
            "fields {\\\"token\\\":\\\"hunter2-hunter2\\\"}".to_owned(),
        ] {
            let shown = hide_in_log(&line);
            assert!(shown.contains(HIDDEN), "{line}: {shown}");
            for secret in ["00112233", "eyJ", "c2lnbmF0", "hunter2"] {
                assert!(!shown.contains(secret), "{line}: {shown}");
            }
        }
        let key = "a\n-----BEGIN PRIVATE KEY-----\nMIGH\n-----END PRIVATE KEY-----\nb\n";
        assert_eq!(hide_in_log(key), "a\n(hidden)\n(hidden)\n(hidden)\nb\n");
    }

    #[test]
    fn other_words_stay() {
        for line in [
            "2026-11-28T01:02:03.456789Z  INFO helix_server::server: serving node_id=1\n",
            "transferred leadership shard=3 to=2\n",
            "audit kind=\"control\" principal=\"bob\" token_id=0123456789abcdef result=\"OK\"\n",
            "read the token again, using the last one\n",
            "key_count=7 token_file=/etc/helix/token\n",
            "größe \u{1b} \u{fffd}",
        ] {
            assert_eq!(hide_in_log(line), line);
        }
    }
}
