//! The limit of open files: raised at the start, and divided between logs and clients.

use helix_wal::{FileCache, Options};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::limits;

/// Division of the file descriptors of a process.
#[derive(Debug, Clone)]
pub(crate) struct FileBudget {
    /// Descriptors for connections of clients.
    pub(crate) clients: u64,
    /// Open files of sealed segments, for all logs together.
    pub(crate) cache_files: u64,
}

/// The limit is too low for a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the limit of {limit} open files is too low: {shards} shards{} need {needed}; raise the hard \
     limit to that or more (ulimit -n {needed}, LimitNOFILE={needed} in a systemd unit, --ulimit \
     nofile={needed} of a container)",
    and_handshakes(*.handshakes)
)]
pub struct FileLimitTooLow {
    pub limit: u64,
    pub shards: u64,
    /// Open TLS handshakes of all ports.
    pub handshakes: u64,
    pub needed: u64,
}

fn and_handshakes(handshakes: u64) -> String {
    match handshakes {
        0 => String::new(),
        handshakes => format!(" and {handshakes} TLS handshakes"),
    }
}

impl FileBudget {
    /// Divides `limit` descriptors between the logs of `shards` data shards and of shard 0, the
    /// connections in a TLS handshake, and clients. A file takes two descriptors with direct I/O.
    pub(crate) fn new(
        limit: u64,
        shards: u64,
        direct_io: bool,
        handshakes: u64,
    ) -> Result<Self, FileLimitTooLow> {
        let per_file = if direct_io { 2 } else { 1 };
        let per_log = 2 + per_file * Options::default().open_files_max() as u64;
        let fixed = limits::FILES_RESERVED + handshakes + (shards + 1) * per_log;
        let cache_min = limits::CACHED_FILES_MIN * per_file;
        let needed = fixed + cache_min + limits::CLIENT_FILES_MIN;
        if limit < needed {
            return Err(FileLimitTooLow { limit, shards, handshakes, needed });
        }
        let spare = limit - fixed;
        let cache_max = limits::CACHED_FILES_PER_LOG_MAX * per_file * (shards + 1);
        let cache = (spare / limits::CACHED_FILES_PART).min(cache_max).max(cache_min);
        Ok(Self { clients: spare - cache, cache_files: cache / per_file })
    }

    /// Returns the budget of a node without files: all else is for clients.
    pub(crate) fn in_memory(limit: u64, handshakes: u64) -> Self {
        let clients = limit.saturating_sub(limits::FILES_RESERVED + handshakes).max(1);
        Self { clients, cache_files: limits::CACHED_FILES_MIN }
    }

    /// Creates the cache of the logs.
    pub(crate) fn cache(&self) -> FileCache {
        FileCache::new(usize::try_from(self.cache_files).unwrap_or(usize::MAX))
    }
}

/// Returns the current limit of open files.
pub(crate) fn current() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Raises the soft limit of open files to the hard one, and logs the result.
pub(crate) fn raise() {
    let Rlimit { current: soft, maximum } = getrlimit(Resource::Nofile);
    if soft != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(?soft, hard = ?maximum, %error, "cannot raise the limit of open files");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_divided_or_refused_with_the_number_that_would_do() {
        for (shards, direct_io, handshakes) in [
            (1, true, 0),
            (4, true, 0),
            (8, true, 384),
            (8, false, 0),
            (8, false, 256),
            (64, true, 64),
        ] {
            let refused = FileBudget::new(100, shards, direct_io, handshakes).unwrap_err();
            assert!(refused.to_string().contains(&refused.needed.to_string()), "{refused}");
            assert_eq!(refused.to_string().contains("TLS handshakes need"), handshakes > 0);
            assert!(FileBudget::new(refused.needed - 1, shards, direct_io, handshakes).is_err());
            for limit in [refused.needed, 4096, 1 << 20, u64::MAX] {
                let budget = FileBudget::new(limit, shards, direct_io, handshakes).unwrap();
                assert!(budget.clients >= limits::CLIENT_FILES_MIN, "{budget:?}");
                assert!(budget.cache_files >= limits::CACHED_FILES_MIN, "{budget:?}");
                let per_file = if direct_io { 2 } else { 1 };
                let logs = (shards + 1) * (2 + per_file * 11);
                let used = budget.cache_files * per_file + logs + limits::FILES_RESERVED;
                assert!(used + handshakes + budget.clients <= limit, "{budget:?} of {limit}");
            }
        }
        assert!(FileBudget::new(200, 4, true, 0).is_err());
        assert!(FileBudget::new(1024, 8, true, 0).is_ok());
    }

    #[test]
    fn connections_in_a_handshake_are_not_those_of_clients() {
        let clients = |handshakes| FileBudget::in_memory(1024, handshakes).clients;
        assert_eq!(clients(0) - clients(256), 256);
        assert_eq!(FileBudget::in_memory(100, 256).clients, 1);
    }
}
