//! The peer port: accepts streams and calls, and passes their requests to local replicas.

pub(super) mod epoch;
pub(super) mod inbound;
pub(super) mod service;
pub(super) mod unary;
