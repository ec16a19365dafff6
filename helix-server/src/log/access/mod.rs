//! Access control, a part of shard 0's state: tokens of principals, and rules of their rights.
//! `rule` has rights and how they match, `token` the secret and its stored hash, `jwt_error` the
//! reasons against other tokens, `state` applies commands.

mod jwt_error;
mod quota;
mod rule;
mod state;
#[cfg(test)]
mod tests;
mod token;

pub use jwt_error::JwtError;
pub use quota::{EVERY_PRINCIPAL, QUOTA_BYTES_MIN, QuotaLimits};
pub use rule::{AccessOperation, AccessResource, AccessRule, OperationSet, ResourceKind, RuleSet};
pub(crate) use state::AccessRecord;
pub use state::{
    AccessChange, AccessState, PRINCIPAL_BYTES_MAX, QUOTAS_MAX, RULES_MAX, RULES_PER_COMMAND_MAX,
    RULES_PER_PRINCIPAL_MAX, TOKENS_MAX, is_principal_name,
};
pub use token::{BearerToken, PresentedToken, TokenError, TokenRecord};

use prost::{Message, Oneof};

/// A change of tokens and rules, as stored in the log. A repeated command changes nothing. Tags are
/// permanent.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum AccessCommand {
    /// Stores a token, and gives its principal rules.
    #[prost(message, tag = "1")]
    CreateToken(CreateToken),
    /// Removes the token with this id.
    #[prost(uint64, tag = "2")]
    RevokeToken(u64),
    /// Removes every token of this principal.
    #[prost(string, tag = "3")]
    RevokeTokens(String),
    /// Adds operations to the rules of a principal.
    #[prost(message, tag = "4")]
    Allow(PrincipalRules),
    /// Removes operations from the rules of a principal.
    #[prost(message, tag = "5")]
    Remove(PrincipalRules),
    /// Sets the quota of a principal; removes it if no limit is set.
    #[prost(message, tag = "6")]
    SetQuota(QuotaLimits),
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct CreateToken {
    #[prost(message, optional, tag = "1")]
    pub token: Option<TokenRecord>,
    #[prost(message, repeated, tag = "2")]
    pub rules: Vec<AccessRule>,
    /// Refuse the command if the cluster ever had a token. Set for the first token of a cluster,
    /// which several nodes may propose.
    #[prost(bool, tag = "3")]
    pub is_first: bool,
}

/// Rules of one principal.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrincipalRules {
    #[prost(string, tag = "1")]
    pub principal: String,
    #[prost(message, repeated, tag = "2")]
    pub rules: Vec<AccessRule>,
}

impl AccessCommand {
    pub fn name(&self) -> &'static str {
        match self {
            Self::CreateToken(_) => "create token",
            Self::RevokeToken(_) => "revoke token",
            Self::RevokeTokens(_) => "revoke tokens",
            Self::Allow(_) => "allow access",
            Self::Remove(_) => "remove access",
            Self::SetQuota(_) => "set quota",
        }
    }
}
