//! Conversions of rules, and the rules of roles.

use helix_proto::log::v1::{self as wire, AccessRole, RoleGrant};

use crate::cluster::is_topic_name;
use crate::error::{Error, Result};
use crate::limits::TOPIC_NAME_BYTES_MAX;
use crate::log::{
    AccessOperation as Operation, AccessRule, EVERY_PRINCIPAL, RULES_PER_COMMAND_MAX,
    ResourceKind as Kind, RuleSet,
};
use crate::quote::quote;

pub(super) fn kind_of(kind: i32) -> Result<Kind> {
    let kind = wire::ResourceKind::try_from(kind).unwrap_or_default();
    Ok(match kind {
        wire::ResourceKind::Topic => Kind::Topic,
        wire::ResourceKind::Group => Kind::Group,
        wire::ResourceKind::Producer => Kind::Producer,
        wire::ResourceKind::Cluster => Kind::Cluster,
        wire::ResourceKind::Unspecified => return Err(invalid("resource_kind", "is required")),
    })
}

fn wire_kind(kind: Kind) -> wire::ResourceKind {
    match kind {
        Kind::Topic => wire::ResourceKind::Topic,
        Kind::Group => wire::ResourceKind::Group,
        Kind::Producer => wire::ResourceKind::Producer,
        Kind::Cluster => wire::ResourceKind::Cluster,
    }
}

pub(super) fn operation_of(operation: i32) -> Result<Operation> {
    use wire::AccessOperation as Wire;
    Ok(match Wire::try_from(operation).unwrap_or_default() {
        Wire::Read => Operation::Read,
        Wire::Write => Operation::Write,
        Wire::Create => Operation::Create,
        Wire::Delete => Operation::Delete,
        Wire::Alter => Operation::Alter,
        Wire::Describe => Operation::Describe,
        Wire::Commit => Operation::Commit,
        Wire::Admin => Operation::Admin,
        Wire::Unspecified => return Err(invalid("operation", "is required")),
    })
}

fn wire_operation(operation: Operation) -> wire::AccessOperation {
    use wire::AccessOperation as Wire;
    match operation {
        Operation::Read => Wire::Read,
        Operation::Write => Wire::Write,
        Operation::Create => Wire::Create,
        Operation::Delete => Wire::Delete,
        Operation::Alter => Wire::Alter,
        Operation::Describe => Wire::Describe,
        Operation::Commit => Wire::Commit,
        Operation::Admin => Wire::Admin,
    }
}

/// Returns the rules of a request, with those of its roles. The cluster's state checks them.
pub(super) fn requested_rules(
    rules: &[wire::AccessRule],
    roles: &[RoleGrant],
) -> Result<Vec<AccessRule>> {
    if rules.len() + roles.len() > RULES_PER_COMMAND_MAX {
        let what = format!("must be at most {RULES_PER_COMMAND_MAX} in one call, with roles");
        return Err(invalid("rules", &what));
    }
    let mut found = Vec::new();
    for wire::AccessRule { resource_kind, name, is_prefix, operations } in rules {
        let operations: Vec<Operation> =
            operations.iter().map(|it| operation_of(*it)).collect::<Result<_>>()?;
        found.push(AccessRule::new(kind_of(*resource_kind)?, name, *is_prefix, &operations));
    }
    for grant in roles {
        found.extend(rules_of_role(grant)?);
    }
    Ok(found)
}

/// Names of more bytes are refused for every kind.
const EXPLAINED_BYTES: usize = 255;

/// Checks that each rule can match a resource. Removals are not checked, so that old rules can be
/// removed.
///
/// # Errors
/// [`Error::InvalidArgument`] with the name that no resource has.
pub(super) fn check_matchable(rules: &[AccessRule]) -> Result<()> {
    for rule in rules {
        let kind = Kind::from_number(rule.kind);
        let name = rule.name.as_str();
        let can_match = match kind {
            // A prefix is a name itself, or further characters complete it.
            Some(Kind::Topic | Kind::Group) if rule.is_prefix => {
                name.is_empty() || is_topic_name(&format!("{name}x"))
            }
            // The cluster's state checks for an empty name.
            Some(Kind::Topic | Kind::Group) => name.is_empty() || is_topic_name(name),
            _ => true,
        };
        // The cluster's state explains these for all kinds.
        let is_explained =
            name.len() > EXPLAINED_BYTES || name.contains(|c: char| c == '*' || c.is_control());
        if !can_match && !is_explained {
            let kind = kind.map_or("resource", Kind::as_str);
            let what = format!(
                "no {kind} can have the name {}: names have 1..={TOPIC_NAME_BYTES_MAX} ASCII \
                 letters, digits, '.', '_' and '-'",
                quote(name)
            );
            return Err(invalid("rules", &what));
        }
    }
    Ok(())
}

/// Checks that a name of a principal is not meant as a prefix: names are exact.
///
/// # Errors
/// [`Error::InvalidArgument`]
pub(super) fn check_principal(field: &'static str, name: &str) -> Result<()> {
    match name.ends_with('*') && name != EVERY_PRINCIPAL {
        true => {
            Err(invalid(field, "names of principals are exact; give one without '*' at its end"))
        }
        false => Ok(()),
    }
}

