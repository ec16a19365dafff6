//! The gate: finds the caller of each call, before any handler.
//!
//! A connection keeps its last login, so that most calls compare their header with it and hash
//! nothing. A login is used as long as tokens and rules are the same. `api/authorize.rs` then
//! checks the caller's rights.

use std::fmt;
use std::sync::{Arc, Mutex};

use helix_proto::error::reason_name;
use helix_proto::log::v1::ErrorReason;
use helix_proto::log::v1::consume_service_server::SERVICE_NAME as CONSUME;
use helix_proto::log::v1::produce_service_server::SERVICE_NAME as PRODUCE;
use subtle::ConstantTimeEq;
use tonic::codegen::http::{HeaderMap, header};

use crate::access::{AuditEvent, AuthMode, ConnectionSlot, QuotaKind, QuotaMeter};
use crate::api::{is_open, method_row};
use crate::call::{CallAccess, CallLogin, ClientConnection};
use crate::error::{Error, Result};
use crate::limits::{QUOTE_BYTES_MAX, USER_AGENT_BYTES_MAX};
use crate::log::TokenError;
use crate::node::Node;
use crate::quote::cut;

/// Principals that a connection counts for; with more, the first one no longer counts.
const SLOTS_MAX: usize = 64;

/// The gate of one connection.
pub(super) struct Gate {
    node: Arc<Node>,
    connection: Arc<ClientConnection>,
    last: Mutex<Option<LoginByHeader>>,
    /// The connection's place among those of each principal that has called on it.
    slots: Mutex<Vec<ConnectionSlot>>,
}

/// The login of an authorization header.
type LoginByHeader = (Box<[u8]>, Arc<CallLogin>);

impl fmt::Debug for Gate {
    /// Leaves out the header of the last login.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("connection", &self.connection).finish_non_exhaustive()
    }
}

