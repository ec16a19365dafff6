//! Source of the bearer token that a client sends with each call.

// Reads the token's file, which an operator or an agent replaces.
#![allow(clippy::disallowed_methods)]

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tonic::codegen::http::HeaderValue;
use tonic::{Code, Status};

use crate::error::{Error, Result};

/// Environment variable with a token.
const TOKEN_VARIABLE: &str = "HELIX_TOKEN";

/// Environment variable with the path of a file with a token.
const FILE_VARIABLE: &str = "HELIX_TOKEN_FILE";

/// Interval between checks of a token's file for changes.
const FILE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Largest file of a token; nodes take JWTs of up to 6 KiB.
const FILE_BYTES_MAX: u64 = 8 << 10;

/// Source of a client's token: one of the cluster, or a JWT of an issuer that it accepts. It never
/// prints the token.
#[derive(Clone, Default)]
pub struct TokenSource(Option<Arc<TokenOrigin>>);

type Supply = dyn Fn() -> Option<String> + Send + Sync;

enum TokenOrigin {
    Fixed(HeaderValue),
    File(TokenFile),
    Callback(Box<Supply>),
}

struct TokenFile {
    path: PathBuf,
    read: Mutex<ReadToken>,
}

struct ReadToken {
    header: HeaderValue,
    /// Time and length of the file that was read.
    version: Option<(SystemTime, u64)>,
    /// `None` before the first check, since a client may be made outside of a runtime.
    checked_at: Option<Instant>,
}

impl TokenSource {
    /// Sends no token.
    pub fn none() -> Self {
        Self(None)
    }

    /// Sends this token.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the text has other characters than a token.
    pub fn fixed(token: &str) -> Result<Self> {
        Ok(Self(Some(Arc::new(TokenOrigin::Fixed(header(token)?)))))
    }

    /// Sends the token in this file, which is read again within a second after it changes, and at
    /// once after the service refused the token. If that fails, the client sends the last token
    /// that it read.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the file cannot be read or has no token.
    pub fn file(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let (header, version) = read(&path)?;
        let read = Mutex::new(ReadToken { header, version, checked_at: None });
        Ok(Self(Some(Arc::new(TokenOrigin::File(TokenFile { path, read })))))
    }

