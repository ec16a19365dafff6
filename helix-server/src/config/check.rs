//! Checks ranges, and combinations of settings.
//! Reports every problem, not only the first one.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::time::Duration;

use helix_proto::address::{UNIX_SCHEME, check_dialable, parse_unix};

use super::{
    AuthSetting, ClientCertificates, ConsoleUse, ServerConfig, SocketMode, StorageMode, TlsUse,
    copy_rate,
};
use crate::limits::{
    BATCH_BYTES_MAX, COPY_RATE_LEAST, ELECTION_TIMEOUT_MS_MAX, ELECTION_TIMEOUT_MS_MIN,
    MEMBERS_MAX, PARTITIONS_MAX, PARTITIONS_PER_TOPIC_MAX, RACK_BYTES_MAX, SHARDS_MAX,
};
use crate::memory::{MEMORY_LIMIT_MIN, MemoryShares};
use crate::trace::CAN_EXPORT;

/// Largest segment that the log accepts: it preallocates several.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// A segment is a multiple of a block of the log.
const SEGMENT_STEP: u64 = 4 << 10;

/// Smallest segment: twice the largest batch, so that batches do not decide where segments end.
const SEGMENT_BYTES_MIN: u64 = 2 * BATCH_BYTES_MAX as u64;

/// Other nodes that `--peer` may name. A node that joins a cluster names all of its members. The
/// size of the cluster is checked when it is formed.
const OTHERS_MAX: usize = MEMBERS_MAX;

/// With less, a shard would mostly write checkpoints.
const CHECKPOINT_BYTES_MIN: u64 = 64 << 10;

/// With less, a leader would begin rounds of compaction by key all the time.
const CLEANER_LAG_MIN: Duration = Duration::from_secs(1);

/// Nodes reconnect within about a second after a short outage.
const REPLACE_DOWN_AFTER_MIN: Duration = Duration::from_secs(1);

/// Valid node ids: a replica id has 32 bits for the node.
const NODE_IDS: std::ops::RangeInclusive<u64> = 1..=u32::MAX as u64;

/// More threads than any machine has CPUs; the start would run out of threads.
const WORKER_THREADS_MAX: usize = 1_024;

/// Longest host name of `--console-host`: as long as DNS allows.
const HOST_BYTES_MAX: usize = 253;

/// All problems of a configuration, one line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Never empty.
    pub problems: Vec<String>,
}

impl Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problems.join("\n"))
    }
}

impl std::error::Error for ConfigError {}

/// An invalid value, or a conflict with other settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ConfigProblem {
    /// The flag of the setting, without the dashes.
    pub(super) flag: &'static str,
    pub(super) value: String,
    pub(super) what: String,
}

impl Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { flag, value, what } = self;
        write!(f, "--{flag} {value}: {what}")
    }
}