/// Returns the rules that a role stands for.
fn rules_of_role(grant: &RoleGrant) -> Result<Vec<AccessRule>> {
    use Operation as O;
    let RoleGrant { role, name, is_prefix } = grant;
    let named = |kind, operations: &[O]| AccessRule::new(kind, name, *is_prefix, operations);
    let all = |kind, operations: &[O]| AccessRule::new(kind, "", true, operations);
    let cluster = |operations: &[O]| AccessRule::new(Kind::Cluster, "", false, operations);
    let role = AccessRole::try_from(*role).unwrap_or_default();
    let has_name = *is_prefix || !name.is_empty();
    let rules = match role {
        AccessRole::Producer => {
            vec![named(Kind::Topic, &[O::Write]), named(Kind::Producer, &[O::Write])]
        }
        AccessRole::Consumer => vec![named(Kind::Topic, &[O::Read])],
        AccessRole::GroupMember => vec![named(Kind::Group, &[O::Read, O::Commit])],
        AccessRole::Operator if !has_name => vec![
            cluster(&[O::Describe, O::Alter]),
            all(Kind::Topic, &[O::Create, O::Delete, O::Alter, O::Describe]),
            all(Kind::Group, &[O::Delete, O::Alter, O::Describe]),
        ],
        AccessRole::Admin if !has_name => vec![cluster(&[O::Admin])],
        AccessRole::Operator | AccessRole::Admin => {
            return Err(invalid("roles.name", "must be empty for the roles OPERATOR and ADMIN"));
        }
        AccessRole::Unspecified => return Err(invalid("roles.role", "is required")),
    };
    let needs_name = !matches!(role, AccessRole::Operator | AccessRole::Admin);
    if needs_name && !has_name {
        return Err(invalid("roles.name", "is required; for every name set is_prefix"));
    }
    Ok(rules)
}

pub(super) fn wire_rules(rules: &RuleSet) -> Vec<wire::AccessRule> {
    let wire = |rule: &AccessRule| {
        let kind = Kind::from_number(rule.kind).map_or(wire::ResourceKind::Unspecified, wire_kind);
        wire::AccessRule {
            resource_kind: kind.into(),
            name: rule.name.clone(),
            is_prefix: rule.is_prefix,
            operations: rule.operation_set().iter().map(|it| wire_operation(it).into()).collect(),
        }
    };
    rules.rules().iter().map(wire).collect()
}

fn invalid(field: &'static str, what: &str) -> Error {
    Error::InvalidArgument { field, what: what.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_and_kinds_convert_both_ways() {
        for operation in Operation::ALL {
            assert_eq!(operation_of(wire_operation(operation).into()).unwrap(), operation);
        }
        for kind in Kind::ALL {
            assert_eq!(kind_of(wire_kind(kind).into()).unwrap(), kind);
        }
        assert!(operation_of(0).is_err() && operation_of(99).is_err());
        assert!(kind_of(0).is_err() && kind_of(99).is_err());
    }

    #[test]
    fn rules_that_can_match_nothing_are_refused() {
        let check = |kind, name: &str, is_prefix| {
            check_matchable(&[AccessRule::new(kind, name, is_prefix, &[Operation::Read])])
        };
        for kind in [Kind::Topic, Kind::Group] {
            for name in ["a/b", "a b", "größe", ".", "..", "a:b"] {
                let refused = check(kind, name, false).unwrap_err().to_string();
                assert!(refused.contains("can have the name"), "{refused}");
            }
            assert!(
                check(kind, "a/", true).is_err() && check(kind, &"x".repeat(255), true).is_err()
            );
            for name in ["", "a.b_c-D", ".", ".."] {
                check(kind, name, true).unwrap();
            }
            check(kind, "orders", false).unwrap();
        }
        assert!(check_principal("principal", "bob*").is_err());
        for name in ["bob", "*.example.org", EVERY_PRINCIPAL] {
            check_principal("principal", name).unwrap();
        }
        check(Kind::Producer, "a/b c", false).unwrap();
        check(Kind::Cluster, "", false).unwrap();
    }

    #[test]
    fn roles_with_a_scope_need_a_name_and_the_others_have_none() {
        use AccessRole as R;
        let grant = |role: AccessRole, name: &str, is_prefix| {
            rules_of_role(&RoleGrant { role: role.into(), name: name.to_owned(), is_prefix })
        };
        for role in [R::Producer, R::Consumer, R::GroupMember] {
            assert!(grant(role, "", false).is_err(), "{role:?}");
            assert!(grant(role, "", true).is_ok(), "{role:?}");
            assert!(grant(role, "orders", false).is_ok(), "{role:?}");
        }
        for role in [R::Operator, R::Admin] {
            assert!(grant(role, "", false).is_ok(), "{role:?}");
            assert!(grant(role, "", true).is_err(), "{role:?}");
            assert!(grant(role, "orders", false).is_err(), "{role:?}");
        }
        assert!(grant(R::Unspecified, "", false).is_err());
    }
}
