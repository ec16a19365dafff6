//! Helix's wire: the types and services generated from `proto/`, and what a schema cannot say.
//! That is the checksum and layout of a batch, how an error travels, and when small writes
//! may wait for others. Opens no file and no connection.

pub mod answers;
pub mod appends;
pub mod batch;
pub mod codec;
pub mod error;
pub mod framing;
pub mod gather;
pub mod messages;
pub mod plain;

/// The public API, package `helix.log`.
pub mod log {
    /// Version 1, package `helix.log.v1`.
    #[allow(clippy::all, rustdoc::all, unused_qualifications, missing_docs)]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/helix.log.v1.rs"));

        /// A batch's payload, decoded. Where the message stands in a request it is taken in as
        /// [`crate::plain::PlainRecords`].
        #[derive(Clone, PartialEq, ::prost::Message)]
        pub struct RecordList {
            /// The records, in order.
            #[prost(message, repeated, tag = "1")]
            pub records: ::prost::alloc::vec::Vec<Record>,
        }
    }
}

/// What nodes say to each other, package `helix.raft`. No part of the public API.
pub mod raft {
    /// Version 1, package `helix.raft.v1`.
    #[allow(clippy::all, rustdoc::all, unused_qualifications, missing_docs)]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/helix.raft.v1.rs"));
    }
}

/// Serialized `FileDescriptorSet` of every public .proto file and its imports, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/helix_descriptor.bin"));
