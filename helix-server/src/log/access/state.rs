//! State of access control: a pure function of shard 0's log.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::quota::{EVERY_PRINCIPAL, QuotaLimits};
use super::rule::{AccessRule, ResourceKind, RuleSet};
use super::token::{BearerToken, TokenError, TokenRecord};
use super::{AccessCommand, CreateToken, PrincipalRules};
use crate::log::{CheckpointError, ClusterReply};
use crate::records::AccessRecord;

/// Tokens of a cluster.
pub const TOKENS_MAX: usize = 10_000;

/// Rules of all principals together.
pub const RULES_MAX: usize = 20_000;

/// Rules of one principal. Each call may compare its resources with all of them.
pub const RULES_PER_PRINCIPAL_MAX: usize = 256;

/// Rules in one command, so that its head fits the log.
pub const RULES_PER_COMMAND_MAX: usize = 100;

/// Quotas of a cluster.
pub const QUOTAS_MAX: usize = 10_000;

/// Bytes of a principal's name.
pub const PRINCIPAL_BYTES_MAX: usize = 255;

/// Bytes of a name or a prefix in a rule: the longest name of a producer.
const RULE_NAME_BYTES_MAX: usize = 255;

/// Returns whether this is a valid name of a principal. `*` is none: it stands for all of them.
pub fn is_principal_name(name: &str) -> bool {
    (1..=PRINCIPAL_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic())
        && name != EVERY_PRINCIPAL
}

/// Tokens and rules of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AccessState {
    tokens: BTreeMap<u64, Arc<TokenRecord>>,
    rules: BTreeMap<Arc<str>, Arc<RuleSet>>,
    rule_count: usize,
    quotas: BTreeMap<String, Arc<QuotaLimits>>,
    /// True from the first token on, also after it was revoked.
    has_had_tokens: bool,
}

/// Result of a command.
pub type AccessChange = Result<bool, ClusterReply>;

impl AccessState {
    /// Checks the fields of a command before it is logged, so that its head fits the log.
    ///
    /// # Errors
    /// The reply of [`AccessState::apply`] to an invalid field.
    pub fn check(command: &AccessCommand) -> Result<(), ClusterReply> {
        match command {
            AccessCommand::CreateToken(create) => {
                let token = create.token.as_ref().filter(|token| token.is_valid());
                let token = token.ok_or_else(|| invalid("token", "is not complete"))?;
                check_principal(&token.principal)?;
                check_rules(&create.rules)
            }
            AccessCommand::RevokeToken(_) => Ok(()),
            AccessCommand::RevokeTokens(principal) => check_principal(principal),
            AccessCommand::Allow(it) | AccessCommand::Remove(it) => {
                check_principal(&it.principal)?;
                check_rules(&it.rules)
            }
            AccessCommand::SetQuota(limits) => check_quota(limits),
        }
    }

    /// Applies a command. Returns whether it changed anything; else the state is unchanged.
    ///
    /// # Errors
    /// The reply, if a field of the command is invalid or a limit is reached.
    pub fn apply(&mut self, command: &AccessCommand) -> AccessChange {
        match command {
            AccessCommand::CreateToken(create) => self.create_token(create),
            AccessCommand::RevokeToken(id) => Ok(self.tokens.remove(id).is_some()),
            AccessCommand::RevokeTokens(principal) => {
                let count = self.tokens.len();
                self.tokens.retain(|_, token| token.principal != *principal);
                Ok(self.tokens.len() != count)
            }
            AccessCommand::Allow(it) => self.allow(&it.principal, &it.rules),
            AccessCommand::Remove(it) => self.remove(&it.principal, &it.rules),
            AccessCommand::SetQuota(limits) => self.set_quota(limits),
        }
    }

    fn create_token(&mut self, create: &CreateToken) -> AccessChange {
        let token = create.token.as_ref().filter(|token| token.is_valid());
        let token = token.ok_or_else(|| invalid("token", "is not complete"))?;
        check_principal(&token.principal)?;
        if let Some(known) = self.tokens.get(&token.id) {
            return match **known == *token {
                true => Ok(false),
                false => Err(invalid("token", "another token has this id; repeat the call")),
            };
        }
        if create.is_first && self.has_had_tokens {
            return Err(invalid("token", "the cluster already had a token"));
        }
        if self.tokens.len() >= TOKENS_MAX {
            let what = format!("the cluster has {TOKENS_MAX} tokens, the limit; revoke some");
            return Err(invalid("token", what));
        }
        // First, as it may fail.
        self.allow(&token.principal, &create.rules)?;
        self.tokens.insert(token.id, Arc::new(token.clone()));
        self.has_had_tokens = true;
        Ok(true)
    }

