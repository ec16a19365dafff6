//! Settings of a member of a consumer group.

use std::time::Duration;

use crate::client::Client;
use crate::config::draw_seed;

use super::{GroupConsumer, StartPolicy};

/// Automatic commits of a group consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoCommit {
    /// Commits at this interval, before a partition is released, and when the consumer stops. A
    /// record is committed once the application has asked for the next event; buffered records
    /// never are.
    Every(Duration),
    /// Commits only on request.
    Off,
}

impl Default for AutoCommit {
    fn default() -> Self {
        Self::Every(Duration::from_secs(5))
    }
}

/// Settings of a member of a consumer group, from [`Client::consumer_group`].
#[derive(Debug, Clone)]
pub struct GroupConsumerBuilder {
    pub(super) client: Client,
    pub(super) group: String,
    pub(super) topics: Vec<String>,
    pub(super) member_id: String,
    pub(super) static_name: String,
    pub(super) client_name: String,
    pub(super) session_timeout: Duration,
    pub(super) release_timeout: Duration,
    pub(super) start: StartPolicy,
    pub(super) auto_commit: AutoCommit,
    pub(super) buffer_bytes: usize,
    pub(super) skips_undecodable: bool,
}

impl GroupConsumerBuilder {
    pub(super) fn new(client: Client, group: String) -> Self {
        Self {
            client,
            group,
            topics: Vec::new(),
            // Random, so that two processes never have the same id, even if their clients have the
            // same seed.
            member_id: format!("{:016x}{:016x}", draw_seed(), draw_seed()),
            static_name: String::new(),
            client_name: String::new(),
            session_timeout: Duration::from_secs(30),
            release_timeout: Duration::from_secs(60),
            start: StartPolicy::default(),
            auto_commit: AutoCommit::default(),
            buffer_bytes: 16 << 20,
            skips_undecodable: false,
        }
    }

    /// Adds topics to read. A topic that does not exist yet is read once it does.
    #[must_use]
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics.extend(topics.into_iter().map(Into::into));
        self
    }

    /// Adds the topics whose whole names match, including later topics. `*` matches any characters.
    #[must_use]
    pub fn pattern(mut self, pattern: impl Into<String>) -> Self {
        self.topics.push(pattern.into());
        self
    }

    /// Sets the member id, unique in the group: 1 to 64 printable ASCII characters without spaces.
    /// Default: random.
    #[must_use]
    pub fn member_id(mut self, member_id: impl Into<String>) -> Self {
        self.member_id = member_id.into();
        self
    }

    /// Makes this a static member: its partitions stay with the name if the process restarts within
    /// the session timeout.
    ///
    /// Joining takes the name over from an earlier process. [`GroupConsumer::close`] does not leave
    /// the group.
    #[must_use]
    pub fn static_member(mut self, name: impl Into<String>) -> Self {
        self.static_name = name.into();
        self
    }

    /// Sets a text that names the client to operators, up to 128 bytes. Default: none.
    #[must_use]
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = name.into();
        self
    }

    /// Sets the session timeout: 1 s to 10 min. Default: 30 s.
    ///
    /// After this time without a heartbeat, the service removes the member and the member stops
    /// reading.
    #[must_use]
    pub fn session_timeout(mut self, timeout: Duration) -> Self {
        self.session_timeout = timeout;
        self
    }

    /// Sets the longest time that a revoked partition waits for the application's next call.
    ///
    /// After that the partition is lost, and its last records may be read twice. Default: 60 s.
    #[must_use]
    pub fn release_timeout(mut self, timeout: Duration) -> Self {
        self.release_timeout = timeout;
        self
    }

    /// Sets the start where the group has no usable offset. Default: [`StartPolicy::Safe`].
    #[must_use]
    pub fn start(mut self, policy: StartPolicy) -> Self {
        self.start = policy;
        self
    }

    /// Sets the automatic commits. Default: every 5 s.
    #[must_use]
    pub fn auto_commit(mut self, auto_commit: AutoCommit) -> Self {
        self.auto_commit = auto_commit;
        self
    }

    /// Sets the limit of payload bytes to read ahead, for all partitions. Default: 16 MiB.
    ///
    /// One message of each node, about 1 MiB, may exceed the limit, and connections also buffer
    /// their windows.
    #[must_use]
    pub fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Skips batches whose payload is not a list of records. Default: off.
    ///
    /// Skipped batches are listed in [`Records::undecodable`](crate::Records::undecodable) and
    /// committed as read. Otherwise, [`GroupConsumer::next`] fails with `UNDECODABLE_BATCH` after
    /// the records before the batch.
    #[must_use]
    pub fn skip_undecodable(mut self, skips: bool) -> Self {
        self.skips_undecodable = skips;
        self
    }

    /// Joins the group in the background and returns the consumer.
    ///
    /// [`GroupConsumer::next`] reports a rejected join. Needs a tokio runtime.
    pub fn join(self) -> GroupConsumer {
        GroupConsumer::new(self)
    }
}
