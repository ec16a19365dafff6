//! A change of the cluster's members, as the cluster's state tracks it.

/// Kind of a [`MemberChange`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    Add,
    Remove,
    Replace,
}

/// A change of the members. Only one runs at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberChange {
    /// Counted from 1; 0 where nothing had to change.
    pub id: u64,
    pub kind: ChangeKind,
    /// The node that joins; in a removal, the node that leaves.
    pub node_id: u64,
    /// The node that is replaced; 0 if none.
    pub lost_node_id: u64,
    /// Last version of the cluster's state that this change produced. Shards that have applied
    /// that version have completed their part.
    pub version: u64,
    pub done: bool,
}

impl MemberChange {
    /// Returns a completed change for a request that had nothing to change.
    pub(crate) fn no_op(kind: ChangeKind, node_id: u64) -> Self {
        Self { id: 0, kind, node_id, lost_node_id: 0, version: 0, done: true }
    }

    /// Describes the running change, for errors.
    pub fn describe(&self) -> String {
        let Self { id, node_id, lost_node_id, .. } = self;
        match self.kind {
            ChangeKind::Add => format!("change {id}: node {node_id} is being added"),
            ChangeKind::Remove => format!("change {id}: node {node_id} is being removed"),
            ChangeKind::Replace => {
                format!("change {id}: node {lost_node_id} is being replaced by node {node_id}")
            }
        }
    }
}
