//! Commands that change the members of the cluster, as stored in the log.

pub use crate::records::member_command_record::Command as MemberCommand;
pub use crate::records::{
    AddMember, InitMembers, Joined, RemoveMember, ReplaceMember, SetDraining,
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
        }
    }
}
