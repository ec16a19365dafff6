//! Callers of a node: their principal, their credentials and their rules.

use std::sync::Arc;

use super::jwt::JwtLogin;
use super::principal::Principal;
use super::quota::QuotaMeter;
use crate::log::{
    AccessOperation, AccessResource, AccessState, ProducerOwner, ResourceKind, RuleSet, TokenRecord,
};

/// Treatment of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuthMode {
    /// Every caller may do everything; credentials are ignored.
    #[default]
    Off,
    /// A caller without credentials may do everything. Credentials must be valid, and their
    /// principal is held to its rules. For a rolling change.
    Optional,
    /// Every caller needs valid credentials, and may do what its rules allow.
    Required,
}

/// Proof of a caller's principal.
#[derive(Debug, Clone)]
pub enum Credentials {
    /// Verified when the connection was opened.
    Certificate,
    Token(Arc<TokenRecord>),
    Jwt(Arc<JwtLogin>),
}

impl Credentials {
    /// Returns the time from which they are refused, in microseconds since the Unix epoch; `None`
    /// if they do not expire.
    pub fn expires_at_us(&self) -> Option<u64> {
        match self {
            Self::Certificate => None,
            Self::Token(token) => Some(token.expires_at_us).filter(|at| *at > 0),
            Self::Jwt(login) => Some(login.refused_us()),
        }
    }
}

/// A caller with its rules, as of one state of access control.
#[derive(Debug, Clone)]
pub struct Caller {
    principal: Principal,
    owner: ProducerOwner,
    credentials: Credentials,
    rules: Arc<RuleSet>,
    access: Arc<AccessState>,
    meter: Arc<QuotaMeter>,
}

impl Caller {
    pub(crate) fn new(
        principal: Principal,
        credentials: Credentials,
        access: Arc<AccessState>,
        meter: Arc<QuotaMeter>,
    ) -> Self {
        let rules = access.rules_of(principal.as_str()).cloned().unwrap_or_default();
        let owner = ProducerOwner::of(principal.as_str());
        Self { principal, owner, credentials, rules, access, meter }
    }

    /// Returns the meter of the principal's quota, which its connections share.
    pub fn meter(&self) -> &Arc<QuotaMeter> {
        &self.meter
    }

    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// Returns the owner of the producer identities that the principal gets.
    pub fn owner(&self) -> ProducerOwner {
        self.owner
    }

    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Returns the state of access control that the rules are from.
    pub(crate) fn access(&self) -> &Arc<AccessState> {
        &self.access
    }

    pub fn rules(&self) -> &Arc<RuleSet> {
        &self.rules
    }

    pub fn may(&self, operation: AccessOperation, resource: AccessResource<'_>) -> bool {
        self.rules.allows(operation, resource)
    }

    /// Returns whether every topic is visible to the caller.
    pub fn sees_all_topics(&self) -> bool {
        self.rules.allows_prefix(AccessOperation::Describe, ResourceKind::Topic, "")
    }
}