    fn allow(&mut self, principal: &str, rules: &[AccessRule]) -> AccessChange {
        check_principal(principal)?;
        check_rules(rules)?;
        let old = self.rules.get(principal).map(|set| set.0.clone()).unwrap_or_default();
        let mut new = old.clone();
        for rule in rules {
            match new.iter_mut().find(|known| known.has_target_of(rule)) {
                Some(known) => known.operations |= rule.operations,
                None => new.push(rule.clone()),
            }
        }
        if new.len() > RULES_PER_PRINCIPAL_MAX {
            let what = format!(
                "principal {principal:?} would have {} rules, the limit is \
                 {RULES_PER_PRINCIPAL_MAX}; use prefixes",
                new.len()
            );
            return Err(invalid("rules", what));
        }
        if self.rule_count - old.len() + new.len() > RULES_MAX {
            let what = format!("the cluster has {RULES_MAX} rules, the limit; remove some");
            return Err(invalid("rules", what));
        }
        Ok(self.replace(principal, &old, new))
    }

    fn remove(&mut self, principal: &str, rules: &[AccessRule]) -> AccessChange {
        check_principal(principal)?;
        check_rules(rules)?;
        let old = self.rules.get(principal).map(|set| set.0.clone()).unwrap_or_default();
        let mut new = old.clone();
        for rule in rules {
            if let Some(known) = new.iter_mut().find(|known| known.has_target_of(rule)) {
                known.operations &= !rule.operations;
            }
        }
        new.retain(|rule| rule.operations != 0);
        Ok(self.replace(principal, &old, new))
    }

    /// Replaces the rules of a principal. Returns whether they differ.
    fn replace(&mut self, principal: &str, old: &[AccessRule], mut new: Vec<AccessRule>) -> bool {
        new.sort_by(|a, b| a.target().cmp(&b.target()));
        if new == old {
            return false;
        }
        self.rule_count = self.rule_count - old.len() + new.len();
        if new.is_empty() {
            self.rules.remove(principal);
        } else {
            self.rules.insert(principal.into(), Arc::new(RuleSet(new)));
        }
        true
    }

    fn set_quota(&mut self, limits: &QuotaLimits) -> AccessChange {
        check_quota(limits)?;
        let known = self.quotas.get(&limits.principal);
        if limits.is_unlimited() {
            return Ok(self.quotas.remove(&limits.principal).is_some());
        }
        if known.is_some_and(|known| **known == *limits) {
            return Ok(false);
        }
        if known.is_none() && self.quotas.len() >= QUOTAS_MAX {
            let what = format!(
                "the cluster has {QUOTAS_MAX} quotas, the limit; remove some, or set one for `*`"
            );
            return Err(invalid("quota", what));
        }
        self.quotas.insert(limits.principal.clone(), Arc::new(limits.clone()));
        Ok(true)
    }

    /// Returns the quota of a principal: its own, or else the one of `*`.
    pub fn quota_of(&self, principal: &str) -> Option<&Arc<QuotaLimits>> {
        self.quotas.get(principal).or_else(|| self.quotas.get(EVERY_PRINCIPAL))
    }

    /// Iterates over the quotas, sorted by principal.
    pub fn quotas(&self) -> impl ExactSizeIterator<Item = &Arc<QuotaLimits>> {
        self.quotas.values()
    }

    /// Returns the record of a presented token.
    ///
    /// # Errors
    /// [`TokenError::Unknown`] or [`TokenError::Expired`].
    pub fn verify(
        &self,
        token: &BearerToken,
        now_us: u64,
    ) -> Result<&Arc<TokenRecord>, TokenError> {
        let record = self.tokens.get(&token.id()).filter(|record| record.is_of(token));
        let record = record.ok_or(TokenError::Unknown)?;
        record.check_expiry(now_us)?;
        Ok(record)
    }

    pub fn token(&self, id: u64) -> Option<&Arc<TokenRecord>> {
        self.tokens.get(&id)
    }

    /// Iterates over the tokens, sorted by id.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = &Arc<TokenRecord>> {
        self.tokens.values()
    }

    /// Returns the rules of a principal.
    pub fn rules_of(&self, principal: &str) -> Option<&Arc<RuleSet>> {
        self.rules.get(principal)
    }

    /// Iterates over the principals that have rules, sorted by name.
    pub fn principals(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &Arc<RuleSet>)> {
        self.rules.iter()
    }

    /// Returns whether the cluster ever had a token.
    pub fn has_had_tokens(&self) -> bool {
        self.has_had_tokens
    }

    /// Returns whether there never was a token, a rule or a quota.
    pub fn is_empty(&self) -> bool {
        let has_entries =
            !self.tokens.is_empty() || !self.rules.is_empty() || !self.quotas.is_empty();
        !has_entries && !self.has_had_tokens
    }

    pub(crate) fn to_record(&self) -> AccessRecord {
        let principals = self.rules.iter().map(|(principal, set)| PrincipalRules {
            principal: principal.to_string(),
            rules: set.0.clone(),
        });
        AccessRecord {
            tokens: self.tokens.values().map(|token| TokenRecord::clone(token)).collect(),
            principals: principals.collect(),
            has_had_tokens: self.has_had_tokens,
            quotas: self.quotas.values().map(|limits| QuotaLimits::clone(limits)).collect(),
        }
    }
}

