//! The extension module `helix._helix`: the Rust client for Python, without a second
//! implementation of any promise.
//!
//! Only the package `helix` imports it. Batches cross the border, never single records; control
//! calls return dictionaries. docs/decisions/0053 has the reasons.

mod admin;
mod arguments;
mod batch;
mod cell;
mod client;
mod failure;
mod group;
mod operation;
mod posting;
mod process;
mod producer;
mod rows;
mod stream;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _helix {
    #[pymodule_export]
    use super::batch::{Batch, BatchIterator, Record};
    #[pymodule_export]
    use super::client::NativeClient;
    #[pymodule_export]
    use super::failure::error_reasons;
    #[pymodule_export]
    use super::group::NativeGroup;
    #[pymodule_export]
    use super::operation::{Done, LoopBridge, Operation};
    #[pymodule_export]
    use super::producer::NativeProducer;
    #[pymodule_export]
    use super::stream::NativeStream;
}
