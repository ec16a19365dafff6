//! Encoding of the members, in checkpoints and in responses between nodes.
//! Unknown fields are errors.

use super::members::{Member, Members};
use crate::log::{ChangeKind, CheckpointError, MemberChange};
use crate::records::{ChangeRecord, GenerationRecord, MemberRecord, MembersRecord};

impl From<&MemberChange> for ChangeRecord {
    fn from(change: &MemberChange) -> Self {
        Self {
            id: change.id,
            kind: match change.kind {
                ChangeKind::Add => 1,
                ChangeKind::Remove => 2,
                ChangeKind::Replace => 3,
            },
            node_id: change.node_id,
            lost_node_id: change.lost_node_id,
            version: change.version,
            done: change.done,
        }
    }
}

impl ChangeRecord {
    pub(super) fn into_change(self) -> Result<MemberChange, CheckpointError> {
        let kind = match self.kind {
            1 => ChangeKind::Add,
            2 => ChangeKind::Remove,
            3 => ChangeKind::Replace,
            other => {
                return Err(CheckpointError::new(format!(
                    "membership change of unknown kind {other}"
                )));
            }
        };
        let Self { id, node_id, lost_node_id, version, done, .. } = self;
        Ok(MemberChange { id, kind, node_id, lost_node_id, version, done })
    }
}

impl From<&Members> for MembersRecord {
    fn from(members: &Members) -> Self {
        let row = |member: &Member| MemberRecord {
            node_id: member.node_id,
            generation: member.generation,
            joining: member.joining,
            peer_addr: member.peer_addr.clone(),
            draining: member.draining,
            leaving: member.leaving,
        };
        let generations = members.generations.iter();
        Self {
            members: members.iter().map(row).collect(),
            generations: generations
                .map(|(&node_id, &generation)| GenerationRecord { node_id, generation })
                .collect(),
            change: members.change.as_ref().map(ChangeRecord::from),
            abandoned: members.abandoned,
        }
    }
}

impl MembersRecord {
    pub(super) fn into_members(self) -> Result<Members, CheckpointError> {
        let broken = |what: String| CheckpointError::new(format!("members: {what}"));
        let mut members = Members { abandoned: self.abandoned, ..Members::default() };
        for GenerationRecord { node_id, generation } in self.generations {
            if members.generations.insert(node_id, generation).is_some() {
                return Err(broken(format!("node {node_id} has two latest generations")));
            }
        }
        for it in self.members {
            let node_id = it.node_id;
            let last = members.generations.get(&node_id).copied().unwrap_or(0);
            if it.generation.max(it.joining.unwrap_or(0)) > last {
                return Err(broken(format!("node {node_id} has a generation beyond its latest")));
            }
            let member = Member {
                node_id,
                generation: it.generation,
                joining: it.joining,
                peer_addr: it.peer_addr,
                draining: it.draining,
                leaving: it.leaving,
            };
            if members.members.insert(node_id, member).is_some() {
                return Err(broken(format!("node {node_id} appears twice")));
            }
        }
        members.change = self.change.map(ChangeRecord::into_change).transpose()?;
        Ok(members)
    }
}
