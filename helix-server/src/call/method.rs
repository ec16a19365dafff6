//! Methods of the public services; `api/authorize.rs` has a row for each.

/// Kind of a method, for the audit log and for open streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MethodKind {
    /// Moves records or reads state.
    Data,
    /// Changes the cluster; the audit log has each call.
    Control,
    /// Streams responses; it ends when the caller loses the right that it was opened with.
    Stream,
}

/// A method and its rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MethodRow {
    /// "helix.log.v1.TopicService/CreateTopic".
    pub(crate) method: &'static str,
    pub(crate) kind: MethodKind,
    /// Rights, for the documentation.
    pub(crate) rights: &'static str,
}
