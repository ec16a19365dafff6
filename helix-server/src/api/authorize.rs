//! The rights that each method needs: one row for each method of each service, with its check.
//!
//! `transport/gate.rs` finds the caller of a call. Each handler then calls [`authorize`] before
//! anything else. A test compares the rows with the descriptors: a method without a row fails it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use helix_proto::log::v1::*;
use tonic::Request;

use super::call_memory;
use crate::access::audit::AuditEvent;
use crate::access::{AuthMode, Caller};
use crate::call::{CallAccess, CallMemory, MethodKind, MethodRow};
use crate::error::{Denial, Error, Result};
use crate::log::{
    AccessOperation as Operation, AccessResource as Resource, ResourceKind as Kind, RuleSet,
    TokenError, is_pattern,
};
use crate::node::Node;

/// A request whose rights are checked.
pub(crate) trait GuardedRequest {
    const METHOD: &'static str;
    const KIND: MethodKind;

    /// Checks the rights that the request needs.
    fn check(&self, check: &RightsCheck<'_>) -> Result<()>;
}

macro_rules! methods {
    ($($service:ident { $(
        $method:ident($request:ty) $kind:ident $rights:literal => |$it:pat_param, $check:pat_param|
        $body:expr;
    )* })*) => {
        /// Every method of the public services.
        pub(crate) const METHODS: &[MethodRow] = &[$($(
            MethodRow {
                method: concat!("helix.log.v1.", stringify!($service), "/", stringify!($method)),
                kind: MethodKind::$kind,
                rights: $rights,
            },
        )*)*];

        $($(
            impl GuardedRequest for $request {
                const METHOD: &'static str =
                    concat!("helix.log.v1.", stringify!($service), "/", stringify!($method));
                const KIND: MethodKind = MethodKind::$kind;

                fn check(&self, check: &RightsCheck<'_>) -> Result<()> {
                    let ($it, $check) = (self, check);
                    $body
                }
            }
        )*)*
    };
}

methods! {
    ProduceService {
        InitProducer(InitProducerRequest) Data
            "write on the producer name; without a name, write on any topic"
            => |it, check| {
            match it.producer_name.as_str() {
                "" => check.some(Operation::Write, Kind::Topic),
                name => check.one(Operation::Write, Resource::Producer(name)),
            }
        };
        Append(AppendRequest) Data
            "write on the topic"
            => |it, check|
            check.one(Operation::Write, Resource::Topic(&it.topic));
        AppendStream(AppendStreamInit) Stream
            "write on the topic"
            => |it, check|
            check.one(Operation::Write, Resource::Topic(&it.topic));
    }
    ConsumeService {
        Fetch(FetchRequest) Data
            "read on each topic, and on the group of a start position"
            => |it, check|
            check.starts(&it.partitions);
        Subscribe(SubscribeRequest) Stream
            "read on each topic, and on the groups that it names"
            => |it, check| {
            if let Some(membership) = &it.membership {
                check.one(Operation::Read, Resource::Group(&membership.group))?;
            }
            check.starts(&it.partitions)
        };
        ResolveOffsets(ResolveOffsetsRequest) Data
            "read on the topic, and on the group of a position"
            => |it, check| {
            check.start(it.position.as_ref())?;
            check.one(Operation::Read, Resource::Topic(&it.topic))
        };
    }
    TopicService {
        CreateTopic(CreateTopicRequest) Control
            "create on the topic"
            => |it, check|
            check.one(Operation::Create, Resource::Topic(&it.name));
        GetTopic(GetTopicRequest) Data
            "describe on the topic"
            => |it, check|
            check.one(Operation::Describe, Resource::Topic(&it.name));
        ListTopics(ListTopicsRequest) Data
            "none; lists topics with describe"
            => |_, check| check.caller();
        UpdateTopic(UpdateTopicRequest) Control
            "alter on the topic"
            => |it, check|
            check.one(Operation::Alter, Resource::Topic(&it.name));
        AddPartitions(AddPartitionsRequest) Control
            "alter on the topic"
            => |it, check|
            check.one(Operation::Alter, Resource::Topic(&it.name));
        DeleteTopic(DeleteTopicRequest) Control
            "delete on the topic"
            => |it, check|
            check.one(Operation::Delete, Resource::Topic(&it.name));
        TrimPartition(TrimPartitionRequest) Control
            "delete on the topic"
            => |it, check|
            check.one(Operation::Delete, Resource::Topic(&it.topic));
        SetFencingToken(SetFencingTokenRequest) Control
            "write on the topic"
            => |it, check|
            check.one(Operation::Write, Resource::Topic(&it.topic));
    }
    GroupService {
        Heartbeat(HeartbeatRequest) Data
            "read on the group, and on each subscribed topic or the prefix of a pattern"
            => |it, check| {
            check.one(Operation::Read, Resource::Group(&it.group))?;
            it.topics.iter().try_for_each(|topic| check.subscribed(topic))
        };
        Leave(LeaveRequest) Data
            "read on the group"
            => |it, check|
            check.one(Operation::Read, Resource::Group(&it.group));
        CommitOffsets(CommitOffsetsRequest) Data
            "commit on the group, read on each topic"
            => |it, check| {
            check.one(Operation::Commit, Resource::Group(&it.group))?;
            check.partitions(Operation::Read, &it.offsets)
        };
        GetOffsets(GetOffsetsRequest) Data
            "describe on the group; returns topics with describe"
            => |it, check|
            check.one(Operation::Describe, Resource::Group(&it.group));
        ListGroups(ListGroupsRequest) Data
            "none; lists groups with describe"
            => |_, check| check.caller();
        DescribeGroup(DescribeGroupRequest) Data
            "describe on the group; returns topics with describe"
            => |it, check|
            check.one(Operation::Describe, Resource::Group(&it.group));
        SeekGroup(SeekGroupRequest) Control
            "alter on the group, describe on each topic; undo without topics: on all topics"
            => |it, check| {
            check.one(Operation::Alter, Resource::Group(&it.group))?;
            if it.undo && it.topics.is_empty() {
                return check.prefix(Operation::Describe, Kind::Topic, "");
            }
            for topic in &it.topics {
                check.one(Operation::Describe, Resource::Topic(topic))?;
            }
            check.partitions(Operation::Describe, &it.offsets)
        };
        ForgetGroupTopic(ForgetGroupTopicRequest) Control
            "alter on the group, describe on the topic"
            => |it, check| {
            check.one(Operation::Alter, Resource::Group(&it.group))?;
            check.one(Operation::Describe, Resource::Topic(&it.topic))
        };
        ReportGatewayMembers(ReportGatewayMembersRequest) Data
            "read on the group"
            => |it, check|
            check.one(Operation::Read, Resource::Group(&it.group));
        DeleteGroup(DeleteGroupRequest) Control
            "delete on the group"
            => |it, check|
            check.one(Operation::Delete, Resource::Group(&it.group));
    }
    ClusterService {
        GetMetadata(GetMetadataRequest) Data
            "none; returns topics with describe"
            => |_, check| check.caller();
        WatchMetadata(WatchMetadataRequest) Stream
            "none; returns topics with describe"
            => |_, check| check.caller();
        GetHealth(GetHealthRequest) Data
            "describe on the cluster"
            => |_, check|
            check.one(Operation::Describe, Resource::Cluster);
        GetNodeStatus(GetNodeStatusRequest) Data
            "describe on the cluster"
            => |_, check|
            check.one(Operation::Describe, Resource::Cluster);
        ListSlowCalls(ListSlowCallsRequest) Data
            "describe on the cluster; returns names of topics with describe"
            => |_, check|
            check.one(Operation::Describe, Resource::Cluster);
        AddNode(AddNodeRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        RemoveNode(RemoveNodeRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        ReplaceNode(ReplaceNodeRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        WatchMembershipChange(WatchMembershipChangeRequest) Stream
            "describe on the cluster"
            => |_, check|
            check.one(Operation::Describe, Resource::Cluster);
        SetDraining(SetDrainingRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        BalanceLeaders(BalanceLeadersRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        TransferLeader(TransferLeaderRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        GetPlacement(GetPlacementRequest) Data
            "describe on the cluster"
            => |_, check|
            check.one(Operation::Describe, Resource::Cluster);
        SetCordoned(SetCordonedRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        SetReplicas(SetReplicasRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        MoveShard(MoveShardRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        AddShards(AddShardsRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        SetMovesPaused(SetMovesPausedRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
        CancelMove(CancelMoveRequest) Control
            "alter on the cluster"
            => |_, check|
            check.one(Operation::Alter, Resource::Cluster);
    }
    AccessService {
        WhoAmI(WhoAmIRequest) Data
            "none"
            => |_, check| check.caller();
        CreateToken(CreateTokenRequest) Control
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        ListTokens(ListTokensRequest) Data
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        RevokeToken(RevokeTokenRequest) Control
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        AllowAccess(AllowAccessRequest) Control
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        RemoveAccess(RemoveAccessRequest) Control
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        ListAccess(ListAccessRequest) Data
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        TestAccess(TestAccessRequest) Data
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        SetQuota(SetQuotaRequest) Control
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        ListQuotas(ListQuotasRequest) Data
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
        ListRefusedCalls(ListRefusedCallsRequest) Data
            "admin on the cluster"
            => |_, check|
            check.one(Operation::Admin, Resource::Cluster);
    }
}

/// Prefix of the paths that need no credentials: probes of load balancers have none.
const HEALTH: &str = "/grpc.health.v1.Health/";

/// Returns whether a path needs no credentials. Every other path does, also reflection and paths
/// that do not exist.
pub(crate) fn is_open(path: &str) -> bool {
    path.starts_with(HEALTH)
}

/// Returns the row of a path, "/helix.log.v1.TopicService/CreateTopic".
pub(crate) fn method_row(path: &str) -> Option<&'static MethodRow> {
    static ROWS: LazyLock<HashMap<&'static str, &'static MethodRow>> =
        LazyLock::new(|| METHODS.iter().map(|row| (row.method, row)).collect());
    ROWS.get(path.strip_prefix('/')?).copied()
}

/// Checks that the caller of a call may make this request, by this node's copy of the rules. A
/// request of a control method does not compile: it takes [`authorize_change`].
///
/// # Errors
/// [`Error::NotAMember`], [`Error::Unauthenticated`] or [`Error::PermissionDenied`].
pub(super) fn authorize<T: GuardedRequest>(
    node: &Node,
    call: Option<&CallMemory>,
    request: &T,
) -> Result<()> {
    const { assert!(!matches!(T::KIND, MethodKind::Control), "use authorize_change") };
    authorize_by_copy(node, call, request)
}

/// Methods that a removed node still answers: they say of itself that it was removed.
const OWN_STATE: [&str; 2] = [GetHealthRequest::METHOD, GetNodeStatusRequest::METHOD];

fn authorize_by_copy<T: GuardedRequest>(
    node: &Node,
    call: Option<&CallMemory>,
    request: &T,
) -> Result<()> {
    if !OWN_STATE.contains(&T::METHOD) {
        node.check_member()?;
    }
    if node.auth_mode() == AuthMode::Off {
        return Ok(());
    }
    // A call that did not pass the gate has no rights.
    let access = call.and_then(CallMemory::access).ok_or(TokenError::Missing)?;
    let check = RightsCheck::new(node, access, T::METHOD)?;
    request.check(&check)
}

/// Like [`authorize`], for a handler that needs the call for nothing else.
pub(super) fn authorize_request<T: GuardedRequest>(
    node: &Node,
    request: &Request<T>,
) -> Result<()> {
    if node.auth_mode() == AuthMode::Off {
        return authorize(node, None, request.get_ref());
    }
    authorize(node, call_memory(request).as_deref(), request.get_ref())
}

/// Checks that the caller of a heartbeat may read the topics that its member subscribes to.
///
/// # Errors
/// As of [`authorize`].
pub(super) fn authorize_subscription(
    node: &Node,
    call: Option<&CallMemory>,
    topics: &[String],
) -> Result<()> {
    let access = call.and_then(CallMemory::access).ok_or(TokenError::Missing)?;
    let check = RightsCheck::new(node, access, HeartbeatRequest::METHOD)?;
    topics.iter().try_for_each(|topic| check.subscribed(topic))
}

/// Like [`authorize_request`], for a control method. It is decided with a copy of the rules that is
/// as new as the call, so that a revoked operator changes nothing through a node that lags.
///
/// # Errors
/// As of [`authorize`], [`Error::NoLeader`] if this node cannot learn the newest rules, and
/// [`Error::NotAMember`].
pub(super) async fn authorize_change<T: GuardedRequest + Sync>(
    node: &Node,
    request: &Request<T>,
) -> Result<()> {
    const { assert!(matches!(T::KIND, MethodKind::Control), "use authorize_request") };
    // A removed node has no leader, and would say that instead.
    node.check_member()?;
    if node.auth_mode() == AuthMode::Off {
        return Ok(());
    }
    let call = call_memory(request);
    // First by the copy, so that a caller without the right does not load shard 0's leader.
    authorize_by_copy(node, call.as_deref(), request.get_ref())?;
    node.cluster().catch_up().await?;
    authorize_by_copy(node, call.as_deref(), request.get_ref())
}

/// Checks again the rights that an open stream was opened with.
///
/// # Errors
/// As of [`authorize`].
pub(crate) fn reauthorize(node: &Node, access: &CallAccess, method: &'static str) -> Result<()> {
    let check = RightsCheck::new(node, access, method)?;
    match access.granted() {
        Some((operation, resource)) => check.one(*operation, resource.as_resource()),
        None => check.caller(),
    }
}

/// Checks again, after a change of the rules, that the caller of a waiting call may read topics.
/// `checked` keeps the caller as of the last check, so that each change is checked once.
///
/// # Errors
/// As of [`authorize`].
pub(super) fn reauthorize_reads<'a>(
    node: &Node,
    call: Option<&CallMemory>,
    method: &'static str,
    checked: &mut Option<Caller>,
    topics: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let access = call.and_then(CallMemory::access);
    let Some((access, caller)) = access.and_then(|it| Some((it, it.caller()?))) else {
        return Ok(());
    };
    if node.is_current(checked.as_ref().unwrap_or(caller)) {
        return Ok(());
    }
    let check = RightsCheck::new(node, access, method)?;
    for topic in topics {
        check.one(Operation::Read, Resource::Topic(topic))?;
    }
    *checked = check.renewed;
    Ok(())
}

/// Topics and groups that a caller may see.
#[derive(Debug, Clone)]
pub(super) struct Visibility(Option<Arc<RuleSet>>);

impl Visibility {
    /// Returns the topics and groups that the caller of this call sees now.
    ///
    /// # Errors
    /// [`Error::Unauthenticated`] if its token is no longer valid.
    pub(super) fn of(node: &Node, call: Option<&CallMemory>) -> Result<Self> {
        if node.auth_mode() == AuthMode::Off {
            return Ok(Self(None));
        }
        let access = call.and_then(CallMemory::access).ok_or(TokenError::Missing)?;
        let Some(caller) = access.caller() else { return Self::of_anonymous(node) };
        let renewed = if node.is_current(caller) { None } else { Some(node.renewed(caller)?) };
        Ok(Self(Some(renewed.as_ref().unwrap_or(caller).rules().clone())))
    }

    fn of_anonymous(node: &Node) -> Result<Self> {
        match node.auth_mode() {
            AuthMode::Off | AuthMode::Optional => Ok(Self(None)),
            AuthMode::Required => Err(TokenError::Missing.into()),
        }
    }

    pub(super) fn sees_topic(&self, name: &str) -> bool {
        self.sees(Resource::Topic(name))
    }

    /// Returns whether the caller sees a subscribed name, or every topic that a pattern can match.
    pub(super) fn sees_subscription(&self, text: &str) -> bool {
        let Some(rules) = self.0.as_ref() else { return true };
        match text.split_once('*') {
            Some((prefix, _)) if is_pattern(text) => {
                rules.allows_prefix(Operation::Describe, Kind::Topic, prefix)
            }
            _ => rules.allows(Operation::Describe, Resource::Topic(text)),
        }
    }

    pub(super) fn sees_group(&self, name: &str) -> bool {
        self.sees(Resource::Group(name))
    }

    fn sees(&self, resource: Resource<'_>) -> bool {
        self.0.as_ref().is_none_or(|rules| rules.allows(Operation::Describe, resource))
    }

    pub(super) fn sees_every_topic(&self) -> bool {
        self.clone().hiding_topics().is_none()
    }

    /// Returns the rules that hide topics; `None` if every topic is visible.
    pub(super) fn hiding_topics(self) -> Option<Arc<RuleSet>> {
        self.0.filter(|rules| !rules.allows_prefix(Operation::Describe, Kind::Topic, ""))
    }

    /// Returns the visibility that these rules give; `None` shows everything.
    pub(super) fn by(rules: Option<Arc<RuleSet>>) -> Self {
        Self(rules)
    }
}

/// The checks of one request.
pub(crate) struct RightsCheck<'a> {
    node: &'a Node,
    access: &'a CallAccess,
    method: &'static str,
    /// The caller with newer rules than at the gate.
    renewed: Option<Caller>,
}

impl<'a> RightsCheck<'a> {
    fn new(node: &'a Node, access: &'a CallAccess, method: &'static str) -> Result<Self> {
        let renewed = match access.caller() {
            Some(caller) if !node.is_current(caller) => Some(node.renewed(caller)?),
            _ => None,
        };
        Ok(Self { node, access, method, renewed })
    }

    /// Checks that the call has a caller; it needs no rights.
    fn caller(&self) -> Result<()> {
        match (self.access.caller(), self.node.auth_mode()) {
            (None, AuthMode::Required) => Err(TokenError::Missing.into()),
            _ => Ok(()),
        }
    }

    fn one(&self, operation: Operation, resource: Resource<'_>) -> Result<()> {
        let (kind, name) = (resource.kind().as_str(), resource.name());
        self.decide(operation, kind, name, |rules| rules.allows(operation, resource))?;
        self.access.grant(operation, resource);
        Ok(())
    }

    /// Checks a right on at least one resource of a kind.
    fn some(&self, operation: Operation, kind: Kind) -> Result<()> {
        let any = match kind {
            Kind::Topic => "any topic",
            Kind::Group => "any group",
            Kind::Producer => "any producer",
            Kind::Cluster => "cluster",
        };
        self.decide(operation, any, "", |rules| rules.allows_some(operation, kind))
    }

    /// Checks a right on every resource whose name begins with `prefix`.
    fn prefix(&self, operation: Operation, kind: Kind, prefix: &str) -> Result<()> {
        let shown = format!("{prefix}*");
        self.decide(operation, kind.as_str(), &shown, |rules| {
            rules.allows_prefix(operation, kind, prefix)
        })
    }

    /// Checks the subscription to a topic, or to the topics of a pattern.
    fn subscribed(&self, topic: &str) -> Result<()> {
        match topic.split_once('*') {
            Some((prefix, _)) if is_pattern(topic) => {
                self.prefix(Operation::Read, Kind::Topic, prefix)
            }
            _ => self.one(Operation::Read, Resource::Topic(topic)),
        }
    }

    fn start(&self, start: Option<&StartPosition>) -> Result<()> {
        match start.and_then(|start| start.position.as_ref()) {
            Some(start_position::Position::CommittedGroup(group)) => {
                self.one(Operation::Read, Resource::Group(group))
            }
            _ => Ok(()),
        }
    }

    fn starts(&self, partitions: &[PartitionStart]) -> Result<()> {
        let mut topic = None;
        for partition in partitions {
            self.start(partition.start.as_ref())?;
            // Many partitions of one topic need one check.
            if topic != Some(partition.topic.as_str()) {
                self.one(Operation::Read, Resource::Topic(&partition.topic))?;
                topic = Some(partition.topic.as_str());
            }
        }
        // An empty request fails with its own error.
        self.caller()
    }

    fn partitions(&self, operation: Operation, offsets: &[CommittedOffset]) -> Result<()> {
        for partition in offsets.iter().filter_map(|offset| offset.partition.as_ref()) {
            self.one(operation, Resource::Topic(&partition.topic))?;
        }
        Ok(())
    }

    fn decide(
        &self,
        operation: Operation,
        kind: &'static str,
        name: &str,
        allows: impl FnOnce(&RuleSet) -> bool,
    ) -> Result<()> {
        self.caller()?;
        let Some(caller) = self.renewed.as_ref().or(self.access.caller()) else { return Ok(()) };
        if allows(caller.rules()) {
            return Ok(());
        }
        let principal = caller.principal().as_str();
        let denial = Denial {
            principal: principal.to_owned(),
            operation: operation.as_str(),
            kind,
            name: name.to_owned(),
        };
        let event = AuditEvent {
            kind: "denial",
            principal,
            user_agent: self.access.user_agent(),
            method: self.method,
            resource: &denial.right(),
            result: "PERMISSION_DENIED",
        };
        self.node.audit().refusal(&self.access.peer(), &event);
        Err(Error::PermissionDenied { denial: Box::new(denial) })
    }
}

#[cfg(test)]
mod tests;
