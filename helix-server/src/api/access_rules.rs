//! Conversions of rules, and the rules of roles.

use helix_proto::log::v1::{self as wire, AccessRole, RoleGrant};

use crate::error::{Error, Result};
use crate::log::{
    AccessOperation as Operation, AccessRule, RULES_PER_COMMAND_MAX, ResourceKind as Kind, RuleSet,
};

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
