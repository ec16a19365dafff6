//! This node's handle on shard 0. Commands are forwarded to shard 0's leader and return its reply.
//! Reads are local; [`Cluster::catch_up`] first brings the local copy up to date with the leader.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use super::down_nodes::SilentNodes;
use super::machine::ClusterMachine;
use super::member_addresses::MemberAddresses;
use super::peer_messages::{PeerRequest, PeerResponse};
use super::reconcile::ShardProgress;
use super::remote_shards::RemoteShards;
use super::split_tries::SplitTries;
use super::state::ClusterState;
use crate::clock::Clock;
use crate::error::{Error, LeaderHint, Result};
use crate::limits;
use crate::log::{
    ClusterCommand, ClusterReply, HEAD_BYTES_MAX, Head, ProducerOwner, ProducerStamp, Refusal,
    Verdict,
};
use crate::peer::{Hub, PeerError, PeerStatus};
use crate::raft::{Command, LeadershipWatch, ProposeError, Replica, ReplicaId, node_of};
use crate::shard::{Shard, write_error};
use crate::sync;

/// Block of producer ids that this node may issue: `next..end`.
#[derive(Debug, Default)]
struct ProducerIdLease {
    next: u64,
    end: u64,
    owner: ProducerOwner,
}

/// Handle of this node on shard 0 and on the data shards that are open here.
#[derive(Debug)]
pub struct Cluster {
    /// Replaced when the shard is reopened.
    replica: RwLock<Arc<Replica>>,
    machine: Arc<ClusterMachine>,
    pub(super) hub: Arc<Hub>,
    /// Peer addresses from this node's configuration.
    pub(super) seeds: BTreeMap<u64, String>,
    shards: RwLock<BTreeMap<u64, Arc<Shard>>>,
    pub(super) clock: Arc<dyn Clock>,
    lease: Mutex<ProducerIdLease>,
    /// Start of the last attempt to bring this node up to date, and whether it succeeded.
    last_catch_up: tokio::sync::Mutex<Option<(Instant, bool)>>,
    /// Replica changes of the shards that this node leads, by shard id.
    progress: Mutex<BTreeMap<u64, ShardProgress>>,
    /// Reason why a new node has not joined yet; empty if there is none.
    pub(super) join_blocked: Mutex<String>,
    /// Addresses of the members as other nodes report them. They are needed if this node's state
    /// was lost, or is too old to find the members that would bring it up to date.
    pub(super) reported_addresses: Mutex<MemberAddresses>,
    pub(super) remote: Mutex<RemoteShards>,
    pub(super) silent: Mutex<SilentNodes>,
    pub(super) split_tries: Mutex<SplitTries>,
    /// Held while this node records a protocol version.
    pub(super) recording: Arc<tokio::sync::Mutex<()>>,
}

impl Cluster {
    pub fn new(
        replica: Replica,
        machine: Arc<ClusterMachine>,
        hub: Arc<Hub>,
        seeds: BTreeMap<u64, String>,
        clock: Arc<dyn Clock>,
        replace_down_after: Option<Duration>,
    ) -> Self {
        Self {
            replica: RwLock::new(Arc::new(replica)),
            machine,
            hub,
            seeds,
            shards: RwLock::default(),
            clock,
            lease: Mutex::default(),
            last_catch_up: tokio::sync::Mutex::default(),
            progress: Mutex::default(),
            join_blocked: Mutex::default(),
            reported_addresses: Mutex::default(),
            remote: Mutex::default(),
            silent: Mutex::new(SilentNodes::new(replace_down_after)),
            split_tries: Mutex::default(),
            recording: Arc::default(),
        }
    }

    /// Returns whether other nodes have replicas of shard 0. A replica in repair implies it, since
    /// only other nodes can repair it. Returns `None` if shard 0 stopped before its voters were
    /// known; retry after it was reopened.
    pub async fn has_other_replicas(&self) -> Option<bool> {
        let replica = self.replica();
        if replica.repair_of().is_some() {
            return Some(true);
        }
        let voters = match replica.is_formed().await {
            Ok(true) => replica.known_voters().await,
            Ok(false) => return Some(false),
            // A replica that stopped keeps the voters that it published last.
            Err(_) => replica.voters(),
        };
        names_others(&voters, replica.id())
    }