impl ServerConfig {
    /// Checks ranges and combinations of settings.
    ///
    /// # Errors
    /// All problems, one line each.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let problems: Vec<String> = self.problems().iter().map(ConfigProblem::to_string).collect();
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }

    pub(super) fn problems(&self) -> Vec<ConfigProblem> {
        let mut problems = ConfigProblems::default();
        problems.expect(
            NODE_IDS.contains(&self.node_id),
            "node-id",
            &self.node_id,
            "choose a number in 1..=4294967295",
        );
        if let Some(shards) = self.shards {
            problems.expect(
                (1..=SHARDS_MAX).contains(&shards),
                "shards",
                &shards,
                "choose a number in 1..=64",
            );
        }
        let segment_sizes = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
        let is_size = segment_sizes.contains(&self.segment_bytes)
            && self.segment_bytes.is_multiple_of(SEGMENT_STEP);
        let what = "choose 16MiB to 1GiB, a multiple of 4KiB";
        problems.expect(is_size, "segment-bytes", &self.segment_bytes, what);
        self.check_memory(&mut problems);
        self.check_console(&mut problems);
        self.check_traces(&mut problems);
        let is_sparing = self.checkpoint_bytes >= CHECKPOINT_BYTES_MIN;
        let what = "choose at least 64KiB";
        problems.expect(is_sparing, "checkpoint-bytes", &self.checkpoint_bytes, what);
        let is_share = (1..=100).contains(&self.cleaner_dirty_percent);
        let what = "choose 1 to 100";
        problems.expect(is_share, "cleaner-dirty-percent", &self.cleaner_dirty_percent, what);
        let lag = self.cleaner_lag;
        let what = "choose at least 1s";
        problems.expect(lag >= CLEANER_LAG_MIN, "cleaner-lag", &format_args!("{lag:?}"), what);
        let timeouts = ELECTION_TIMEOUT_MS_MIN..=ELECTION_TIMEOUT_MS_MAX;
        problems.expect(
            timeouts.contains(&self.election_timeout_ms),
            "election-timeout-ms",
            &self.election_timeout_ms,
            "choose 150 to 3000",
        );
        let is_enough = self.copy_rate_max >= COPY_RATE_LEAST;
        problems.expect(is_enough, "copy-rate-max", &self.copy_rate_max, copy_rate::TOO_LOW);
        let is_named = self.cluster_id.as_ref().is_none_or(|name| !name.is_empty());
        problems.expect(is_named, "cluster-id", &"", "set a name, or omit the flag");
        if let Some(rack) = &self.rack {
            let is_named = !rack.trim().is_empty() && rack.len() <= RACK_BYTES_MAX;
            problems.expect(is_named, "rack", rack, "choose a name of 1 to 64 bytes");
        }
        if let Some(after) = self.replace_down_after {
            let is_patient = after >= REPLACE_DOWN_AFTER_MIN;
            let what = "choose at least 1s, or omit the flag";
            problems.expect(is_patient, "replace-down-after", &format_args!("{after:?}"), what);
        }
        if let Some(threads) = self.worker_threads {
            let is_sane = threads.get() <= WORKER_THREADS_MAX;
            problems.expect(is_sane, "worker-threads", &threads, "choose a number in 1..=1024");
        }
        let is_named = !self.data_dir.as_os_str().is_empty();
        problems.expect(is_named, "data-dir", &"", "name a directory");
        let time = self.default_retention_time;
        let what = "is less than a microsecond or more than 213503982d; write 0 for no limit";
        let is_exact = time.is_zero() || micros(time).is_some_and(|micros| micros > 0);
        problems.expect(is_exact, "default-retention-time", &format_args!("{time:?}"), what);
        let has_place = self.auth == AuthSetting::Off
            || self.storage == StorageMode::Durable
            || self.admin_token_file.is_some();
        let what = "name a file: with --auth and --storage memory there is no data directory";
        problems.expect(has_place, "admin-token-file", &"", what);
        self.check_topics(&mut problems);
        self.check_peers(&mut problems);
        self.check_addresses(&mut problems);
        self.check_socket(&mut problems);
        self.check_tls(&mut problems);
        self.check_jwt(&mut problems);
        problems.0
    }

    /// Returns the least memory limit with which a node takes these settings.
    pub fn memory_limit_min(&self) -> u64 {
        MemoryShares::limit_for(self.shard_count(), self.tail_bytes()).max(MEMORY_LIMIT_MIN)
    }

    /// Checks that the memory limit is large enough for the tails and shards.
    fn check_memory(&self, problems: &mut ConfigProblems) {
        let limit = show_bytes(self.memory_limit);
        if self.memory_limit < MEMORY_LIMIT_MIN {
            let what = format!("choose at least {}", show_bytes(MEMORY_LIMIT_MIN));
            return problems.expect(false, "memory-limit", &limit, &what);
        }
        let (shards, tail) = (self.shard_count(), self.tail_bytes());
        let fits = self.shares().footer_bytes(shards, tail).is_some();
        let least = show_bytes(MemoryShares::limit_for(shards, tail));
        let logs = show_bytes(self.shares().logs);
        if self.tail_bytes.is_some() {
            let what = format!(
                "the logs' share of --memory-limit {limit} is {logs}, too little for such tails of \
                 {shards} shards; choose less, or --memory-limit {least}"
            );
            return problems.expect(fits, "tail-bytes", &show_bytes(tail), &what);
        }
        let what = format!(
            "the logs' share of --memory-limit {limit} is {logs}, too little for so many shards; \
             choose fewer, or --memory-limit {least}"
        );
        let is_number = (1..=SHARDS_MAX).contains(&shards);
        problems.expect(fits || !is_number, "shards", &shards, &what);
    }

    fn check_topics(&self, problems: &mut ConfigProblems) {
        for (index, (name, partitions)) in self.topics.iter().enumerate() {
            let is_new = self.topics[..index].iter().all(|(earlier, _)| earlier != name);
            problems.expect(is_new, "topic", name, "is given twice; give each topic once");
            let shown = format!("{name}:{partitions}");
            let what = "a topic has at most 100000 partitions";
            problems.expect(*partitions <= PARTITIONS_PER_TOPIC_MAX, "topic", &shown, what);
        }
        let all = self.topics.iter().map(|(_, partitions)| u64::from(*partitions)).sum::<u64>();
        let what = "all topics together have at most 1000000 partitions";
        problems.expect(all <= PARTITIONS_MAX, "topic", &format!("{all} partitions"), what);
    }

    fn check_peers(&self, problems: &mut ConfigProblems) {
        for (index, (id, address)) in self.peers.iter().enumerate() {
            let shown = format!("{id}={address}");
            problems.expect(
                NODE_IDS.contains(id),
                "peer",
                &shown,
                "a node id must be in 1..=4294967295",
            );
            let is_new = self.peers[..index].iter().all(|(earlier, _)| earlier != id);
            problems.expect(
                is_new,
                "peer",
                &shown,
                "this node is given twice; give each node once",
            );
            let is_new = self.peers[..index].iter().all(|(_, earlier)| earlier != address);
            let what = "another node has this address; give each node its own";
            problems.expect(is_new, "peer", &shown, what);
            problems.expect_dialable("peer", &shown, address);
        }
        problems.expect(
            self.peers.is_empty() || self.peer_addr.port() != 0,
            "peer-addr",
            &self.peer_addr,
            "other nodes dial the port that --peer names for this node; choose that port",
        );
        problems.expect(
            self.other_nodes().len() <= OTHERS_MAX,
            "peer",
            &self.peers.len(),
            "a cluster has at most 32 nodes",
        );
    }

    fn check_addresses(&self, problems: &mut ConfigProblems) {
        if let Some(advertised) = &self.advertise_addr {
            problems.expect_dialable("advertise-addr", advertised, advertised);
        }
        let is_dialable = self.advertise_addr.is_some() || !self.listen_addr.ip().is_unspecified();
        problems.expect(
            is_dialable,
            "listen-addr",
            &self.listen_addr,
            "clients cannot dial the wildcard address; set a reachable address with \
             --advertise-addr host:port",
        );
        problems.expect(
            self.admin_addr.is_some() || self.default_admin_port().is_some(),
            "listen-addr",
            &self.listen_addr,
            "the default admin port is this port plus 552, which is more than 65535; choose one \
             with --admin-addr, or close it with --admin-addr off",
        );
        for (flag, addr) in self.exposed() {
            problems.expect(
                self.insecure,
                flag,
                &addr,
                match flag {
                    "listen-addr" => {
                        "other machines can reach this address, and the port does not require TLS \
                         and credentials; set --tls-cert and --tls-key, and --auth required or \
                         --tls-client-auth required with --tls-ca; or listen on 127.0.0.1, or add \
                         --insecure"
                    }
                    "peer-addr" => {
                        "other machines can reach this address, and nodes do not require TLS; set \
                         --tls-cert, --tls-key and --tls-ca, listen on 127.0.0.1, or add \
                         --insecure to allow every program to speak as a node"
                    }
                    _ => {
                        "other machines can reach this address, and the port does not require TLS, \
                         or its console no credentials; set --tls-admin required with --tls-cert, \
                         and --auth required or --console off; or listen on 127.0.0.1, or add \
                         --insecure"
                    }
                },
            );
        }
    }

    fn check_socket(&self, problems: &mut ConfigProblems) {
        if let Some(path) = &self.listen_socket {
            let address = format!("{UNIX_SCHEME}{}", path.display());
            let checked = match path.to_str() {
                Some(_) => parse_unix(&address).err(),
                None => Some("the path must be UTF-8".to_owned()),
            };
            let what = checked.as_deref().unwrap_or_default();
            problems.expect(checked.is_none(), "listen-socket", &address, what);
        }
        let mode = self.listen_socket_mode;
        let what = "choose permissions in 0000..=0777";
        problems.expect(mode.0 <= SocketMode::MAX.0, "listen-socket-mode", &mode, what);
    }

    fn check_console(&self, problems: &mut ConfigProblems) {
        let has_port = self.admin_listen_addr().is_some();
        let is_served = has_port || self.console != Some(ConsoleUse::On);
        let what = "the console is a part of the admin port; set --admin-addr, or --console off";
        problems.expect(is_served, "console", &"on", what);
        for name in &self.console_hosts {
            let is_name = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
            let is_host = (1..=HOST_BYTES_MAX).contains(&name.len()) && name.chars().all(is_name);
            let is_host = is_host && (!name.contains(':') || name.starts_with('['));
            let what = "name a host as in the browser's address, without scheme and port: \
                        console.example, 192.0.2.7 or [2001:db8::7]";
            problems.expect(is_host, "console-host", name, what);
        }
    }

    fn check_traces(&self, problems: &mut ConfigProblems) {
        let Some(endpoint) = &self.otlp_endpoint else {
            let what = "there is no collector; set --otlp-endpoint";
            let is_off = self.trace_sample.0 == 0;
            return problems.expect(is_off, "trace-sample", &self.trace_sample, what);
        };
        let what = "this program was built without traces; use one of a release, or build it with \
                    --features otlp";
        problems.expect(CAN_EXPORT, "otlp-endpoint", endpoint, what);
        let address = endpoint.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        match address {
            Some(address) => problems.expect_dialable("otlp-endpoint", endpoint, address),
            None => {
                let what = "write it as http://host:port; for TLS run a collector on this machine";
                problems.expect(false, "otlp-endpoint", endpoint, what);
            }
        }
    }

    /// Returns the listening addresses that other machines can reach without TLS or without
    /// credentials, with their flags. An admin port without console is read-only, so that TLS
    /// suffices.
    pub fn exposed(&self) -> Vec<(&'static str, SocketAddr)> {
        let is_open = |tls: TlsUse| tls != TlsUse::Required;
        let has_peers = !self.peers.is_empty() && is_open(self.peer_tls());
        let is_anonymous = self.tls_client_auth != ClientCertificates::Required
            && self.auth != AuthSetting::Required;
        let has_clients = is_open(self.client_tls()) || is_anonymous;
        let clients = has_clients.then_some(("listen-addr", self.listen_addr));
        let peers = has_peers.then_some(("peer-addr", self.peer_addr));
        // The console asks for no certificate.
        let changes = self.has_console() && self.auth != AuthSetting::Required;
        let admin = self.admin_listen_addr().filter(|_| is_open(self.tls_admin) || changes);
        let admin = admin.map(|addr| ("admin-addr", addr));
        let listened = clients.into_iter().chain(peers).chain(admin);
        listened.filter(|(_, addr)| !addr.ip().is_loopback()).collect()
    }
}

