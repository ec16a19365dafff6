//! Rewriting live entries of sealed segments into cold ones.

pub(crate) mod compactor;
mod policy;
