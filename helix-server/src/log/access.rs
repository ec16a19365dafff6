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
pub use state::{
    AccessChange, AccessState, PRINCIPAL_BYTES_MAX, QUOTAS_MAX, RULES_MAX, RULES_PER_COMMAND_MAX,
    RULES_PER_PRINCIPAL_MAX, TOKENS_MAX, is_principal_name,
};
pub use token::{BearerToken, PresentedToken, TokenError, TokenRecord};

pub use crate::records::access_command_record::Command as AccessCommand;
pub use crate::records::{CreateToken, PrincipalRules};

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