    /// Calls `supply` before each call. It must return at once, so let it return a cached token. If
    /// it returns none or an invalid one, the call fails with `UNAUTHENTICATED` and is not sent.
    pub fn callback(supply: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(TokenOrigin::Callback(Box::new(supply)))))
    }

    /// Uses the environment: the token in `HELIX_TOKEN`, else the file that `HELIX_TOKEN_FILE`
    /// names, else none.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the token is malformed or the file cannot be read.
    pub fn from_env() -> Result<Self> {
        let is_blank = |value: &OsString| value.to_string_lossy().trim().is_empty();
        let variable = |name| std::env::var_os(name).filter(|value| !is_blank(value));
        if let Some(token) = variable(TOKEN_VARIABLE) {
            // Bytes that are not UTF-8 are not part of a token, and are refused.
            return Self::fixed(&token.to_string_lossy());
        }
        variable(FILE_VARIABLE).map_or_else(|| Ok(Self::none()), Self::file)
    }

    /// Returns true if no token is sent.
    pub fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the value of the authorization header now; `None` if no token is sent.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` if the callback has no valid token: a call without one could have more
    /// rights than the application means.
    pub(crate) fn header(&self) -> std::result::Result<Option<HeaderValue>, Status> {
        let Some(origin) = &self.0 else { return Ok(None) };
        let header = match &**origin {
            TokenOrigin::Fixed(header) => header.clone(),
            TokenOrigin::File(file) => file.header(),
            TokenOrigin::Callback(supply) => {
                let token = supply().ok_or_else(|| {
                    Status::unauthenticated("the application's token source has no token")
                })?;
                header(&token).map_err(|error| {
                    let what = &error.message;
                    let what = format!("the application's token source has no token: {what}");
                    Status::unauthenticated(what)
                })?
            }
        };
        Ok(Some(header))
    }

    /// Notes that the service refused the token, so that a changed file is read before the next
    /// call.
    pub(crate) fn on_refused(&self) {
        if let Some(TokenOrigin::File(file)) = self.0.as_deref() {
            file.expire();
        }
    }
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_deref() {
            None => formatter.write_str("none"),
            Some(TokenOrigin::Fixed(_)) => formatter.write_str("fixed"),
            Some(TokenOrigin::File(file)) => write!(formatter, "file {}", file.path.display()),
            Some(TokenOrigin::Callback(_)) => formatter.write_str("callback"),
        }
    }
}

impl TokenFile {
    /// Lets the next call read the file, also if its time and length are as before.
    fn expire(&self) {
        let mut known = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        known.checked_at = None;
        known.version = None;
    }

    fn header(&self) -> HeaderValue {
        // A panic elsewhere cannot have left the token inconsistent.
        let mut known = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = known.checked_at.is_none_or(|at| at.elapsed() >= FILE_CHECK_INTERVAL);
        if is_due {
            known.checked_at = Some(Instant::now());
            if version(&self.path).is_none_or(|version| Some(version) != known.version) {
                match read(&self.path) {
                    Ok((header, version)) => {
                        known.header = header;
                        known.version = version;
                    }
                    Err(error) => {
                        let header = known.header.clone();
                        drop(known);
                        tracing::warn!(%error, "cannot read the token again, using the last one");
                        return header;
                    }
                }
            }
        }
        known.header.clone()
    }
}

fn version(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

fn read(path: &Path) -> Result<(HeaderValue, Option<(SystemTime, u64)>)> {
    let failed = |what: String| {
        let message = format!("token file {}: {what}", path.display());
        Error::client(Code::InvalidArgument, message)
    };
    // Before the text, so that a change in between is noticed by the next check.
    let version = version(path);
    if version.is_some_and(|(_, bytes)| bytes > FILE_BYTES_MAX) {
        return Err(failed(format!("has more than {FILE_BYTES_MAX} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|error: io::Error| failed(error.to_string()));
    Ok((header(&text?).map_err(|error| failed(error.message.clone()))?, version))
}

/// Returns the header of a token, which no debug output shows.
fn header(token: &str) -> Result<HeaderValue> {
    let token = token.trim();
    let is_valid = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    let header = HeaderValue::from_str(&format!("Bearer {token}")).ok().filter(|_| is_valid);
    let mut header = header.ok_or_else(|| {
        let message = "a token has printable ASCII characters without spaces, at least one";
        Error::client(Code::InvalidArgument, message)
    })?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const SECRET: &str = "helix_0000000000000001_5ec2e7";

    fn sent(source: &TokenSource) -> String {
        source.header().unwrap().unwrap().to_str().unwrap().to_owned()
    }

    #[test]
    fn no_source_prints_its_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, SECRET).unwrap();
        let callback = TokenSource::callback(|| Some(SECRET.to_owned()));
        for source in [TokenSource::fixed(SECRET), TokenSource::file(&path), Ok(callback)] {
            let source = source.unwrap();
            assert_eq!(sent(&source), format!("Bearer {SECRET}"));
            let shown = format!("{source:?} {:?}", source.header().unwrap().unwrap());
            assert!(!shown.contains("5ec2e7"), "{shown}");
            let config = crate::Config { token: source, ..crate::Config::default() };
            assert!(!format!("{config:?}").contains("5ec2e7"));
        }
        let refused = TokenSource::fixed("two words").unwrap_err();
        assert!(!refused.to_string().contains("two words"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_file_is_read_again_and_a_missing_one_keeps_the_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        assert!(TokenSource::file(&path).is_err());
        fs::write(&path, "first\n").unwrap();
        let source = TokenSource::file(&path).unwrap();
        assert_eq!(sent(&source), "Bearer first");
        fs::write(&path, "the second one").unwrap();
        assert!(TokenSource::file(&path).is_err(), "spaces");
        fs::write(&path, "second-token").unwrap();
        assert_eq!(sent(&source), "Bearer first", "checked at most once a second");
        tokio::time::advance(FILE_CHECK_INTERVAL).await;
        assert_eq!(sent(&source), "Bearer second-token");
        fs::write(&path, "renewed-tokn").unwrap();
        source.on_refused();
        assert_eq!(sent(&source), "Bearer renewed-tokn", "read at once after a refusal");
        fs::write(&path, "second-token").unwrap();
        source.on_refused();
        assert_eq!(sent(&source), "Bearer second-token");
        fs::remove_file(&path).unwrap();
        tokio::time::advance(FILE_CHECK_INTERVAL).await;
        assert_eq!(sent(&source), "Bearer second-token");
        fs::write(&path, "third").unwrap();
        tokio::time::advance(FILE_CHECK_INTERVAL).await;
        assert_eq!(sent(&source), "Bearer third");
    }

    #[test]
    fn a_callback_is_asked_for_each_call() {
        let calls = AtomicU32::new(0);
        let source = TokenSource::callback(move || match calls.fetch_add(1, Ordering::Relaxed) {
            0 => Some("a".to_owned()),
            1 => Some("not valid".to_owned()),
            _ => None,
        });
        assert_eq!(sent(&source), "Bearer a");
        for _ in 0..2 {
            assert_eq!(source.header().unwrap_err().code(), Code::Unauthenticated);
        }
        assert!(TokenSource::none().header().unwrap().is_none());
    }
}
