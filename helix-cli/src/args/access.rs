//! Arguments of `helix token` and `helix acl`.

use std::time::Duration;

use clap::{Args, Subcommand};
use helix_proto::log::v1::{AccessOperation, AccessRole, AccessRule, ResourceKind, RoleGrant};

use crate::units;

/// Forms of rules, for help texts.
pub(crate) const RULES: &str = "\
Rules and roles:
  topic:orders=read,write    operations on one topic
  topic:orders-*=read        operations on every topic whose name starts with orders-
  topic:*=describe           operations on every topic
  cluster=describe,alter     operations on the cluster
  Resources: topic, group, producer (names of idempotent producers), cluster.
  Operations: read, write, create, delete, alter, describe, commit, admin.
  --role producer:orders-*   write to the topics, under producer names of the same form
  --role consumer:orders     read the topics; in a group, also as group-member of the group
  --role group-member:bill-* join the groups and commit their offsets
  --role operator            manage topics, groups and nodes, without reading or writing records
  --role admin               everything";

#[derive(Debug, Subcommand)]
pub(crate) enum TokenSubcommand {
    /// Make a token for a principal and print it once
    #[command(after_help = RULES)]
    Create {
        /// Name of the caller
        principal: String,
        /// Add a rule for the principal
        #[arg(long = "allow", value_name = "RULE", value_parser = parse_rule)]
        rules: Vec<AccessRule>,
        /// Add the rules of a role for the principal
        #[arg(long = "role", value_name = "ROLE", value_parser = parse_role)]
        roles: Vec<RoleGrant>,
        /// Refuse the token after this time, such as 30d [default: never]
        #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
        expires: Option<Duration>,
    },
    /// List tokens, without their secrets
    List {
        /// List only the tokens of this principal
        #[arg(long)]
        principal: Option<String>,
    },
    /// Revoke tokens
    #[command(group = clap::ArgGroup::new("revoked").required(true))]
    Revoke {
        /// Id of the token, as `helix token list` shows it
        #[arg(group = "revoked")]
        token_id: Option<String>,
        /// Revoke every token of this principal
        #[arg(long, value_name = "PRINCIPAL", group = "revoked")]
        all_of: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum AclSubcommand {
    /// Allow a principal operations
    #[command(after_help = RULES)]
    Allow(AclChangeArgs),
    /// Take operations from the rules of a principal
    #[command(after_help = RULES)]
    Remove(AclChangeArgs),
    /// List the rules of principals
    List {
        /// Principal [default: all]
        principal: Option<String>,
    },
    /// Test a right of a principal; exit code 1 if it is missing
    Test {
        /// Principal
        principal: String,
        /// Operation
        #[arg(value_parser = parse_operation)]
        operation: AccessOperation,
        /// Resource: topic:NAME, group:NAME, producer:NAME or cluster
        #[arg(value_parser = parse_resource)]
        resource: NamedResource,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AclChangeArgs {
    /// Principal
    pub(crate) principal: String,
    /// Rules
    #[arg(value_name = "RULE", value_parser = parse_rule, required_unless_present = "roles")]
    pub(crate) rules: Vec<AccessRule>,
    /// Roles
    #[arg(long = "role", value_name = "ROLE", value_parser = parse_role)]
    pub(crate) roles: Vec<RoleGrant>,
}

/// A resource, or the resources with a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedResource {
    pub(crate) kind: ResourceKind,
    pub(crate) name: String,
    pub(crate) is_prefix: bool,
}

const OPERATIONS: [(&str, AccessOperation); 8] = [
    ("read", AccessOperation::Read),
    ("write", AccessOperation::Write),
    ("create", AccessOperation::Create),
    ("delete", AccessOperation::Delete),
    ("alter", AccessOperation::Alter),
    ("describe", AccessOperation::Describe),
    ("commit", AccessOperation::Commit),
    ("admin", AccessOperation::Admin),
];

const KINDS: [(&str, ResourceKind); 4] = [
    ("topic", ResourceKind::Topic),
    ("group", ResourceKind::Group),
    ("producer", ResourceKind::Producer),
    ("cluster", ResourceKind::Cluster),
];

const ROLES: [(&str, AccessRole); 5] = [
    ("producer", AccessRole::Producer),
    ("consumer", AccessRole::Consumer),
    ("group-member", AccessRole::GroupMember),
    ("operator", AccessRole::Operator),
    ("admin", AccessRole::Admin),
];

fn find<T: Copy>(names: &[(&str, T)], what: &str, name: &str) -> Result<T, String> {
    let found = names.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    found.ok_or_else(|| {
        let known: Vec<_> = names.iter().map(|(known, _)| *known).collect();
        format!("{name:?} is no {what}; choose {}", known.join(", "))
    })
}

fn name_of<T: Copy + PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, known)| *known == value).map_or("unknown", |(name, _)| *name)
}

