//! Where the members are reached, as one node's copy of the cluster's state says. Told to a node
//! that has lost its copy: what was changed since it was configured it could not know otherwise,
//! and it takes part in nothing before it has found the others.

use std::collections::BTreeMap;

use prost::Message;

use super::state::ClusterState;

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Whereabouts {
    /// Of the state.
    #[prost(uint64, tag = "1")]
    version: u64,
    /// None while the members have never been changed.
    #[prost(message, repeated, tag = "2")]
    members: Vec<MemberAddresses>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct MemberAddresses {
    #[prost(uint64, tag = "1")]
    node_id: u64,
    /// As a command said.
    #[prost(string, optional, tag = "2")]
    commanded: Option<String>,
    /// As the node says itself.
    #[prost(string, optional, tag = "3")]
    announced: Option<String>,
}

impl MemberAddresses {
    fn of(state: &ClusterState, node_id: u64) -> Self {
        let known = |address: &String| !address.is_empty();
        let commanded = state.members().get(node_id).map(|member| member.peer_addr.clone());
        let announced = state.node(node_id).map(|node| node.peer_addr.clone());
        Self { node_id, commanded: commanded.filter(known), announced: announced.filter(known) }
    }

    fn address(self, seeds: &BTreeMap<u64, String>) -> Option<String> {
        self.commanded.or_else(|| seeds.get(&self.node_id).cloned()).or(self.announced)
    }
}

impl Whereabouts {
    pub(super) fn of(state: &ClusterState) -> Self {
        let members = state.members().iter();
        let members = members.map(|member| MemberAddresses::of(state, member.node_id)).collect();
        Self { version: state.version(), members }
    }

    pub(super) fn is_newer(&self, other: &Self) -> bool {
        self.version > other.version
    }

    /// Where a node that was told of `seeds` dials the members, itself too.
    pub(super) fn addresses(self, seeds: &BTreeMap<u64, String>) -> BTreeMap<u64, String> {
        if self.members.is_empty() {
            return seeds.clone();
        }
        let members = self.members.into_iter();
        members.filter_map(|it| Some((it.node_id, it.address(seeds)?))).collect()
    }
}

/// Where a node that was told of `seeds` dials another one: what a command said comes before what
/// this node was told, and that before what the other one says.
pub(super) fn address(
    state: &ClusterState,
    seeds: &BTreeMap<u64, String>,
    node_id: u64,
) -> Option<String> {
    MemberAddresses::of(state, node_id).address(seeds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(version: u64, members: &[(u64, Option<&str>, Option<&str>)]) -> Whereabouts {
        let member = |&(node_id, commanded, announced): &(u64, Option<&str>, Option<&str>)| {
            let (commanded, announced) =
                (commanded.map(str::to_owned), announced.map(str::to_owned));
            MemberAddresses { node_id, commanded, announced }
        };
        Whereabouts { version, members: members.iter().map(member).collect() }
    }

    #[test]
    fn a_command_comes_before_what_was_configured_and_that_before_what_is_announced() {
        let seeds = BTreeMap::from([(1, "s1".to_owned()), (2, "s2".to_owned())]);
        assert_eq!(told(3, &[]).addresses(&seeds), seeds, "the members were never changed");
        let rows = [
            (1, Some("c1"), Some("a1")),
            (2, None, Some("a2")),
            (3, None, Some("a3")),
            (4, None, None),
        ];
        let expected = [(1, "c1"), (2, "s2"), (3, "a3")].map(|(id, it)| (id, it.to_owned()));
        assert_eq!(told(3, &rows).addresses(&seeds), expected.into());
        assert!(told(4, &[]).is_newer(&told(3, &rows)) && !told(3, &[]).is_newer(&told(3, &rows)));
    }
}
