//! Commands to the cluster's state that change who is a member, as they stand in the log.
//! Tags are for ever.

use prost::{Message, Oneof};

/// A change of the cluster's members. Every one may be repeated.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum MemberCommand {
    /// Begins the list of members with the replicas that vote in a cluster that has none yet.
    #[prost(message, tag = "1")]
    TakeUp(TakeUp),
    #[prost(message, tag = "2")]
    Add(AddMember),
    #[prost(message, tag = "3")]
    Remove(RemoveMember),
    #[prost(message, tag = "4")]
    Replace(ReplaceMember),
    #[prost(message, tag = "5")]
    SetDraining(SetDraining),
    /// Every shard has done what the change with this id asks for.
    #[prost(uint64, tag = "6")]
    Finish(u64),
    /// The node has made its replicas, empty ones: from now on they may take part, and from now on
    /// they must never be made again.
    #[prost(message, tag = "7")]
    Joined(Joined),
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct TakeUp {
    /// Replica ids of shard 0.
    #[prost(uint64, repeated, tag = "1")]
    pub replicas: Vec<u64>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct AddMember {
    #[prost(uint64, tag = "1")]
    pub node_id: u64,
    #[prost(string, tag = "2")]
    pub peer_addr: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct RemoveMember {
    #[prost(uint64, tag = "1")]
    pub node_id: u64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct ReplaceMember {
    #[prost(uint64, tag = "1")]
    pub lost_node_id: u64,
    /// May be the same.
    #[prost(uint64, tag = "2")]
    pub node_id: u64,
    /// Empty: as before.
    #[prost(string, tag = "3")]
    pub peer_addr: String,
    /// The node has been seen empty after it had joined.
    #[prost(bool, tag = "4")]
    pub emptied: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Joined {
    #[prost(uint64, tag = "1")]
    pub node_id: u64,
    #[prost(uint32, tag = "2")]
    pub generation: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct SetDraining {
    #[prost(uint64, tag = "1")]
    pub node_id: u64,
    #[prost(bool, tag = "2")]
    pub draining: bool,
}

impl MemberCommand {
    pub fn name(&self) -> &'static str {
        match self {
            Self::TakeUp(_) => "take up members",
            Self::Add(_) => "add node",
            Self::Remove(_) => "remove node",
            Self::Replace(_) => "replace node",
            Self::SetDraining(_) => "set draining",
            Self::Joined(_) => "node has joined",
            Self::Finish(_) => "finish membership change",
        }
    }
}