fn parse_operation(text: &str) -> Result<AccessOperation, String> {
    find(&OPERATIONS, "operation", text)
}

fn parse_resource(text: &str) -> Result<NamedResource, String> {
    let (kind, name) = text.split_once(':').unwrap_or((text, ""));
    let kind = find(&KINDS, "resource", kind)?;
    let has_name = text.contains(':');
    match (kind, has_name) {
        (ResourceKind::Cluster, true) => return Err("the cluster has no name".to_owned()),
        (ResourceKind::Cluster, false) => {}
        (_, false) => return Err(format!("write {text}:NAME, or {text}:* for all names")),
        (_, true) => check_name(name)?,
    }
    let prefix = name.strip_suffix('*');
    Ok(NamedResource { kind, name: prefix.unwrap_or(name).to_owned(), is_prefix: prefix.is_some() })
}

fn check_name(name: &str) -> Result<(), String> {
    let stem = name.strip_suffix('*').unwrap_or(name);
    if name.is_empty() || stem.contains('*') {
        return Err(format!("{name:?} is neither a name nor a prefix with `*` at its end"));
    }
    Ok(())
}

fn parse_rule(text: &str) -> Result<AccessRule, String> {
    let form = "write RESOURCE=OPERATIONS, as in topic:orders-*=read,write";
    let (resource, operations) = text.rsplit_once('=').ok_or(form)?;
    let NamedResource { kind, name, is_prefix } = parse_resource(resource)?;
    let operations = operations.split(',').map(|it| parse_operation(it.trim()).map(i32::from));
    Ok(AccessRule {
        resource_kind: kind.into(),
        name,
        is_prefix,
        operations: operations.collect::<Result<_, _>>()?,
    })
}

fn parse_role(text: &str) -> Result<RoleGrant, String> {
    let (role, name) = text.split_once(':').unwrap_or((text, ""));
    let role = find(&ROLES, "role", role)?;
    let is_whole = matches!(role, AccessRole::Operator | AccessRole::Admin);
    match (is_whole, text.contains(':')) {
        (true, true) => return Err(format!("the role {} has no name", name_of(&ROLES, role))),
        (true, false) => {}
        (false, false) => return Err(format!("write {text}:NAME, or {text}:* for all names")),
        (false, true) => check_name(name)?,
    }
    let prefix = name.strip_suffix('*');
    let (name, is_prefix) = (prefix.unwrap_or(name).to_owned(), prefix.is_some());
    Ok(RoleGrant { role: role.into(), name, is_prefix })
}

/// Formats a rule as the arguments accept it.
pub(crate) fn rule_text(rule: &AccessRule) -> String {
    let kind = rule.resource_kind();
    let operations: Vec<_> = rule.operations().map(|it| name_of(&OPERATIONS, it)).collect();
    let resource = match kind {
        ResourceKind::Cluster => "cluster".to_owned(),
        kind => {
            let star = if rule.is_prefix { "*" } else { "" };
            format!("{}:{}{star}", name_of(&KINDS, kind), rule.name)
        }
    };
    format!("{resource}={}", operations.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_print_as_they_are_written() {
        for text in [
            "topic:orders=read,write",
            "topic:orders-*=read",
            "topic:*=describe",
            "group:a=commit",
            "producer:a=b=write",
            "cluster=alter,describe",
        ] {
            assert_eq!(rule_text(&parse_rule(text).unwrap()), text);
        }
        let spaced = parse_rule("topic:a=write, read").unwrap();
        assert_eq!(rule_text(&spaced), "topic:a=write,read");
    }

    #[test]
    fn malformed_rules_and_roles_are_explained() {
        for text in [
            "topic",
            "topic:a",
            "topic=read",
            "topic:=read",
            "topic:a*b=read",
            "topic:**=read",
            "cluster:a=read",
            "table:a=read",
            "topic:a=",
            "topic:a=eat",
            "topic:a=read,",
        ] {
            assert!(!parse_rule(text).unwrap_err().is_empty(), "{text}");
        }
        for text in ["producer", "producer:", "producer:*a", "admin:a", "operator:*", "owner"] {
            assert!(!parse_role(text).unwrap_err().is_empty(), "{text}");
        }
        let grant = parse_role("group-member:bill-*").unwrap();
        assert_eq!((grant.role(), grant.name.as_str()), (AccessRole::GroupMember, "bill-"));
        assert!(grant.is_prefix && parse_role("admin").is_ok());
    }
}