#[derive(Default)]
pub(super) struct ConfigProblems(Vec<ConfigProblem>);

impl ConfigProblems {
    /// Adds a problem unless `is_valid`.
    pub(super) fn expect(
        &mut self,
        is_valid: bool,
        flag: &'static str,
        value: &dyn Display,
        what: &str,
    ) {
        if !is_valid {
            self.0.push(ConfigProblem { flag, value: value.to_string(), what: what.to_owned() });
        }
    }

    /// Adds a problem unless `address` can be dialed.
    fn expect_dialable(&mut self, flag: &'static str, value: &dyn Display, address: &str) {
        let checked = check_dialable(address);
        self.expect(checked.is_ok(), flag, value, &checked.err().unwrap_or_default());
    }
}

/// Returns the microseconds of a duration, rounded down, if they fit.
fn micros(time: Duration) -> Option<u64> {
    u64::try_from(time.as_micros()).ok()
}

/// Formats a number of bytes; rounds down to whole MiB.
fn show_bytes(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => bytes.to_string(),
        _ => format!("{}MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AdminAddr, SampleShare};

    fn flags(config: &ServerConfig) -> Vec<&'static str> {
        config.problems().iter().map(|problem| problem.flag).collect()
    }

    #[test]
    fn the_memory_limit_must_cover_tails_and_shards() {
        let message = |config: &ServerConfig| config.validate().unwrap_err().to_string();
        let with_least = |config: &ServerConfig| {
            let said = message(config);
            let (_, least) = said.rsplit_once(' ').unwrap();
            let memory_limit = super::super::values::parse_bytes(least).unwrap();
            ServerConfig { memory_limit, ..config.clone() }
        };
        let default = ServerConfig::default();
        assert_eq!((default.memory_limit, default.tail_bytes()), (512 << 20, 16 << 20));
        let small = ServerConfig { memory_limit: 1 << 20, ..ServerConfig::default() };
        assert_eq!(message(&small), "--memory-limit 1MiB: choose at least 256MiB");
        let long = ServerConfig { tail_bytes: Some(200 << 20), ..ServerConfig::default() };
        assert_eq!(flags(&long), ["tail-bytes"]);
        with_least(&long).validate().unwrap();
        let many = ServerConfig { shards: Some(64), ..ServerConfig::default() };
        assert_eq!(flags(&many), ["shards"]);
        with_least(&many).validate().unwrap();
    }

    #[test]
    fn rejects_too_many_and_duplicate_peers() {
        let peer = |id: u64| (id, format!("n{id}:9192"));
        let with = |peers: Vec<(u64, String)>| ServerConfig { peers, ..ServerConfig::default() };
        let three = with(vec![peer(1), peer(2), peer(3)]);
        three.validate().unwrap();
        assert_eq!(three.other_nodes().keys().copied().collect::<Vec<_>>(), [2, 3]);
        assert_eq!((three.node_count(), three.shard_count()), (3, 1));
        with(vec![peer(2), peer(3)]).validate().unwrap();
        with(vec![peer(2)]).validate().unwrap();
        assert!(with((2..=34).map(peer).collect()).validate().is_err(), "too many");
        assert!(with(vec![peer(2), peer(2)]).validate().is_err(), "twice");
        assert!(with(vec![peer(0), peer(2)]).validate().is_err(), "invalid id");
    }

    #[test]
    fn an_error_names_the_flag_and_the_remedy() {
        let addr = "0.0.0.0:9092".parse().unwrap();
        let all = ServerConfig { listen_addr: addr, insecure: true, ..ServerConfig::default() };
        let message = all.validate().unwrap_err().to_string();
        assert!(message.starts_with("--listen-addr 0.0.0.0:9092: "), "{message}");
        assert!(message.contains("--advertise-addr host:port"), "{message}");
        let reachable = ServerConfig { advertise_addr: Some("n1:9092".to_owned()), ..all };
        reachable.validate().unwrap();
        let advertised =
            ServerConfig { advertise_addr: Some("n1".to_owned()), ..ServerConfig::default() };
        assert_eq!(flags(&advertised), ["advertise-addr"]);
        let with_segments =
            |segment_bytes| ServerConfig { segment_bytes, ..ServerConfig::default() };
        for bad in [1, SEGMENT_BYTES_MIN - SEGMENT_STEP, SEGMENT_BYTES_MIN + 1, 2 << 30] {
            assert_eq!(flags(&with_segments(bad)), ["segment-bytes"], "{bad}");
        }
        // The log accepts the same sizes.
        for segment_bytes in [SEGMENT_BYTES_MIN, SEGMENT_BYTES_MIN + SEGMENT_STEP, 1 << 30] {
            assert!(flags(&with_segments(segment_bytes)).is_empty());
            helix_wal::Options { segment_bytes, ..Default::default() }.check().unwrap();
        }
        let busy = ServerConfig { checkpoint_bytes: 1000, ..ServerConfig::default() };
        assert_eq!(flags(&busy), ["checkpoint-bytes"]);
        for cleaner_dirty_percent in [0, 101] {
            let wrong = ServerConfig { cleaner_dirty_percent, ..ServerConfig::default() };
            assert_eq!(flags(&wrong), ["cleaner-dirty-percent"]);
        }
        for cleaner_lag in [Duration::ZERO, Duration::from_millis(999)] {
            let hasty = ServerConfig { cleaner_lag, ..ServerConfig::default() };
            assert_eq!(flags(&hasty), ["cleaner-lag"]);
        }
        let halted = ServerConfig { copy_rate_max: (1 << 20) - 1, ..ServerConfig::default() };
        assert_eq!(flags(&halted), ["copy-rate-max"]);
        for election_timeout_ms in [0, 149, 3_001] {
            let hasty = ServerConfig { election_timeout_ms, ..ServerConfig::default() };
            assert_eq!(flags(&hasty), ["election-timeout-ms"]);
        }
        let twice = vec![("a".to_owned(), 1), ("a".to_owned(), 2)];
        assert_eq!(flags(&ServerConfig { topics: twice, ..ServerConfig::default() }), ["topic"]);
    }

    #[test]
    fn addresses_that_others_can_reach_need_insecure() {
        let all = |port: u16| SocketAddr::from(([0, 0, 0, 0], port));
        let open = ServerConfig {
            listen_addr: all(9092),
            advertise_addr: Some("n1:9092".to_owned()),
            peer_addr: all(9192),
            ..ServerConfig::default()
        };
        assert_eq!(flags(&open), ["listen-addr"], "without peers the peer port is closed");
        let peers = vec![(2, "n2:9192".to_owned()), (3, "n3:9192".to_owned())];
        let cluster = ServerConfig { peers, ..open };
        assert_eq!(flags(&cluster), ["listen-addr", "peer-addr"]);
        let message = cluster.validate().unwrap_err().to_string();
        assert!(message.contains("--insecure"), "{message}");
        let admin_addr = Some(AdminAddr::At(all(9644)));
        assert_eq!(flags(&ServerConfig { admin_addr, ..ServerConfig::default() }), ["admin-addr"]);
        let console = Some(ConsoleUse::On);
        let auth = AuthSetting::Required;
        let encrypted = ServerConfig {
            admin_addr,
            tls_cert: Some("node.pem".into()),
            tls_admin: TlsUse::Required,
            ..ServerConfig::default()
        };
        assert!(encrypted.exposed().is_empty() && !encrypted.has_console());
        let with_console = ServerConfig { console, ..encrypted.clone() };
        assert_eq!(with_console.exposed().len(), 1, "everyone could change everything");
        let with_tokens = ServerConfig { auth, ..encrypted };
        assert!(with_tokens.exposed().is_empty() && with_tokens.has_console());
        ServerConfig { insecure: true, ..cluster }.validate().unwrap();
    }

    #[test]
    fn ports_with_tls_and_credentials_need_no_insecure() {
        let all = |port: u16| SocketAddr::from(([0, 0, 0, 0], port));
        let exposed = |config: &ServerConfig| {
            config.exposed().into_iter().map(|(flag, _)| flag).collect::<Vec<_>>()
        };
        let encrypted = ServerConfig {
            listen_addr: all(9092),
            peer_addr: all(9192),
            admin_addr: Some(AdminAddr::At(all(9644))),
            peers: vec![(2, "n2:9192".to_owned())],
            tls_cert: Some("node.pem".into()),
            tls_admin: TlsUse::Required,
            ..ServerConfig::default()
        };
        assert_eq!(exposed(&encrypted), ["listen-addr"], "every client may do everything");
        let auth = AuthSetting::Required;
        let with_tokens = ServerConfig { auth, ..encrypted.clone() };
        assert_eq!(exposed(&with_tokens), [""; 0]);
        let tls_client_auth = ClientCertificates::Required;
        let with_certificates = ServerConfig { tls_client_auth, ..encrypted.clone() };
        assert_eq!(exposed(&with_certificates), [""; 0]);
        let auth = AuthSetting::Optional;
        let tls_client_auth = ClientCertificates::Optional;
        let optional = ServerConfig { auth, tls_client_auth, ..encrypted };
        assert_eq!(exposed(&optional), ["listen-addr"]);
        let mixed = Some(TlsUse::Optional);
        let mixed = ServerConfig { tls_clients: mixed, tls_peers: mixed, ..with_tokens };
        assert_eq!(exposed(&mixed), ["listen-addr", "peer-addr"]);
    }

    #[test]
    fn rejects_values_that_would_silently_become_others() {
        let default = ServerConfig::default;
        let listen = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let high = ServerConfig { listen_addr: listen(64_984), ..default() };
        assert_eq!(flags(&high), ["listen-addr"]);
        assert!(high.validate().unwrap_err().to_string().contains("--admin-addr off"));
        let closed = ServerConfig { admin_addr: Some(AdminAddr::Off), ..high };
        closed.validate().unwrap();
        ServerConfig { listen_addr: listen(64_983), ..default() }.validate().unwrap();

        for time in [Duration::from_nanos(999), Duration::MAX] {
            let config = ServerConfig { default_retention_time: time, ..default() };
            assert_eq!(flags(&config), ["default-retention-time"], "{time:?}");
        }
        let shortest = Duration::from_micros(1);
        ServerConfig { default_retention_time: shortest, ..default() }.validate().unwrap();

        let threads = std::num::NonZeroUsize::new(1_025);
        let config = ServerConfig { worker_threads: threads, ..default() };
        assert_eq!(flags(&config), ["worker-threads"]);
        let data_dir = std::path::PathBuf::new();
        assert_eq!(flags(&ServerConfig { data_dir, ..default() }), ["data-dir"]);
        let topics = vec![("a".to_owned(), 100_001)];
        assert_eq!(flags(&ServerConfig { topics, ..default() }), ["topic"]);
        let topics = (0..11).map(|number| (format!("t{number}"), 100_000)).collect();
        assert_eq!(flags(&ServerConfig { topics, ..default() }), ["topic"]);
    }

    #[test]
    fn the_console_is_on_where_it_opens_nothing() {
        let default = ServerConfig::default();
        assert!(default.has_console(), "only this machine can reach it");
        let tls_client_auth = ClientCertificates::Required;
        let by_certificate = ServerConfig { tls_client_auth, ..default.clone() };
        assert!(!by_certificate.has_console());
        let auth = AuthSetting::Required;
        assert!(ServerConfig { auth, ..by_certificate }.has_console());
        let off = ServerConfig { console: Some(ConsoleUse::Off), ..default.clone() };
        assert!(!off.has_console());
        let closed = ServerConfig { admin_addr: Some(AdminAddr::Off), ..default };
        assert!(!closed.has_console());
        let closed = ServerConfig { console: Some(ConsoleUse::On), ..closed };
        assert_eq!(flags(&closed), ["console"]);
        let named = |name: &str| ServerConfig {
            console_hosts: vec![name.to_owned()],
            ..ServerConfig::default()
        };
        for name in ["console.example", "192.0.2.7", "[2001:db8::7]"] {
            named(name).validate().unwrap();
        }
        for name in ["", "https://console.example", "console.example:9644", "a b", "a/b"] {
            assert_eq!(flags(&named(name)), ["console-host"], "{name:?}");
        }
    }

    #[test]
    fn traces_need_a_collector_and_a_program_that_can_send_them() {
        let default = ServerConfig::default();
        assert_eq!((default.otlp_endpoint.as_deref(), default.trace_sample.0), (None, 0));
        let sampled = ServerConfig { trace_sample: SampleShare(10_000), ..default };
        assert_eq!(flags(&sampled), ["trace-sample"]);
        let message = sampled.validate().unwrap_err().to_string();
        assert!(message.starts_with("--trace-sample 0.01: "), "{message}");
        assert!(message.contains("set --otlp-endpoint"), "{message}");
        let with = |endpoint: &str| ServerConfig {
            otlp_endpoint: Some(endpoint.to_owned()),
            ..sampled.clone()
        };
        let accepted = with("http://127.0.0.1:4317/");
        match CAN_EXPORT {
            true => accepted.validate().unwrap(),
            false => {
                let message = accepted.validate().unwrap_err().to_string();
                assert!(message.contains("built without traces"), "{message}");
            }
        }
        for wrong in ["127.0.0.1:4317", "https://127.0.0.1:4317", "http://127.0.0.1", ""] {
            let found = flags(&with(wrong));
            assert_eq!(found.last(), Some(&"otlp-endpoint"), "{wrong:?}");
            assert_eq!(found.len(), 1 + usize::from(!CAN_EXPORT), "{wrong:?}");
        }
    }

    #[test]
    fn a_socket_has_an_absolute_path_that_the_kernel_accepts() {
        let with = |path: &str| ServerConfig {
            listen_socket: Some(path.into()),
            ..ServerConfig::default()
        };
        with("/run/helix/helix.sock").validate().unwrap();
        assert_eq!(with("/run/helix/helix.sock").exposed(), [], "only this machine can reach it");
        for wrong in ["helix.sock", "/run/", "", &format!("/{}", "p".repeat(108))] {
            assert_eq!(flags(&with(wrong)), ["listen-socket"], "{wrong:?}");
        }
        let listen_socket_mode = SocketMode(0o1777);
        let config = ServerConfig { listen_socket_mode, ..ServerConfig::default() };
        assert_eq!(flags(&config), ["listen-socket-mode"]);
    }

    #[test]
    fn rejects_addresses_that_no_program_can_dial() {
        for wrong in ["n1", "::1:9092", "http://n1:9092", "n1:0", " n1:9092", "0.0.0.0:9092"] {
            let advertise_addr = Some(wrong.to_owned());
            let config = ServerConfig { advertise_addr, ..ServerConfig::default() };
            assert_eq!(flags(&config), ["advertise-addr"], "{wrong:?}");
            let peers = vec![(2, wrong.to_owned())];
            let config = ServerConfig { peers, ..ServerConfig::default() };
            assert_eq!(flags(&config), ["peer"], "{wrong:?}");
        }
        let peers = vec![(2, "n2:9192".to_owned()), (3, "n2:9192".to_owned())];
        let shared = ServerConfig { peers: peers.clone(), ..ServerConfig::default() };
        assert_eq!(flags(&shared), ["peer"]);
        let peer_addr = SocketAddr::from(([127, 0, 0, 1], 0));
        let free = ServerConfig { peer_addr, ..ServerConfig::default() };
        free.validate().unwrap();
        let free = ServerConfig { peers: peers[..1].to_vec(), ..free };
        assert_eq!(flags(&free), ["peer-addr"]);
    }

    #[test]
    fn reports_every_problem() {
        let config = ServerConfig {
            node_id: 0,
            shards: Some(0),
            segment_bytes: 1,
            ..ServerConfig::default()
        };
        assert_eq!(flags(&config), ["node-id", "shards", "segment-bytes"]);
        let message = config.validate().unwrap_err().to_string();
        assert_eq!(message.lines().count(), 3, "{message}");
    }
}