impl AccessRecord {
    /// Decodes the state.
    ///
    /// # Errors
    /// [`CheckpointError`] if a token or rule is invalid or appears twice.
    pub(crate) fn into_state(self) -> Result<AccessState, CheckpointError> {
        let broken = |what: &str| CheckpointError::new(format!("access control: {what}"));
        let mut state =
            AccessState { has_had_tokens: self.has_had_tokens, ..AccessState::default() };
        for token in self.tokens {
            if !token.is_valid() || !is_principal_name(&token.principal) {
                return Err(broken("a token is not complete"));
            }
            if state.tokens.insert(token.id, Arc::new(token)).is_some() {
                return Err(broken("a token appears twice"));
            }
        }
        for PrincipalRules { principal, rules } in self.principals {
            let is_sorted = rules.windows(2).all(|pair| pair[0].target() < pair[1].target());
            let is_valid =
                is_principal_name(&principal) && rules.iter().all(|it| check_rule(it).is_ok());
            if rules.is_empty() || !is_sorted || !is_valid {
                return Err(broken("the rules of a principal are invalid"));
            }
            state.rule_count += rules.len();
            if state.rules.insert(principal.into(), Arc::new(RuleSet(rules))).is_some() {
                return Err(broken("a principal appears twice"));
            }
        }
        for limits in self.quotas {
            if limits.check().is_err() || limits.is_unlimited() {
                return Err(broken("a quota is invalid"));
            }
            if state.quotas.insert(limits.principal.clone(), Arc::new(limits)).is_some() {
                return Err(broken("a quota appears twice"));
            }
        }
        Ok(state)
    }
}

fn check_quota(limits: &QuotaLimits) -> Result<(), ClusterReply> {
    limits.check().map_err(|(field, what)| invalid(field, what))
}

fn invalid(field: &'static str, what: impl Into<String>) -> ClusterReply {
    ClusterReply::Invalid { field, what: what.into() }
}

fn check_principal(name: &str) -> Result<(), ClusterReply> {
    if is_principal_name(name) {
        return Ok(());
    }
    let what = format!(
        "must have 1..={PRINCIPAL_BYTES_MAX} printable ASCII characters without spaces, and not be \
         `*`"
    );
    Err(invalid("principal", what))
}

fn check_rules(rules: &[AccessRule]) -> Result<(), ClusterReply> {
    if rules.len() > RULES_PER_COMMAND_MAX {
        let what = format!("must be at most {RULES_PER_COMMAND_MAX} in one call");
        return Err(invalid("rules", what));
    }
    rules.iter().try_for_each(check_rule)
}

fn check_rule(rule: &AccessRule) -> Result<(), ClusterReply> {
    let Some(kind) = ResourceKind::from_number(rule.kind) else {
        return Err(invalid("rules", format!("resource kind {} is unknown", rule.kind)));
    };
    let is_cluster = kind == ResourceKind::Cluster;
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'*';
    let has_name = match kind {
        ResourceKind::Cluster => rule.name.is_empty() && !rule.is_prefix,
        // A producer's name is free text.
        ResourceKind::Producer => {
            !rule.name.contains('*') && (rule.is_prefix || !rule.name.is_empty())
        }
        ResourceKind::Topic | ResourceKind::Group => {
            rule.name.bytes().all(is_plain) && (rule.is_prefix || !rule.name.is_empty())
        }
    };
    if !has_name || rule.name.len() > RULE_NAME_BYTES_MAX {
        let what = match is_cluster {
            true => "a rule of the cluster has no name".to_owned(),
            false => format!(
                "the name of a {} in a rule has 1..={RULE_NAME_BYTES_MAX} bytes without '*'; a \
                 prefix may be empty",
                kind.as_str()
            ),
        };
        return Err(invalid("rules", what));
    }
    let allowed = kind.operations().0;
    if rule.operations == 0 || rule.operations & !allowed != 0 {
        let names: Vec<_> = kind.operations().iter().map(|it| it.as_str()).collect();
        let what = format!("the operations of a {} are: {}", kind.as_str(), names.join(", "));
        return Err(invalid("rules", what));
    }
    Ok(())
}
