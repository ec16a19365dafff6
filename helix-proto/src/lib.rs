//! Helix's wire types: the messages and services generated from `proto/`, and their conventions.
//!
//! The conventions are what a schema cannot express: the checksum and layout of a batch
//! ([`batch`]), its codecs ([`compression`]), how an error is encoded in a gRPC status
//! ([`mod@error`]), how the address of a node is written ([`address`]), the valid times ([`time`]),
//! the compaction of a batch by key ([`compaction`]), Kafka's batches ([`kafka`]), and how programs
//! show text of other users ([`shown`]), numbers ([`units`]) and groups ([`explanation`]). Performs
//! no I/O; `helix-transport` moves these types over gRPC without copies.

pub mod address;
pub mod batch;
pub mod codec;
pub mod compaction;
pub mod compression;
pub mod error;
pub mod explanation;
pub mod kafka;
pub mod plain;
pub mod record_fields;
pub mod short_names;
pub mod shown;
pub mod time;
pub mod units;

/// The public API, package `helix.log`.
pub mod log {
    /// Version 1, package `helix.log.v1`.
    #[allow(clippy::all, rustdoc::all, unused_qualifications, missing_docs)]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/helix.log.v1.rs"));

        /// A batch's decoded payload.
        ///
        /// The generated types use [`crate::plain::PlainRecords`] in its place.
        #[derive(Clone, PartialEq, ::prost::Message)]
        pub struct RecordList {
            /// The records, in order.
            #[prost(message, repeated, tag = "1")]
            pub records: ::prost::alloc::vec::Vec<Record>,
        }
    }
}

/// The protocol between nodes, package `helix.raft`. Not part of the public API.
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
