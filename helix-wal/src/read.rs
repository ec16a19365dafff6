//! Reading entries by index and by position, from memory and from disk.

mod by_index;
pub(crate) mod live;
pub(crate) mod load;
