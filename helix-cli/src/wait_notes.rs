//! Tells the user what a command waits for, if that takes more than a second.
//! On a terminal the note is one line that is replaced, and removed at the end. Elsewhere it is a
//! line of standard error, once for each thing that the command waits for.

use std::io::{IsTerminal, stderr};
use std::time::Duration;

use helix_client::PendingCall;
use helix_proto::log::v1::ErrorReason;

use crate::args::GlobalArgs;
use crate::output::{self, message};

/// Wait before the first note.
const QUIET_MAX: Duration = Duration::from_secs(1);

/// Interval of the notes.
const INTERVAL: Duration = Duration::from_millis(250);

/// Shows notes until it is dropped.
#[derive(Debug)]
pub(crate) struct WaitNotes(Option<tokio::task::JoinHandle<()>>);

impl WaitNotes {
    /// Starts to show notes. With JSON output they are only for a terminal.
    pub(crate) fn start(global: &GlobalArgs) -> Self {
        let is_terminal = stderr().is_terminal();
        if global.quiet || (!is_terminal && global.output.is_json()) {
            return Self(None);
        }
        let pending = global.pending.clone();
        let addr = global.addr.join(",");
        Self(Some(tokio::spawn(async move {
            let mut told = None;
            loop {
                tokio::time::sleep(INTERVAL).await;
                let longest = pending.longest();
                if is_terminal {
                    let note = longest.and_then(|call| note_of(&call, call.since.elapsed(), &addr));
                    output::set_note(note.as_deref());
                } else if let Some(call) = longest.filter(|it| it.since.elapsed() >= QUIET_MAX) {
                    let (what, why) = waits_for(&call, &addr);
                    if told.as_ref() != Some(&what) {
                        message!("waiting for {what}{why}");
                        told = Some(what);
                    }
                }
            }
        })))
    }
}

impl Drop for WaitNotes {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
            output::set_note(None);
        }
    }
}

/// Returns the note for a call, if it is due.
fn note_of(call: &PendingCall, waited: Duration, addr: &str) -> Option<String> {
    (waited >= QUIET_MAX).then(|| {
        let (what, why) = waits_for(call, addr);
        format!("waiting for {what} ({} s, ctrl-c to stop){why}", waited.as_secs())
    })
}

/// Returns what a call waits for, and the reason, which may be cut at the end of the line.
fn waits_for(call: &PendingCall, addr: &str) -> (String, String) {
    let Some(error) = &call.last_error else {
        return (format!("a response from {addr}"), String::new());
    };
    let what = match error.reason {
        Some(ErrorReason::NoLeader) => match shard_in(&error.message) {
            Some(shard) => format!("a leader of shard {shard}"),
            None => "a leader".to_owned(),
        },
        Some(ErrorReason::OutcomeUnknown) => "the outcome of the request".to_owned(),
        Some(ErrorReason::Throttled) => "the node to catch up".to_owned(),
        Some(_) => return ("the service".to_owned(), format!(": {}", error.message)),
        None => return ("a response".to_owned(), format!(" from {addr}: {}", error.message)),
    };
    (what, String::new())
}

/// Returns the shard that a message names: "shard 1 has no leader".
fn shard_in(message: &str) -> Option<u32> {
    let (_, after) = message.split_once("shard ")?;
    let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    after[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use helix_client::Error;
    use helix_proto::error as wire;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn note_is_due_after_a_second_and_names_the_shard() {
        let detail = wire::detail(ErrorReason::NoLeader);
        let error = Error::from(wire::to_status(&detail, "shard 1 has no leader; retry", None));
        let (name, since, is_change) = ("append", Instant::now(), true);
        let call = PendingCall { name, since, is_change, last_error: Some(error) };
        let seconds = Duration::from_secs;
        assert_eq!(note_of(&call, Duration::from_millis(900), "n1:9092"), None);
        let expected = "waiting for a leader of shard 1 (8 s, ctrl-c to stop)";
        assert_eq!(note_of(&call, seconds(8), "n1:9092").as_deref(), Some(expected));
        let silent = PendingCall { last_error: None, ..call };
        let note = note_of(&silent, seconds(8), "n1:9092").unwrap();
        assert!(note.starts_with("waiting for a response from n1:9092 (8 s"), "{note}");
        let refused = Error::from(tonic::Status::unavailable("connection refused"));
        let refused = PendingCall { last_error: Some(refused), ..silent };
        let note = note_of(&refused, seconds(8), "n1:9092").unwrap();
        let expected =
            "waiting for a response (8 s, ctrl-c to stop) from n1:9092: connection refused";
        assert_eq!(note, expected);
    }
}
