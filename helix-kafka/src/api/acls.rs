//! DescribeAcls: the access rules of the cluster, read-only.

use helix_client::proto::log::v1::{AccessOperation, AccessRule, ResourceKind};
use kafka_protocol::messages::describe_acls_response::{AclDescription, DescribeAclsResource};
use kafka_protocol::messages::{DescribeAclsRequest, DescribeAclsResponse};

use crate::context::{RequestContext, text};
use crate::errors::{CallTarget, code_of};

/// Any value of a filter.
const ANY: i8 = 1;

/// Kinds of resources.
const TOPIC: i8 = 2;
const GROUP: i8 = 3;
const CLUSTER: i8 = 4;
const TRANSACTIONAL_ID: i8 = 5;

/// Kinds of names: any that would match a name, exact ones, prefixes.
const MATCH: i8 = 2;
const LITERAL: i8 = 3;
const PREFIXED: i8 = 4;

/// Rules only allow.
const ALLOW: i8 = 3;

/// Name of the cluster as a resource.
const CLUSTER_NAME: &str = "kafka-cluster";

/// Hosts from which a rule holds.
const ANY_HOST: &str = "*";

fn operation_code(operation: AccessOperation, kind: ResourceKind) -> Option<i8> {
    Some(match operation {
        AccessOperation::Unspecified => return None,
        AccessOperation::Admin => 2,
        AccessOperation::Read => 3,
        AccessOperation::Write if kind == ResourceKind::Producer => 4,
        AccessOperation::Write => 4,
        AccessOperation::Create => 5,
        AccessOperation::Delete => 6,
        AccessOperation::Alter => 7,
        AccessOperation::Describe => 8,
        // Kafka's members of a group need no more than to read it.
        AccessOperation::Commit => 3,
    })
}

/// Answers a request for rules.
pub(crate) async fn describe_acls(
    context: &RequestContext,
    request: DescribeAclsRequest,
) -> DescribeAclsResponse {
    let wanted = request.principal_filter.as_deref();
    let principal = wanted.map(|filter| filter.strip_prefix("User:").unwrap_or(filter));
    let principals = match context.upstream.client().admin().access(principal).await {
        Ok(principals) => principals,
        Err(error) => {
            let code = code_of(&error, CallTarget::Cluster);
            return DescribeAclsResponse::default()
                .with_error_code(code.code())
                .with_error_message(Some(text(error.message.clone())));
        }
    };
    let mut resources: Vec<DescribeAclsResource> = Vec::new();
    for access in &principals {
        for rule in &access.rules {
            let (kind, name, pattern) = resource_of(rule);
            if !is_wanted(&request, kind, &name, pattern) {
                continue;
            }
            let mut codes: Vec<i8> = rule
                .operations()
                .filter_map(|operation| operation_code(operation, rule.resource_kind()))
                .filter(|code| request.operation == ANY || request.operation == *code)
                .collect();
            codes.sort_unstable();
            codes.dedup();
            let acls = codes.into_iter().map(|code| {
                AclDescription::default()
                    .with_principal(text(format!("User:{}", access.principal)))
                    .with_host(text(ANY_HOST))
                    .with_operation(code)
                    .with_permission_type(ALLOW)
            });
            let acls: Vec<_> = acls.collect();
            let same = resources.iter_mut().find(|resource| {
                resource.resource_type == kind
                    && resource.pattern_type == pattern
                    && *resource.resource_name == *name
            });
            match same {
                Some(resource) => resource.acls.extend(acls),
                None if acls.is_empty() => {}
                None => resources.push(
                    DescribeAclsResource::default()
                        .with_resource_type(kind)
                        .with_resource_name(text(name))
                        .with_pattern_type(pattern)
                        .with_acls(acls),
                ),
            }
        }
    }
    DescribeAclsResponse::default().with_resources(resources)
}

/// Returns the kind, the name and the kind of name of a rule.
fn resource_of(rule: &AccessRule) -> (i8, String, i8) {
    let kind = match rule.resource_kind() {
        ResourceKind::Topic => TOPIC,
        ResourceKind::Group => GROUP,
        ResourceKind::Producer => TRANSACTIONAL_ID,
        ResourceKind::Cluster | ResourceKind::Unspecified => {
            return (CLUSTER, CLUSTER_NAME.to_owned(), LITERAL);
        }
    };
    match (rule.is_prefix, rule.name.is_empty()) {
        // Kafka writes every name as an exact star.
        (true, true) => (kind, "*".to_owned(), LITERAL),
        (true, false) => (kind, rule.name.clone(), PREFIXED),
        (false, _) => (kind, rule.name.clone(), LITERAL),
    }
}

fn is_wanted(request: &DescribeAclsRequest, kind: i8, name: &str, pattern: i8) -> bool {
    let filter = request.resource_name_filter.as_deref();
    let is_named = match (filter, request.pattern_type_filter) {
        (None, _) => true,
        (Some(filter), MATCH) => {
            filter == name || name == "*" || (pattern == PREFIXED && filter.starts_with(name))
        }
        (Some(filter), _) => filter == name,
    };
    is_named
        && [ANY, kind].contains(&request.resource_type_filter)
        && [ANY, MATCH, pattern].contains(&request.pattern_type_filter)
        && [ANY, ALLOW].contains(&request.permission_type)
        && request.host_filter.as_deref().is_none_or(|host| host == ANY_HOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_rules_as_kafka_does() {
        let rule = |name: &str, is_prefix| AccessRule {
            resource_kind: ResourceKind::Topic.into(),
            name: name.to_owned(),
            is_prefix,
            operations: Vec::new(),
        };
        let any = DescribeAclsRequest::default()
            .with_resource_type_filter(ANY)
            .with_resource_name_filter(None)
            .with_host_filter(None)
            .with_pattern_type_filter(ANY)
            .with_operation(ANY)
            .with_permission_type(ANY);
        let wants = |request: &DescribeAclsRequest, rule: &AccessRule| {
            let (kind, name, pattern) = resource_of(rule);
            is_wanted(request, kind, &name, pattern)
        };
        assert!(wants(&any, &rule("a", false)) && wants(&any, &rule("", true)));
        let named = any.clone().with_resource_name_filter(Some(text("orders")));
        assert!(wants(&named, &rule("orders", false)) && !wants(&named, &rule("ord", true)));
        let matching = named.with_pattern_type_filter(MATCH);
        for (name, is_prefix) in [("orders", false), ("ord", true), ("", true)] {
            assert!(wants(&matching, &rule(name, is_prefix)), "{name}");
        }
        assert!(!wants(&matching, &rule("other", false)));
        let groups = any.clone().with_resource_type_filter(GROUP);
        assert!(!wants(&groups, &rule("a", false)));
        assert!(!wants(&any.with_permission_type(2), &rule("a", false)), "no rule denies");
    }
}
