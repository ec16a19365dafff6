//! Groups partitions by node into requests of limited size.

use std::collections::HashMap;

use crate::routing::Route;

/// Maximum number of partitions in one request: the limit of the service.
const PARTITIONS_PER_REQUEST_MAX: usize = 10_000;

/// Maximum bytes of the partitions in one request.
///
/// A message without records may have 1 MiB. A node counts it 64 times against the 16 MiB limit for
/// the requests of one connection.
const REQUEST_BYTES_MAX: usize = 128 << 10;

/// Partitions of one request to one node.
#[derive(Debug)]
pub(crate) struct NodeGroup {
    /// Route to the first member.
    pub(crate) route: Route,
    /// Shards of all members, without duplicates.
    pub(crate) shard_ids: Vec<u32>,
    /// Indexes into the grouped list.
    pub(crate) members: Vec<usize>,
    /// Bytes of the members in the request.
    bytes: usize,
}

/// Groups of partitions, in the order of their first members.
#[derive(Debug, Default)]
pub(crate) struct NodeGroups {
    pub(crate) list: Vec<NodeGroup>,
    /// The last group of each node.
    by_node: HashMap<u64, usize>,
}

impl NodeGroups {
    /// Adds a partition that takes at most `bytes` of a request.
    pub(crate) fn add(&mut self, route: Route, member: usize, bytes: usize) {
        let last = self.by_node.get(&route.node_id).copied();
        let index = match last.filter(|&index| self.list[index].has_capacity(bytes)) {
            Some(index) => index,
            None => {
                let (shard_ids, members) = (Vec::new(), Vec::new());
                self.by_node.insert(route.node_id, self.list.len());
                self.list.push(NodeGroup { route: route.clone(), shard_ids, members, bytes: 0 });
                self.list.len() - 1
            }
        };
        let group = &mut self.list[index];
        group.members.push(member);
        group.bytes += bytes;
        if !group.shard_ids.contains(&route.shard_id) {
            group.shard_ids.push(route.shard_id);
        }
    }
}

impl NodeGroup {
    fn has_capacity(&self, bytes: usize) -> bool {
        self.members.len() < PARTITIONS_PER_REQUEST_MAX && self.bytes + bytes <= REQUEST_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::connection::ConnectionCache;

    #[tokio::test]
    async fn groups_have_one_node_and_fit_a_request() {
        let connections = ConnectionCache::new(Config::default()).unwrap();
        let connection = connections.get("n1:9092").unwrap();
        let mut groups = NodeGroups::default();
        for member in 0..25_000 {
            let (shard_id, node_id) = (member as u32 % 2, member as u64 % 2);
            let route =
                Route { shard_id, topic_id: 1, node_id, term: 1, connection: connection.clone() };
            groups.add(route, member, if node_id == 0 { 5 } else { 300 });
        }
        let mut members: Vec<_> =
            groups.list.iter().flat_map(|group| group.members.clone()).collect();
        members.sort_unstable();
        assert!(members.into_iter().eq(0..25_000));
        for group in &groups.list {
            let node_id = group.route.node_id;
            assert!(group.members.iter().all(|member| *member as u64 % 2 == node_id));
            assert!(group.members.len() <= PARTITIONS_PER_REQUEST_MAX);
            assert!(group.bytes <= REQUEST_BYTES_MAX);
            assert_eq!(group.shard_ids.len(), 1);
        }
        // 12,500 partitions at 10,000 a request, and as many at 436 a request.
        assert_eq!(groups.list.len(), 2 + 29);
    }
}
