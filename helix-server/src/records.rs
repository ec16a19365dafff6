//! Records in logs and checkpoints, and messages between nodes: the generated types of the package
//! `helix.internal.v1`, whose .proto files are in `helix-proto`.
//!
//! Numbers of fields are permanent. The modules that own a type export it and add its methods.

#![allow(clippy::all, rustdoc::all, unused_qualifications, unreachable_pub)]

include!(concat!(env!("OUT_DIR"), "/helix.internal.v1.rs"));