    /// Like [`Self::has_other_replicas`], for a data shard that is not open here, so its voters are
    /// unknown. Also `None` while a change of its replicas may make this the only one.
    pub async fn data_has_other_replicas(&self, shard_id: u64) -> Option<bool> {
        let of_shard0 = self.has_other_replicas().await;
        let own = self.node_id();
        self.machine().read(|state| {
            let members = state.members();
            match members.placement().is_some() {
                true => members.others_have_shard(shard_id, own),
                false => members.others_have_data(own, of_shard0),
            }
        })
    }

    /// Returns the error if shard 0's log rejects writes.
    pub fn write_error(&self) -> Option<Error> {
        write_error(&self.replica())
    }

    /// Returns whether this node is the only voter.
    pub fn is_single_node(&self) -> bool {
        self.replica().voters() == [self.replica().id()]
    }

    pub fn node_id(&self) -> u64 {
        node_of(self.replica().id())
    }

    pub(super) fn lock_progress(&self) -> MutexGuard<'_, BTreeMap<u64, ShardProgress>> {
        sync::lock(&self.progress)
    }

    /// Returns the data shards that are open on this node.
    pub(super) fn open_shards(&self) -> Vec<Arc<Shard>> {
        sync::read(&self.shards).values().cloned().collect()
    }

    /// Sets or, with `None`, removes a data shard that is open on this node.
    pub fn set_shard(&self, id: u64, shard: Option<Arc<Shard>>) {
        let mut shards = sync::write(&self.shards);
        match shard {
            Some(shard) => shards.insert(id, shard),
            None => shards.remove(&id),
        };
    }

    pub(super) fn shard(&self, id: u64) -> Result<Arc<Shard>> {
        let shards = sync::read(&self.shards);
        shards.get(&id).cloned().ok_or_else(|| Error::CorruptLog {
            what: format!("shard {id} is not open on this node"),
        })
    }

    /// Replaces the replica of shard 0; the previous one is closed.
    pub fn set_replica(&self, replica: Replica) {
        *sync::write(&self.replica) = Arc::new(replica);
    }

    pub fn machine(&self) -> &Arc<ClusterMachine> {
        &self.machine
    }

    pub fn replica(&self) -> Arc<Replica> {
        sync::read(&self.replica).clone()
    }

    /// Returns the nodes that vote in shard 0; empty before the cluster is formed.
    pub fn voters(&self) -> Vec<u64> {
        self.replica().voters().into_iter().map(node_of).collect()
    }

    /// Returns the members of the cluster, or while they were never changed the voters of shard 0.
    /// Empty before the cluster is formed.
    pub fn nodes(&self) -> Vec<u64> {
        let members = self.machine.read(|state| {
            let members = state.members().iter().filter(|member| member.generation > 0);
            members.map(|member| member.node_id).collect::<Vec<u64>>()
        });
        if members.is_empty() { self.voters() } else { members }
    }

    /// Returns the learners of shard 0.
    pub fn learners(&self) -> Vec<u64> {
        self.replica().membership().learners.into_iter().map(node_of).collect()
    }

    pub fn is_leader(&self) -> bool {
        self.replica().is_leader()
    }

    pub fn watch_leadership(&self) -> LeadershipWatch {
        self.replica().watch_leadership()
    }

    /// Returns shard 0's leader if it is known and this node is connected to it.
    pub fn leader_hint(&self) -> Option<LeaderHint> {
        let leadership = self.replica().leadership();
        let node_id = node_of(leadership.leader?);
        let is_isolated = self.is_leader()
            && self.nodes().len() > 1
            && self
                .replica()
                .confirmed_ago()
                .is_none_or(|ago| ago > self.hub.timing().partitioned_after());
        let is_lost = |peer: &PeerStatus| peer.node_id == node_id && !peer.connected;
        if is_isolated || self.hub.peers().iter().any(is_lost) {
            return None;
        }
        let endpoint = self.machine.read(|state| state.node(node_id).map(|n| n.endpoint.clone()));
        let endpoint = endpoint.unwrap_or_default();
        Some(LeaderHint { node_id, endpoint, term: leadership.term })
    }

    /// Transfers leadership of shard 0 to `node`, or else to the most caught-up replica.
    ///
    /// # Errors
    /// [`Error::NotLeader`] or [`Error::NoLeader`] if this node does not lead shard 0,
    /// [`Error::InvalidArgument`] if no such replica is reachable, [`Error::Throttled`] if open
    /// commands do not settle in time, [`Error::OutcomeUnknown`] if the other replica did not take
    /// over in time.
    pub async fn transfer(&self, node: Option<u64>) -> Result<()> {
        let hint = || match self.leader_hint() {
            Some(hint) => Error::NotLeader { shard: 0, leader: Some(hint) },
            None => Error::NoLeader { shard: 0 },
        };
        if !self.is_leader() {
            return Err(hint());
        }
        let transferred = self.replica().transfer_leadership(node, &self.hub.connected()).await;
        transferred.map_err(|error| Error::of_transfer(0, error))
    }

    /// Transfers leadership of shard 0 before this node stops, even if open commands do not settle
    /// in time.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no such replica is reachable, [`Error::OutcomeUnknown`] if the
    /// other replica did not take over in time.
    pub async fn abandon_leadership(&self, node: Option<u64>) -> Result<()> {
        let replica = self.replica();
        let transferred = replica.abandon_leadership(node, &self.hub.connected()).await;
        transferred.map_err(|error| Error::of_transfer(0, error))
    }

    /// Sends a command to shard 0's leader and waits for its reply. If the leader changes before
    /// the reply, an idempotent command is sent again.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if an attempt got no response and may still take effect.
    /// [`Error::NoLeader`] if no attempt reached a leader. [`Error::InvalidArgument`] if the
    /// command is larger than an entry of the log may be.
    pub async fn command(&self, command: ClusterCommand) -> Result<ClusterReply> {
        match self.send_to_leader(PeerRequest::Command(command)).await? {
            PeerResponse::ClusterReply(ClusterReply::Invalid { field: "request", what }) => {
                Err(Error::InvalidArgument { field: "request", what })
            }
            PeerResponse::ClusterReply(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits until this node's copy is at least as new as the cluster's state was at the call.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no leader of shard 0 responds, or if this node does not apply its
    /// entries in time; [`Error::Draining`] if this node stops first.
    pub async fn catch_up(&self) -> Result<()> {
        let asked = Instant::now();
        let mut last = self.last_catch_up.lock().await;
        // An attempt that another caller began after this call serves this call as well, even if it
        // failed. Otherwise each call would wait for a separate attempt while there is no leader.
        if let Some((began, succeeded)) = *last
            && began >= asked
        {
            return if succeeded { Ok(()) } else { Err(Error::NoLeader { shard: 0 }) };
        }
        let began = Instant::now();
        let caught_up = self.catch_up_now().await;
        *last = Some((began, caught_up.is_ok()));
        caught_up
    }

    async fn catch_up_now(&self) -> Result<()> {
        match self.send_to_leader(PeerRequest::Version).await? {
            PeerResponse::Version(version) => self.wait_version(version).await,
            other => Err(unexpected(&other)),
        }
    }

    /// Waits until this node has applied this version of the cluster's state.
    pub(super) async fn wait_version(&self, version: u64) -> Result<()> {
        let mut versions = self.machine.watch();
        let seen = versions.wait_for(|seen| *seen >= version);
        match timeout(limits::READY_WAIT_MAX, seen).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Error::Draining),
            Err(_) => Err(Error::NoLeader { shard: 0 }),
        }
    }

    /// Sends a request to the leader, which may be this node, and retries if leadership moves.
    async fn send_to_leader(&self, request: PeerRequest) -> Result<PeerResponse> {
        let deadline = Instant::now() + limits::READY_WAIT_MAX;
        // Reason why the outcome of an attempt is unknown. The response to a later attempt settles
        // it.
        let mut open = None;
        loop {
            let response = match self.replica().leadership().leader {
                Some(leader) if leader == self.replica().id() => self.execute(&request).await,
                Some(leader) => match self.forward(node_of(leader), &request).await {
                    Ok(response) => response,
                    Err(error) => {
                        if error.may_have_acted() && request.is_change() {
                            open = Some(error.to_string());
                        }
                        PeerResponse::NotLeader
                    }
                },
                None => PeerResponse::NotLeader,
            };
            match response {
                PeerResponse::NotLeader => {}
                PeerResponse::Unknown(reason) => return Err(Error::OutcomeUnknown { reason }),
                response => return Ok(response),
            }
            match open.take() {
                Some(reason) if Instant::now() >= deadline || !request.is_idempotent() => {
                    return Err(Error::OutcomeUnknown { reason });
                }
                None if Instant::now() >= deadline => return Err(Error::NoLeader { shard: 0 }),
                still => open = still,
            }
            sleep(limits::LEADER_POLL_INTERVAL).await;
        }
    }

    pub(super) async fn forward(
        &self,
        node: u64,
        request: &PeerRequest,
    ) -> Result<PeerResponse, PeerError> {
        let response = self.hub.call(node, request.encode(), limits::COMMIT_WAIT_MAX).await;
        // An undecodable response may belong to a command that was applied.
        let undecodable = |why| PeerError::Lost { node, why };
        response
            .and_then(|bytes| PeerResponse::decode(bytes).map_err(undecodable))
            .inspect_err(|error| tracing::debug!(node, %error, "no response from shard 0's leader"))
    }

    /// Handles an encoded request from another node and returns the encoded response.
    ///
    /// # Errors
    /// The request cannot be decoded; the text is for operators.
    pub async fn handle_request(&self, request: Bytes) -> Result<Bytes, String> {
        let request = PeerRequest::decode(request)?;
        Ok(self.execute(&request).await.encode())
    }

    async fn execute(&self, request: &PeerRequest) -> PeerResponse {
        match request {
            PeerRequest::Progress => PeerResponse::Progress(self.local_progress()),
            PeerRequest::ReplicaStatus(request) => self.local_replica_status(request).await,
            PeerRequest::Balance => PeerResponse::Moved(self.balance_local().await),
            PeerRequest::ShardIndex(shard) => self.local_shard_index(*shard).await,
            PeerRequest::LedShards => PeerResponse::LedShards(self.led_shards()),
            PeerRequest::Groups(request) => self.local_groups(request).await,
            PeerRequest::Watermarks(request) => self.local_watermarks(request).await,
            PeerRequest::SplitRecords(request) => self.local_split_records(request).await,
            PeerRequest::RecordProtocol(version) => self.local_record_protocol(*version).await,
            // Only the leader serves the other requests.
            _ if !self.replica().wait_ready(limits::READY_WAIT_MAX).await => {
                PeerResponse::NotLeader
            }
            PeerRequest::Version => {
                let replica = self.replica();
                let confirmed = replica.read_index();
                match timeout(limits::READ_INDEX_WAIT_MAX, confirmed).await {
                    Ok(Ok(())) => PeerResponse::Version(self.machine.read(ClusterState::version)),
                    Ok(Err(_)) | Err(_) => PeerResponse::NotLeader,
                }
            }
            PeerRequest::Command(command) => self.propose(command.clone()).await,
        }
    }

    async fn propose(&self, command: ClusterCommand) -> PeerResponse {
        let head = Head::Cluster(command);
        // The log refuses a larger head only after the replica has accepted it, and then stops.
        let bytes = head.encode().len();
        if bytes > HEAD_BYTES_MAX {
            let what = format!("the change takes {bytes} bytes, the limit is {HEAD_BYTES_MAX}");
            return PeerResponse::ClusterReply(ClusterReply::Invalid { field: "request", what });
        }
        let command = Command::control(head);
        let outcome = match self.replica().propose(command, None).await {
            Ok(outcome) => timeout(limits::COMMIT_WAIT_MAX, outcome).await,
            Err(error) => Ok(Err(error)),
        };
        match outcome {
            Ok(Ok(Verdict::Cluster(reply))) => PeerResponse::ClusterReply(reply),
            Ok(Ok(other)) => {
                PeerResponse::Unknown(format!("unexpected result from shard 0: {other:?}"))
            }
            Ok(Err(ProposeError::NotLeader { .. })) => PeerResponse::NotLeader,
            Ok(Err(ProposeError::Unknown(reason) | ProposeError::Stopped(reason))) => {
                PeerResponse::Unknown(reason)
            }
            Err(_) => {
                PeerResponse::Unknown(format!("not committed within {:?}", limits::COMMIT_WAIT_MAX))
            }
        }
    }

    /// Returns the id of a named producer with its next epoch, which belongs to `owner` and fences
    /// earlier epochs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an invalid name, and the errors of [`Self::command`].
    pub async fn init_producer(&self, name: &str, owner: ProducerOwner) -> Result<(u64, u32)> {
        let command = ClusterCommand::InitProducer { name: name.to_owned(), owner };
        match self.command(command).await? {
            ClusterReply::Producer { producer_id, epoch } => Ok((producer_id, epoch)),
            ClusterReply::Invalid { field, what } => Err(Error::InvalidArgument { field, what }),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns a unique producer id of this owner, greater than all ids that this node knows to be
    /// issued. Shards treat lower ids that they do not know as forgotten producers.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no ids are left on this node and shard 0 has no leader.
    pub async fn next_producer_id(&self, owner: ProducerOwner) -> Result<u64> {
        let newest = self.machine.read(ClusterState::next_producer_id);
        {
            let mut lease = sync::lock(&self.lease);
            // If another node or owner has leased ids since, the rest of this lease is discarded.
            if lease.next < lease.end && lease.end >= newest && lease.owner == owner {
                lease.next += 1;
                return Ok(lease.next - 1);
            }
        }
        self.lease_producer_ids(owner).await
    }

    /// Leases a block of ids and returns its first id for the caller. All lower ids are issued.
    async fn lease_producer_ids(&self, owner: ProducerOwner) -> Result<u64> {
        let count = limits::PRODUCER_IDS_PER_LEASE;
        let command = ClusterCommand::LeaseProducerIds { count, owner };
        let reply = self.command(command).await.map_err(|error| match error {
            // Ids that were leased without a reply stay unused, so nothing has happened.
            Error::OutcomeUnknown { .. } => Error::NoLeader { shard: 0 },
            other => other,
        })?;
        match reply {
            ClusterReply::ProducerIds { first, count } => {
                let mut lease = sync::lock(&self.lease);
                *lease = ProducerIdLease {
                    next: first.saturating_add(1),
                    end: first.saturating_add(count.into()),
                    owner,
                };
                Ok(first)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Checks that a node has issued this producer id with this epoch to the owner of the stamp.
    ///
    /// # Errors
    /// The errors of [`ClusterState::check_identity`]. [`Error::NoLeader`] if this node does not
    /// know the identity and shard 0 has no leader.
    pub async fn check_identity(&self, stamp: &ProducerStamp) -> Result<()> {
        let check = |state: &ClusterState| state.check_identity(stamp);
        match self.machine.read(check) {
            Err(Refusal::UnknownProducer { .. }) => {}
            checked => return Ok(checked?),
        }
        // Another node may have issued it so recently that this node has not applied it yet. A new
        // lease is later in the log, so once it is applied here, the earlier one is, too.
        let first = self.lease_producer_ids(stamp.owner).await?;
        let applied = async {
            while self.machine.read(ClusterState::next_producer_id) <= first {
                sleep(limits::APPLY_POLL_INTERVAL).await;
            }
        };
        let applied = timeout(limits::READY_WAIT_MAX, applied).await;
        applied.map_err(|_| Error::NoLeader { shard: 0 })?;
        Ok(self.machine.read(check)?)
    }
}

/// Returns whether the voters of shard 0 name other replicas; `None` if they are not known.
fn names_others(voters: &[ReplicaId], own: ReplicaId) -> Option<bool> {
    (!voters.is_empty()).then(|| voters != [own])
}

pub(super) fn unexpected(what: &dyn std::fmt::Debug) -> Error {
    Error::OutcomeUnknown { reason: format!("unexpected response from shard 0: {what:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    #[test]
    fn unknown_voters_do_not_imply_single_node() {
        let [own, other] = [1, 2].map(|node| replica_id(node, 1));
        assert_eq!(names_others(&[], own), None);
        assert_eq!(names_others(&[own], own), Some(false));
        assert_eq!(names_others(&[own, other], own), Some(true));
        assert_eq!(names_others(&[other], own), Some(true), "it does not vote, or was replaced");
    }
}
