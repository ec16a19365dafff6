//! Rules: operations that a principal may do on resources, named exactly or by a prefix.

use std::fmt::{self, Display};

use super::PrincipalRules;
pub use crate::records::AccessRule;

/// An operation on a resource. The numbers are bits in [`OperationSet`] and permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum AccessOperation {
    Read = 1,
    Write = 1 << 1,
    Create = 1 << 2,
    Delete = 1 << 3,
    Alter = 1 << 4,
    /// Implied by every other operation on the same resource.
    Describe = 1 << 5,
    Commit = 1 << 6,
    /// Every operation on the resource; on the cluster, every operation on every resource.
    Admin = 1 << 7,
}

impl AccessOperation {
    pub const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::Create,
        Self::Delete,
        Self::Alter,
        Self::Describe,
        Self::Commit,
        Self::Admin,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Create => "create",
            Self::Delete => "delete",
            Self::Alter => "alter",
            Self::Describe => "describe",
            Self::Commit => "commit",
            Self::Admin => "admin",
        }
    }
}

impl Display for AccessOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A set of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OperationSet(pub u32);

impl OperationSet {
    pub fn of(operations: &[AccessOperation]) -> Self {
        Self(operations.iter().fold(0, |bits, operation| bits | *operation as u32))
    }

    pub fn contains(self, operation: AccessOperation) -> bool {
        self.0 & operation as u32 != 0
    }

    /// Returns whether a rule with these operations allows one.
    pub fn allows(self, operation: AccessOperation) -> bool {
        self.contains(operation)
            || self.contains(AccessOperation::Admin)
            || operation == AccessOperation::Describe && self.0 != 0
    }

    pub fn iter(self) -> impl Iterator<Item = AccessOperation> {
        AccessOperation::ALL.into_iter().filter(move |operation| self.contains(*operation))
    }
}

/// Kind of a resource. The numbers are permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum ResourceKind {
    Topic = 1,
    Group = 2,
    /// Names of idempotent producers, which fence each other.
    Producer = 3,
    /// The cluster itself; it has no name.
    Cluster = 4,
}

impl ResourceKind {
    pub const ALL: [Self; 4] = [Self::Topic, Self::Group, Self::Producer, Self::Cluster];

    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Topic => "topic",
            Self::Group => "group",
            Self::Producer => "producer",
            Self::Cluster => "cluster",
        }
    }

    /// Returns the operations that exist for resources of this kind.
    pub fn operations(self) -> OperationSet {
        use AccessOperation as O;
        OperationSet::of(match self {
            Self::Topic => {
                &[O::Read, O::Write, O::Create, O::Delete, O::Alter, O::Describe, O::Admin]
            }
            Self::Group => &[O::Read, O::Commit, O::Delete, O::Alter, O::Describe, O::Admin],
            Self::Producer => &[O::Write, O::Admin],
            Self::Cluster => &[O::Alter, O::Describe, O::Admin],
        })
    }
}

/// A resource of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessResource<'a> {
    Topic(&'a str),
    Group(&'a str),
    Producer(&'a str),
    Cluster,
}

impl<'a> AccessResource<'a> {
    pub fn new(kind: ResourceKind, name: &'a str) -> Self {
        match kind {
            ResourceKind::Topic => Self::Topic(name),
            ResourceKind::Group => Self::Group(name),
            ResourceKind::Producer => Self::Producer(name),
            ResourceKind::Cluster => Self::Cluster,
        }
    }

    pub fn kind(self) -> ResourceKind {
        match self {
            Self::Topic(_) => ResourceKind::Topic,
            Self::Group(_) => ResourceKind::Group,
            Self::Producer(_) => ResourceKind::Producer,
            Self::Cluster => ResourceKind::Cluster,
        }
    }

    /// Returns the name; empty for the cluster.
    pub fn name(self) -> &'a str {
        match self {
            Self::Topic(name) | Self::Group(name) | Self::Producer(name) => name,
            Self::Cluster => "",
        }
    }
}

impl AccessRule {
    pub fn new(
        kind: ResourceKind,
        name: impl Into<String>,
        is_prefix: bool,
        operations: &[AccessOperation],
    ) -> Self {
        let operations = OperationSet::of(operations).0;
        Self { kind: kind as u32, name: name.into(), is_prefix, operations }
    }

    pub fn operation_set(&self) -> OperationSet {
        OperationSet(self.operations)
    }

    /// Returns the rules' operations as text: "read,write".
    fn operations_text(&self) -> String {
        let names: Vec<_> = self.operation_set().iter().map(AccessOperation::as_str).collect();
        names.join(",")
    }

    /// Returns whether both rules are about the same resources.
    pub(super) fn has_target_of(&self, other: &Self) -> bool {
        self.target() == other.target()
    }

    pub(super) fn target(&self) -> (u32, &str, bool) {
        (self.kind, &self.name, self.is_prefix)
    }

    fn matches(&self, resource: AccessResource<'_>) -> bool {
        self.kind == resource.kind() as u32 && self.matches_name(resource.name())
    }

    fn matches_name(&self, name: &str) -> bool {
        if self.is_prefix { name.starts_with(&self.name) } else { name == self.name }
    }

    fn is_cluster_admin(&self) -> bool {
        self.kind == ResourceKind::Cluster as u32
            && self.operation_set().contains(AccessOperation::Admin)
    }
}

impl Display for AccessRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = ResourceKind::from_number(self.kind).map_or("unknown", ResourceKind::as_str);
        f.write_str(kind)?;
        if kind != ResourceKind::Cluster.as_str() {
            write!(f, ":{}{}", self.name, if self.is_prefix { "*" } else { "" })?;
        }
        write!(f, "={}", self.operations_text())
    }
}

/// The rules of one principal, sorted by kind, name and form.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleSet(pub(super) Vec<AccessRule>);

impl RuleSet {
    pub fn rules(&self) -> &[AccessRule] {
        &self.0
    }

    /// Returns the rules as bytes; equal rules give equal bytes.
    pub fn encode(&self) -> Vec<u8> {
        let record = PrincipalRules { principal: String::new(), rules: self.0.clone() };
        prost::Message::encode_to_vec(&record)
    }

    /// Returns whether a rule allows the operation on the resource. Does not allocate.
    pub fn allows(&self, operation: AccessOperation, resource: AccessResource<'_>) -> bool {
        self.allowing(operation, resource).is_some()
    }

    /// Returns the first rule that allows the operation on the resource.
    pub fn allowing(
        &self,
        operation: AccessOperation,
        resource: AccessResource<'_>,
    ) -> Option<&AccessRule> {
        self.0.iter().find(|rule| {
            rule.is_cluster_admin()
                || rule.operation_set().allows(operation) && rule.matches(resource)
        })
    }

    /// Returns whether one rule allows the operation on every resource whose name begins with
    /// `prefix`.
    pub fn allows_prefix(
        &self,
        operation: AccessOperation,
        kind: ResourceKind,
        prefix: &str,
    ) -> bool {
        self.0.iter().any(|rule| {
            let covers =
                rule.kind == kind as u32 && rule.is_prefix && prefix.starts_with(&rule.name);
            rule.is_cluster_admin() || covers && rule.operation_set().allows(operation)
        })
    }

    /// Returns whether a rule allows the operation on at least one possible resource of the kind.
    pub fn allows_some(&self, operation: AccessOperation, kind: ResourceKind) -> bool {
        self.0.iter().any(|rule| {
            rule.is_cluster_admin()
                || rule.kind == kind as u32 && rule.operation_set().allows(operation)
        })
    }
}
