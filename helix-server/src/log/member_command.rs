//! Commands that change the members of the cluster, as stored in the log.

pub use crate::records::member_command_record::Command as MemberCommand;
pub use crate::records::{
    AddMember, AddShards, CancelMove, CancelSplit, EndSplit, FinishMove, InitMembers, Joined,
    PlanMove, PlanSplit, RemoveMember, ReplaceMember, ReplicaCreated, SetCordoned, SetDraining,
    SetRack, SplitProgress, TakePlacement,
};

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
            Self::TakePlacement(_) => "take placement",
            Self::SetCordoned(_) => "set cordoned",
            Self::SetReplicas(_) => "set replicas",
            Self::PlanMove(_) => "plan move",
            Self::ReplicaCreated(_) => "replica was created",
            Self::FinishMove(_) => "finish move",
            Self::CancelMove(_) => "cancel move",
            Self::AddShards(_) => "add shards",
            Self::SetRack(_) => "set rack",
            Self::PlanSplit(_) => "plan split",
            Self::SplitProgress(_) => "split progress",
            Self::CancelSplit(_) => "cancel split",
            Self::EndSplit(_) => "end split",
            Self::PauseMoves(true) => "pause moves",
            Self::PauseMoves(false) => "resume moves",
        }
    }
}