impl Gate {
    /// Returns the gate of a connection; `None` if every caller may do everything.
    pub(super) fn new(node: &Arc<Node>, connection: &Arc<ClientConnection>) -> Option<Arc<Self>> {
        (node.auth_mode() != AuthMode::Off).then(|| {
            let (node, connection) = (node.clone(), connection.clone());
            Arc::new(Self { node, connection, last: Mutex::default(), slots: Mutex::default() })
        })
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Finds the caller of a call; `None` if this node may know the token once it has asked for the
    /// newest ones.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] if the method needs credentials and the call has no valid ones.
    pub(super) fn admit(&self, path: &str, headers: &HeaderMap) -> Result<Option<CallAccess>> {
        let login = if is_open(path) {
            Ok(Arc::new(CallLogin { caller: None, user_agent: Box::default() }))
        } else {
            self.login(headers)
        };
        match login {
            Ok(login) => Ok(Some(self.access(path, login))),
            Err(TokenError::Unknown) => Ok(None),
            Err(error) => Err(self.refuse(path, headers, error)),
        }
    }

    /// Finds the caller of a call among the newest tokens.
    ///
    /// # Errors
    /// As of [`Gate::admit`], and [`Error::NoLeader`] if this node cannot learn the newest tokens.
    pub(super) async fn admit_newest(&self, path: &str, headers: &HeaderMap) -> Result<CallAccess> {
        self.node.refresh_tokens().await?;
        match self.login(headers) {
            Ok(login) => Ok(self.access(path, login)),
            Err(error) => Err(self.refuse(path, headers, error)),
        }
    }

    fn access(&self, path: &str, login: Arc<CallLogin>) -> CallAccess {
        CallAccess::new(login, self.connection.clone(), method_row(path))
    }

    /// Counts a call for the quota of its principal, if it has one.
    ///
    /// # Errors
    /// [`Error::OverQuota`] if its principal has used up its quota.
    pub(super) fn admit_within_quota(&self, path: &str, access: &CallAccess) -> Result<()> {
        let Some(caller) = access.caller() else { return Ok(()) };
        let meter = caller.meter();
        if is_always_admitted(path) {
            meter.count_call();
            return Ok(());
        }
        let admitted = self.take_slot(meter).and_then(|()| meter.admit_call(moved_bytes(path)));
        admitted.inspect_err(|error| self.node.note_over_quota(error))
    }

    /// Counts this connection as one of the principal, until it is closed.
    fn take_slot(&self, meter: &Arc<QuotaMeter>) -> Result<()> {
        let mut slots = crate::sync::lock(&self.slots);
        if !slots.iter().any(|slot| slot.is_of(meter)) {
            let slot = meter.connect()?;
            if slots.len() >= SLOTS_MAX {
                slots.remove(0);
            }
            slots.push(slot);
        }
        Ok(())
    }

    fn login(&self, headers: &HeaderMap) -> Result<Arc<CallLogin>, TokenError> {
        let sent = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let key = sent.unwrap_or_default();
        if let Some(login) = self.kept(key) {
            return Ok(login);
        }
        let caller = match self.node.login(sent, self.connection.certificate_principal()) {
            Ok(None) if self.node.auth_mode() == AuthMode::Required => Err(TokenError::Missing),
            found => found,
        };
        let login = Arc::new(CallLogin { caller: caller?, user_agent: user_agent(headers).into() });
        *crate::sync::lock(&self.last) = Some((key.into(), login.clone()));
        Ok(login)
    }

    /// Returns the last login, if it was made with this header and is still as good as a new one.
    fn kept(&self, key: &[u8]) -> Option<Arc<CallLogin>> {
        let last = crate::sync::lock(&self.last);
        let (known, login) = last.as_ref()?;
        let is_same = is_equal(known, key);
        let is_current = login.caller.as_ref().is_none_or(|caller| self.node.is_current(caller));
        (is_same && is_current).then(|| login.clone())
    }

    fn refuse(&self, path: &str, headers: &HeaderMap, error: TokenError) -> Error {
        self.node.metrics().on_failed_login(error.name());
        let event = AuditEvent {
            kind: "login",
            principal: "",
            user_agent: user_agent(headers),
            method: cut(path.trim_start_matches('/'), QUOTE_BYTES_MAX),
            resource: "",
            result: error.name(),
        };
        self.node.audit().refusal(&self.connection.peer(), &event);
        error.into()
    }

    /// Logs the outcome of a control operation. `failure` is the reason's name, if it failed.
    pub(super) fn audit(&self, path: &str, access: &CallAccess, failure: Option<&str>) {
        // Each denial and each failed login has its own line.
        let refusals = [ErrorReason::PermissionDenied, ErrorReason::Unauthenticated];
        if failure.is_some_and(|name| refusals.map(reason_name).contains(&name)) {
            return;
        }
        let principal = access.caller().map_or("", |caller| caller.principal().as_str());
        let resource = access.granted().map(|(operation, resource)| {
            let resource = resource.as_resource();
            format!("{operation} {} {}", resource.kind().as_str(), resource.name())
        });
        let event = AuditEvent {
            kind: "control",
            principal,
            user_agent: access.user_agent(),
            method: path.trim_start_matches('/'),
            resource: resource.as_deref().unwrap_or_default().trim_end(),
            result: failure.unwrap_or("OK"),
        };
        self.node.audit().control(&self.connection.peer(), &event);
    }
}

/// Returns whether calls of this path are admitted over a quota: heartbeats, without which a member
/// loses its partitions, and the calls that can change the quota.
fn is_always_admitted(path: &str) -> bool {
    const HEARTBEAT: &str = "/helix.log.v1.GroupService/Heartbeat";
    const LEAVE: &str = "/helix.log.v1.GroupService/Leave";
    const ACCESS: &str = "/helix.log.v1.AccessService/";
    path == HEARTBEAT || path == LEAVE || path.starts_with(ACCESS)
}

/// Returns the kind of bytes that a call of this path moves in bulk.
fn moved_bytes(path: &str) -> Option<QuotaKind> {
    let is_of = |service: &str| path.get(1..).is_some_and(|path| path.starts_with(service));
    if is_of(PRODUCE) {
        Some(QuotaKind::BytesIn)
    } else {
        is_of(CONSUME).then_some(QuotaKind::BytesOut)
    }
}

fn user_agent(headers: &HeaderMap) -> &str {
    let user_agent = headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok());
    cut(user_agent.unwrap_or_default(), USER_AGENT_BYTES_MAX)
}

/// Compares two headers in a time that depends on their lengths only, by words: a JWT has some KiB.
fn is_equal(known: &[u8], sent: &[u8]) -> bool {
    let (known_words, known_rest) = known.as_chunks::<8>();
    let (sent_words, sent_rest) = sent.as_chunks::<8>();
    let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
    let words = known_words.iter().zip(sent_words);
    let difference = words.fold(0_u64, |found, (known, sent)| found | (word(known) ^ word(sent)));
    let is_same = difference.ct_eq(&0) & known_rest.ct_eq(sent_rest);
    known.len() == sent.len() && bool::from(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_differ_by_each_byte_and_by_length() {
        for length in [0, 1, 7, 8, 9, 16, 100] {
            let known: Vec<u8> = (0..length).collect();
            assert!(is_equal(&known, &known));
            for at in 0..known.len() {
                let mut other = known.clone();
                other[at] ^= 0x80;
                assert!(!is_equal(&known, &other), "byte {at} of {length}");
                assert!(!is_equal(&known, &known[..at]), "{at} of {length} bytes");
            }
        }
    }
}
