//! Members of a consumer group as processes of their own, writers for them, and the check of what
//! the members received.

mod delivery_check;
pub(crate) mod member;
mod member_process;
mod writers;

pub(crate) use delivery_check::DeliveryCheck;
pub(crate) use member_process::{MemberProcess, MemberProcessOptions};
pub(crate) use writers::GroupWriters;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The group of all members.
pub(crate) const GROUP: &str = "chaos";

/// The check, shared by the writers and by the readers of the members' output.
pub(crate) type SharedCheck = Arc<Mutex<DeliveryCheck>>;

pub(crate) fn lock(check: &SharedCheck) -> MutexGuard<'_, DeliveryCheck> {
    check.lock().unwrap_or_else(PoisonError::into_inner)
}
