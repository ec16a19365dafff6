//! The APIs, by topic. Each handler answers one request.

pub(crate) mod acls;
pub(crate) mod cluster;
pub(crate) mod configs;
pub(crate) mod coordinator;
pub(crate) mod fetch;
mod fetch_response;
pub(crate) mod group_admin;
pub(crate) mod group_members;
pub(crate) mod group_offsets;
pub(crate) mod metadata;
pub(crate) mod offsets;
pub(crate) mod produce;
pub(crate) mod producer_id;
pub(crate) mod sasl;
pub(crate) mod topics;
pub(crate) mod versions;
