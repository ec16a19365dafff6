//! Bytes of the files. Nothing here reads or writes a file.

pub(crate) mod footer;
mod footer_row;
pub(crate) mod frame;
pub(crate) mod layout;
mod nontemporal;
pub(crate) mod sizing;
pub(crate) mod state;
mod trailer;
