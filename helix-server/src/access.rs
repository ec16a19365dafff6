//! Callers and what they may use: principals, their credentials, quotas and shares, and the audit
//! log. The rules themselves are replicated state, in `log/access`.
//!
//! - `principal`: names of callers. `caller`: a caller with its credentials and rules.
//! - `jwt`: verifies the JWTs of an OIDC issuer.
//! - `quota`: what each principal has moved, and how long it has to wait.
//! - `call_share`: open calls of a principal or an address.
//! - `audit`: logs control operations and refused calls.

pub mod audit;
mod call_share;
mod caller;
pub mod jwt;
mod principal;
mod quota;

pub use audit::{AuditEvent, AuditLog, RefusedCall};
pub use call_share::{CallShare, CallSlot};
pub use caller::{AuthMode, Caller, Credentials};
pub use jwt::JwtVerifier;
pub use principal::Principal;
pub(crate) use quota::QuotaMeters;
pub use quota::{ConnectionSlot, QuotaKind, QuotaMeter};
