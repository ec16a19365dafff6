//! Commands that change the members of the cluster, as stored in the log.
//! Tags are permanent.

use prost::{Message, Oneof};

/// A change of the cluster's members. A repeated command changes nothing.
#[derive(Clone, PartialEq, Eq, Oneof)]
pub enum MemberCommand {
    /// Sets the first members: the voters of a cluster without a list of members.
    #[prost(message, tag = "1")]
    InitMembers(InitMembers),
    #[prost(message, tag = "2")]
    Add(AddMember),
    #[prost(message, tag = "3")]
    Remove(RemoveMember),
    #[prost(message, tag = "4")]
    Replace(ReplaceMember),
    #[prost(message, tag = "5")]
    SetDraining(SetDraining),
    /// Marks the change with this id as done in every shard.
    #[prost(uint64, tag = "6")]
    Finish(u64),
    /// Marks the node's new, empty replicas as created. They may be added to their shards, and must
    /// never be created again.
    #[prost(message, tag = "7")]
    Joined(Joined),
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct InitMembers {
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
    /// May be the same node.
    #[prost(uint64, tag = "2")]
    pub node_id: u64,
    /// Empty to keep the address.
    #[prost(string, tag = "3")]
    pub peer_addr: String,
    /// True if the node was found empty after it had joined.
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
            Self::InitMembers(_) => "initialize members",
            Self::Add(_) => "add node",
            Self::Remove(_) => "remove node",
            Self::Replace(_) => "replace node",
            Self::SetDraining(_) => "set draining",
            Self::Joined(_) => "node has joined",
            Self::Finish(_) => "finish membership change",
        }
    }
}
