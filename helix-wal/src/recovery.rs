//! Opening a log, inspecting its files, and repairing a damaged one.

mod copy;
pub(crate) mod inspect;
pub(crate) mod open;
pub(crate) mod quarantine;
mod replay;
mod sealed;
pub(crate) mod staged;
pub(crate) mod truncate_damage;
