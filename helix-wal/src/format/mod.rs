//! Bytes of the files. Nothing here reads or writes a file.

pub(crate) mod footer;
pub(crate) mod frame;
pub(crate) mod layout;
mod nontemporal;
pub(crate) mod sizing;
pub(crate) mod state;
